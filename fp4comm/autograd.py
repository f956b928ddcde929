"""Dispatch and combine as differentiable functions. The backward of each is the other, with a wire format of its own.

    dispatch            x        -> recv_x        leg dispatch
    backward of it      grad_x   <- grad_recv_x   leg grad_combine:  sum over the ranks that a token went to
    combine             y        -> combined_x    leg combine
    backward of it      grad_y   <- grad_out      leg grad_dispatch: along the same routes as dispatch

Routing weights travel to the experts inside the rows of dispatch, and their gradients come home inside the rows of
grad_combine, so neither needs a message of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backends import Rows, backend_for
from .exchange import Exchange, WireRows
from .precision import Precision
from .routing import ExpertLayout, SendPlan, plan_experts


@dataclass(eq=False)
class Routing:
    """The routes of one dispatch, on this rank. No tensor in it belongs to an autograd graph.

    Attributes:
        plan: rows sent.
        rows_from_rank: rows received from each rank.
        layout: "rank" or "expert", the order of the rows that experts see.
        alignment: rows per expert are padded to a multiple of it (expert layout).
        num_rows: fixed number of rows that experts see; None = as many as arrive.
        recv_topk_idx: `[num_recv_tokens, num_topk]` int32, local experts, -1 = not here. Known on arrival, as the rest.
        recv_topk_weights: same shape, float32.
        num_recv_tokens_per_expert: `[num_local_experts]` int64.
        experts: the expert layout, if that is the layout.
    """

    plan: SendPlan
    rows_from_rank: list[int]
    layout: str
    alignment: int
    num_rows: int | None
    recv_topk_idx: Tensor | None = None
    recv_topk_weights: Tensor | None = None
    num_recv_tokens_per_expert: Tensor | None = None
    experts: ExpertLayout | None = None

    @property
    def num_recv_tokens(self) -> int:
        return sum(self.rows_from_rank)

    def source_rows(self) -> Tensor | None:
        """`[rows that experts see]` int64, the received row behind each; -1 = padding. None = as they arrived."""
        if self.experts is not None:
            return self.experts.rows
        if self.num_rows is None:
            return None
        rows = torch.full((self.num_rows,), -1, dtype=torch.int64)
        rows[: self.num_recv_tokens] = torch.arange(self.num_recv_tokens)
        return rows

    def num_expert_rows(self) -> int:
        """How many rows experts see."""
        if self.experts is not None:
            return self.experts.rows.shape[0]
        return self.num_recv_tokens if self.num_rows is None else self.num_rows

    def read(self, arrived: WireRows, num_local_experts: int) -> None:
        """Takes the routing metadata from rows that have arrived."""
        backend = backend_for(arrived.buffer)
        idx, weights, counts = backend.read_meta(arrived.buffer, arrived.layout, arrived.num_topk, num_local_experts)
        self.recv_topk_idx, self.recv_topk_weights, self.num_recv_tokens_per_expert = idx, weights, counts
        if self.layout == "expert":
            self.experts = plan_experts(idx, counts, self.alignment, self.num_rows)

    def expert_weights(self) -> Tensor:
        """The weights as experts see them: `[num_expert_rows]` in the expert layout, else `[num_rows, num_topk]`."""
        if self.experts is not None:
            return self.experts.from_slots(self.recv_topk_weights)
        return _pad_rows(self.recv_topk_weights, self.num_expert_rows())

    def slot_values(self, values: Tensor) -> Tensor:
        """The reverse of `expert_weights` for values of that shape: `[num_recv_tokens, num_topk]`."""
        return values[: self.num_recv_tokens] if self.experts is None else self.experts.to_slots(values)


def _pad_rows(values: Tensor, num_rows: int) -> Tensor:
    if values.shape[0] == num_rows:
        return values
    padded = values.new_zeros(num_rows, *values.shape[1:])
    padded[: values.shape[0]] = values
    return padded


@dataclass(eq=False)
class DispatchCall:
    """What one dispatch needs besides its differentiable inputs, and what it leaves besides its differentiable outputs.

    Attributes:
        exchange: moves the rows.
        precision: wire formats.
        routing: the routes; completed on arrival if they are new.
        source: the rows of x, of any kind.
        out_dtype: dtype of recv_x; None = no recv_x.
        arrived: the received rows, set by the dispatch.
    """

    exchange: Exchange
    precision: Precision
    routing: Routing
    source: Rows
    out_dtype: torch.dtype | None
    arrived: WireRows | None = None


class Dispatch(torch.autograd.Function):
    """`(x, topk_weights, call) -> (recv_x, recv_topk_weights, anchor)`.

    `anchor` is a scalar that combine takes as an input. It ties the backward of this dispatch to the backward of its
    combine on every rank, also on one whose experts got no rows and so left the graph unconnected: backward
    passes are collective too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, topk_weights: Tensor | None, call: DispatchCall
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        exchange, routing, leg = call.exchange, call.routing, call.precision.dispatch
        is_new = routing.recv_topk_idx is None
        call.arrived = exchange.to_experts(
            "dispatch", leg, call.source, routing.plan, routing.rows_from_rank, topk_weights, with_routing=is_new
        )
        if is_new:
            routing.read(call.arrived, exchange.num_experts // exchange.transport.num_ranks)
        ctx.exchange, ctx.precision, ctx.routing = exchange, call.precision, routing
        ctx.x_dtype = torch.float32 if x is None else x.dtype
        ctx.set_materialize_grads(False)
        recv_x = None
        if call.out_dtype is not None:
            recv_x = torch.empty(routing.num_expert_rows(), exchange.hidden, dtype=call.out_dtype)
            exchange.unpack("dispatch", leg, call.arrived, Rows.of(recv_x), routing.source_rows())
        return recv_x, routing.expert_weights(), torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_recv_x: Tensor | None, grad_weights: Tensor | None, _anchor: Tensor | None) -> tuple:
        exchange, routing = ctx.exchange, ctx.routing
        if grad_recv_x is None:
            grad_recv_x = torch.zeros(routing.num_expert_rows(), exchange.hidden, dtype=ctx.x_dtype)
        slot_grads = None
        if ctx.needs_input_grad[1]:
            grad_weights = torch.zeros_like(routing.expert_weights()) if grad_weights is None else grad_weights
            slot_grads = routing.slot_values(grad_weights)
        grad_x = torch.empty(routing.plan.num_tokens, exchange.hidden, dtype=ctx.x_dtype)
        grad_topk_weights = exchange.to_tokens(
            "grad_combine",
            ctx.precision.grad_combine,
            Rows.of(grad_recv_x.contiguous()),
            routing.plan,
            routing.rows_from_rank,
            grad_x,
            None if routing.experts is None else routing.experts.slot_rows,
            slot_values=slot_grads,
        )
        return grad_x if ctx.needs_input_grad[0] else None, grad_topk_weights, None


class Combine(torch.autograd.Function):
    """`(y, recv_topk_weights, anchor) -> combined_x`; the weights are applied here unless they are None."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        recv_topk_weights: Tensor | None,
        anchor: Tensor,
        exchange: Exchange,
        precision: Precision,
        routing: Routing,
    ) -> Tensor:
        combined_x = torch.empty(routing.plan.num_tokens, exchange.hidden, dtype=y.dtype)
        exchange.to_tokens(
            "combine",
            precision.combine,
            Rows.of(y),
            routing.plan,
            routing.rows_from_rank,
            combined_x,
            None if routing.experts is None else routing.experts.slot_rows,
            None if recv_topk_weights is None else routing.recv_topk_weights,
        )
        ctx.exchange, ctx.precision, ctx.routing = exchange, precision, routing
        ctx.is_weighted = recv_topk_weights is not None
        ctx.y_like = (y.shape, y.dtype)
        # the product with y is needed for the gradient of the weights alone
        ctx.save_for_backward(y if ctx.is_weighted and ctx.needs_input_grad[1] else None, recv_topk_weights)
        return combined_x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple:
        exchange, routing, leg = ctx.exchange, ctx.routing, ctx.precision.grad_dispatch
        y, recv_topk_weights = ctx.saved_tensors
        shape, dtype = ctx.y_like
        grad_rows = Rows.of(grad_out.contiguous())
        arrived = exchange.to_experts("grad_dispatch", leg, grad_rows, routing.plan, routing.rows_from_rank)
        grad_y = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_y = torch.empty(shape, dtype=dtype)
            source_rows = routing.source_rows()
            exchange.unpack("grad_dispatch", leg, arrived, Rows.of(grad_y), source_rows, recv_topk_weights)
        if y is not None:
            grad_weights = exchange.dot(leg, Rows.of(y), arrived, routing.experts.rows)
        return grad_y, grad_weights, torch.zeros(()), None, None, None
