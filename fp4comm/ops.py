"""`fp4comm::dispatch` and `fp4comm::combine` as operators of torch: for `torch.compile(fullgraph=True)`.

To a compiler a communicator's calls are opaque: it can't look into a `Handle`. Here a handle holds a tensor, a scalar
whose value names the real one for as long as its memory lives. It is differentiable, with a gradient of zero, so that
backward of a dispatch follows backward of its combine on every rank, also on one whose experts got no rows.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .autograd import combine_gradients, dispatch_gradients
from .communicator import BY_NAME, EPCommunicator, Handle
from .errors import InvalidArgument, require
from .routing import worst_case_expert_rows

__all__ = ["CompiledHandle", "CompiledReceived", "combine", "dispatch"]

_handles: dict[int, Handle] = {}
_numbers = itertools.count(1)


class CompiledHandle(NamedTuple):
    """What `combine` needs of a dispatch. Opaque."""

    token: Tensor
    num_tokens: int


class CompiledReceived(NamedTuple):
    """What arrived, as in `fp4comm.Received`; expert_offsets is empty in layout "rank"."""

    x: Tensor
    topk_weights: Tensor
    topk_idx: Tensor
    expert_offsets: Tensor


def dispatch(
    comm: EPCommunicator, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None = None, *, layout: str = "expert"
) -> tuple[CompiledReceived, CompiledHandle]:
    """`EPCommunicator.dispatch` with new routes, for code that is compiled. Collective.

    Args:
        comm: made outside of the compiled code.
        x, topk_idx, topk_weights, layout: as there; x is a tensor.

    Returns:
        What arrived, and the handle for `combine`. Differentiable in x and topk_weights.
    """
    has_gradient = [torch.is_grad_enabled() and part is not None and part.requires_grad for part in (x, topk_weights)]
    *received, token = torch.ops.fp4comm.dispatch(x, topk_idx, topk_weights, comm.name, layout, *has_gradient)
    return CompiledReceived(*received), CompiledHandle(token, x.shape[0])


def combine(comm: EPCommunicator, y: Tensor, recv_topk_weights: Tensor, handle: CompiledHandle) -> Tensor:
    """`EPCommunicator.combine`, for code that is compiled. Collective.

    Args:
        comm: that of the dispatch.
        y: results of the experts, in the order of the rows that they got.
        recv_topk_weights: what the dispatch returned; in layout "expert" y is multiplied by it.
        handle: of the dispatch.

    Returns:
        `[num_tokens, hidden]`, dtype of y. Differentiable in y and recv_topk_weights.
    """
    combined_x: Tensor = torch.ops.fp4comm.combine(y, recv_topk_weights, handle.token, comm.name, handle.num_tokens)
    return combined_x


def _communicator(name: str) -> EPCommunicator:
    comm = BY_NAME.get(name)
    if comm is None:
        raise InvalidArgument("comm is gone; accepted: an EPCommunicator that lives as long as the compiled code")
    return comm


def _handle_of(token: Tensor, comm: str) -> Handle:
    handle = _handles.get(int(token))
    if handle is None:
        accepted = "what it returned, unchanged; in compiled code without hooks that save copies of tensors"
        raise InvalidArgument(f"handle is not of a dispatch that is still known; accepted: {accepted}")
    require(handle.owner is _communicator(comm), "handle", "of another communicator", "one of the same")
    return handle


def _token_of(handle: Handle) -> Tensor:
    number = next(_numbers)
    memory = np.full((), number, np.float64)  # lives as long as any tensor over it, as autograd makes
    _handles[number] = handle
    weakref.finalize(memory, _handles.pop, number, None).atexit = False
    return torch.from_numpy(memory)


@torch.library.custom_op("fp4comm::dispatch", mutates_args=())
def _dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    comm: str,
    layout: str,
    x_has_gradient: bool = False,
    weights_have_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    facts = {"gradient of x": x_has_gradient, "gradient of topk_weights": weights_have_gradient}
    with torch.no_grad():
        received, handle = _communicator(comm)._dispatch(x, topk_idx, topk_weights, None, layout, None, facts)
    assert isinstance(received.x, Tensor)
    offsets = received.expert_offsets
    if offsets is None:
        offsets = torch.empty(0, dtype=torch.int32, device=x.device)
    # an operator's results must not be parts of each other, nor of what the handle keeps: they become parts of a graph,
    # which would then keep the token alive, and that the handle
    token = _token_of(replace(handle, topk_weights=handle.routing.recv_topk_weights))
    return received.x, received.topk_weights, received.topk_idx.clone(), offsets.clone(), token


@_dispatch.register_fake
def _dispatch_shapes(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    comm: str,
    layout: str,
    x_has_gradient: bool = False,
    weights_have_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    owner = _communicator(comm)
    num_topk, capacity = topk_idx.shape[1], owner.num_max_tokens_per_rank
    num_tokens: Any = None
    if capacity is None:
        num_tokens = torch.library.get_ctx().new_dynamic_size()
        num_rows = num_tokens if layout == "rank" else torch.library.get_ctx().new_dynamic_size()
    else:
        num_tokens = owner.num_ranks * capacity
        sizes = (num_tokens, num_topk, owner.num_local_experts, owner.expert_alignment)
        num_rows = num_tokens if layout == "rank" else worst_case_expert_rows(*sizes)
    weights_shape = (num_rows, num_topk) if layout == "rank" else (num_rows,)
    return (
        x.new_empty(num_rows, x.shape[1]),
        x.new_empty(weights_shape, dtype=torch.float32),
        x.new_empty((num_tokens, num_topk), dtype=torch.int32),
        x.new_empty(0 if layout == "rank" else owner.num_local_experts, dtype=torch.int32),
        x.new_empty((), dtype=torch.float64, device="cpu"),
    )


@torch.library.custom_op("fp4comm::dispatch_backward", mutates_args=())
def _dispatch_backward(
    grad_recv_x: Tensor, grad_weights: Tensor | None, token: Tensor, comm: str, num_tokens: int, num_topk: int
) -> tuple[Tensor, Tensor]:
    handle = _handle_of(token, comm)
    exchange, routing = handle.owner._exchange, handle.routing
    grad_x, grad_topk_weights = dispatch_gradients(exchange, routing, grad_recv_x, grad_weights, grad_recv_x.dtype)
    return grad_x, grad_x.new_empty(0, dtype=torch.float32) if grad_topk_weights is None else grad_topk_weights


@_dispatch_backward.register_fake
def _dispatch_backward_shapes(
    grad_recv_x: Tensor, grad_weights: Tensor | None, token: Tensor, comm: str, num_tokens: int, num_topk: int
) -> tuple[Tensor, Tensor]:
    shape = (0,) if grad_weights is None else (num_tokens, num_topk)
    grad_x = grad_recv_x.new_empty(num_tokens, grad_recv_x.shape[1])
    return grad_x, grad_recv_x.new_empty(shape, dtype=torch.float32)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, topk_idx, _, ctx.comm, *_ = inputs
    ctx.num_tokens, ctx.num_topk = x.shape[0], topk_idx.shape[1]
    ctx.save_for_backward(output[4])
    ctx.token = output[4].detach()  # its memory must live, too, where hooks save copies


def _gradients_of_dispatch(
    ctx: Any, grad_recv_x: Tensor, grad_weights: Tensor, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    (token,) = ctx.saved_tensors
    grad_weights_or_none = grad_weights if ctx.needs_input_grad[2] else None
    sizes = (ctx.comm, ctx.num_tokens, ctx.num_topk)
    grad_x, grad_topk_weights = torch.ops.fp4comm.dispatch_backward(grad_recv_x, grad_weights_or_none, token, *sizes)
    return grad_x, None, grad_topk_weights if ctx.needs_input_grad[2] else None, None, None, None, None


_dispatch.register_autograd(_gradients_of_dispatch, setup_context=_save_dispatch)


@torch.library.custom_op("fp4comm::combine", mutates_args=())
def _combine(y: Tensor, recv_topk_weights: Tensor, token: Tensor, comm: str, num_tokens: int) -> Tensor:
    try:
        handle = _handle_of(token, comm)
        if handle.layout == "expert":
            _check_weights(recv_topk_weights, handle.routing.num_rows)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        _communicator(comm)._agree("combine", {}, error)
        raise
    if handle.layout == "expert":  # the weights that are given, which need not be those that arrived
        given = handle.routing.slot_values(recv_topk_weights)
        routing = replace(handle.routing, recv_topk_weights=given)
        handle = replace(handle, routing=routing, topk_weights=recv_topk_weights)
    with torch.no_grad():
        return handle.owner.combine(y, handle)


def _check_weights(weights: Tensor, num_rows: int) -> None:
    is_right = weights.dtype == torch.float32 and weights.shape == (num_rows,)
    found = f"{list(weights.shape)} of {weights.dtype}"
    require(is_right, "recv_topk_weights", found, f"[{num_rows}] of torch.float32")


@_combine.register_fake
def _combine_shape(y: Tensor, recv_topk_weights: Tensor, token: Tensor, comm: str, num_tokens: int) -> Tensor:
    return y.new_empty(num_tokens, y.shape[1])


@torch.library.custom_op("fp4comm::combine_backward", mutates_args=())
def _combine_backward(
    grad_out: Tensor, y: Tensor | None, recv_topk_weights: Tensor, token: Tensor, comm: str
) -> tuple[Tensor, Tensor]:
    handle = _handle_of(token, comm)
    exchange, routing = handle.owner._exchange, handle.routing
    weights = recv_topk_weights if routing.layout == "expert" else None
    rows = None if weights is None else y
    grad_y, grad_weights = combine_gradients(exchange, routing, grad_out, rows, weights, grad_out.dtype)
    assert grad_y is not None
    return grad_y, torch.zeros_like(recv_topk_weights) if grad_weights is None else grad_weights


@_combine_backward.register_fake
def _combine_backward_shapes(
    grad_out: Tensor, y: Tensor | None, recv_topk_weights: Tensor, token: Tensor, comm: str
) -> tuple[Tensor, Tensor]:
    grad_y = grad_out.new_empty(recv_topk_weights.shape[0], grad_out.shape[1])
    return grad_y, torch.empty_like(recv_topk_weights)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, recv_topk_weights, token, ctx.comm, _ = inputs
    ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, recv_topk_weights, token)
    ctx.token = token.detach()  # as that of the dispatch


def _gradients_of_combine(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    y, recv_topk_weights, token = ctx.saved_tensors
    grad_y, grad_weights = torch.ops.fp4comm.combine_backward(grad_out, y, recv_topk_weights, token, ctx.comm)
    return grad_y, grad_weights if ctx.needs_input_grad[1] else None, torch.zeros_like(token), None, None


_combine.register_autograd(_gradients_of_combine, setup_context=_save_combine)
