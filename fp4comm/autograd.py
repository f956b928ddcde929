"""Dispatch and combine as differentiable functions. The backward of each is the other, with a wire format of its own.

    dispatch            x        -> recv_x        leg dispatch
    backward of it      grad_x   <- grad_recv_x   leg grad_combine:  sum over the ranks that a token went to
    combine             y        -> combined_x    leg combine
    backward of it      grad_y   <- grad_out      leg grad_dispatch: along the same routes as dispatch

Routing weights travel to the experts inside the rows of dispatch, and their gradients come home inside the rows of
grad_combine, so neither needs a message of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backends import Rows
from .exchange import Exchange, WireRows
from .memory import empty
from .routing import Routing


def unpack_dispatch(
    exchange: Exchange, arrived: WireRows, routing: Routing, dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What `Dispatch` computes, without a graph; arguments and results as there."""
    recv_x = None if dtype is None else exchange.received_rows(arrived, routing, dtype)
    return recv_x, routing.weights_for_experts(), torch.zeros((), device="cpu")


def sum_combine(y: Tensor, recv_topk_weights: Tensor | None, exchange: Exchange, routing: Routing) -> Tensor:
    """What `Combine` computes, without a graph; arguments and result as there."""
    combined_x = empty((routing.plan.num_tokens, exchange.hidden), y.dtype, y.device)
    exchange.to_tokens("combine", Rows.of(y), routing, combined_x, recv_topk_weights is not None)
    return combined_x


def dispatch_gradients(
    exchange: Exchange, routing: Routing, grad_recv_x: Tensor, grad_weights: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Of x in that dtype, and of topk_weights if that of recv_topk_weights is given."""
    slot_grads = None if grad_weights is None else routing.slot_values(grad_weights)
    grad_x = empty((routing.plan.num_tokens, exchange.hidden), dtype, grad_recv_x.device)
    rows = Rows.of(grad_recv_x)
    return grad_x, exchange.to_tokens("grad_combine", rows, routing, grad_x, slot_values=slot_grads)


def combine_gradients(
    exchange: Exchange,
    routing: Routing,
    grad_out: Tensor,
    y: Tensor | None,
    recv_topk_weights: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Of y in that dtype, None = not wanted; and of recv_topk_weights if y is given."""
    send = exchange.pack_again("grad_dispatch", Rows.of(grad_out), routing)
    arrived = exchange.to_experts("grad_dispatch", send, routing.sizes)
    grad_y = grad_weights = None
    if dtype is not None:
        grad_y = empty((routing.num_rows, exchange.hidden), dtype, grad_out.device)
        exchange.unpack("grad_dispatch", arrived, Rows.of(grad_y), routing, recv_topk_weights)
    arrived = exchange.settle(arrived, is_read=dtype is not None)
    if y is not None:
        assert routing.source_rows is not None, "weights are applied in the expert layout"
        grad_weights = exchange.dot("grad_dispatch", Rows.of(y), arrived, routing.source_rows)
    return grad_y, grad_weights


class Dispatch(torch.autograd.Function):
    """`(x, topk_weights, exchange, arrived, routing, dtype) -> (recv_x, recv_topk_weights, anchor)`.

    The rows have travelled already (`arrived`), since only the unpacking makes something that autograd must know.
    x and topk_weights are there for their gradients; dtype None = no recv_x.

    `anchor` is a scalar that combine takes as an input. It ties the backward of this dispatch to the backward of its
    combine on every rank, also on one whose experts got no rows and so left the graph unconnected: backward
    passes are collective too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        topk_weights: Tensor | None,
        exchange: Exchange,
        arrived: WireRows,
        routing: Routing,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        ctx.exchange, ctx.routing = exchange, routing
        ctx.x_dtype = torch.float32 if x is None else x.dtype
        ctx.set_materialize_grads(False)
        recv_x, recv_topk_weights, anchor = unpack_dispatch(exchange, arrived, routing, dtype)
        needs_x, needs_weights, *_ = ctx.needs_input_grad
        constant = [recv_x] * (not needs_x and recv_x is not None) + [recv_topk_weights] * (not needs_weights)
        ctx.mark_non_differentiable(*constant)
        return recv_x, recv_topk_weights, anchor

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_recv_x: Tensor | None, grad_weights: Tensor | None, _anchor: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        exchange, routing = ctx.exchange, ctx.routing
        if grad_recv_x is None:
            device = routing.recv_topk_weights.device
            grad_recv_x = torch.zeros(routing.num_rows, exchange.hidden, dtype=ctx.x_dtype, device=device)
        if not ctx.needs_input_grad[1]:
            grad_weights = None
        elif grad_weights is None:
            grad_weights = torch.zeros_like(routing.weights_for_experts())
        grad_x, grad_topk_weights = dispatch_gradients(exchange, routing, grad_recv_x, grad_weights, ctx.x_dtype)
        return grad_x if ctx.needs_input_grad[0] else None, grad_topk_weights, None, None, None, None


class Combine(torch.autograd.Function):
    """`(y, recv_topk_weights, anchor, exchange, routing) -> combined_x`; weights None = they are not applied here."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, recv_topk_weights: Tensor | None, anchor: Tensor, exchange: Exchange, routing: Routing
    ) -> Tensor:
        is_weighted = recv_topk_weights is not None
        combined_x = sum_combine(y, recv_topk_weights, exchange, routing)
        ctx.exchange, ctx.routing, ctx.y_dtype = exchange, routing, y.dtype
        # only the gradient of the weights needs y
        ctx.save_for_backward(y if is_weighted and ctx.needs_input_grad[1] else None, recv_topk_weights, anchor)
        return combined_x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        exchange, routing = ctx.exchange, ctx.routing
        y, recv_topk_weights, _ = ctx.saved_tensors
        dtype = ctx.y_dtype if ctx.needs_input_grad[0] else None
        grad_y, grad_weights = combine_gradients(exchange, routing, grad_out, y, recv_topk_weights, dtype)
        return grad_y, grad_weights, torch.zeros((), device="cpu"), None, None
