"""Checks of what users pass to a communicator, at the public edge and before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .backends import backend_for
from .codec import FLOAT_DTYPES, FP8Tensor
from .errors import counted, is_count, require
from .formats import BLOCK_SIZE

if TYPE_CHECKING:
    from .communicator import EPCommunicator, Handle

_MAX_LOCAL_EXPERTS = 2**15 - 1  # local expert indices travel as int16


def check_sizes(
    num_experts: int, hidden: int, expert_alignment: int, num_max_tokens_per_rank: int | None, seed: int, num_ranks: int
) -> None:
    """Checks the sizes that a communicator is made for."""
    require(
        is_count(num_experts, 1) and num_experts % num_ranks == 0,
        "num_experts",
        repr(num_experts),
        f"a positive multiple of the number of ranks, {num_ranks}",
    )
    require(
        num_experts // num_ranks <= _MAX_LOCAL_EXPERTS,
        "num_experts",
        num_experts,
        f"at most {_MAX_LOCAL_EXPERTS} a rank, on {counted(num_ranks, 'rank')}",
    )
    require(
        is_count(hidden, 1) and hidden % BLOCK_SIZE == 0,
        "hidden",
        repr(hidden),
        f"a positive multiple of {BLOCK_SIZE}",
    )
    require(is_count(expert_alignment, 1), "expert_alignment", repr(expert_alignment), "a positive integer")
    require(
        num_max_tokens_per_rank is None or is_count(num_max_tokens_per_rank, 1),
        "num_max_tokens_per_rank",
        repr(num_max_tokens_per_rank),
        "a positive integer or None",
    )
    require(is_count(seed, 0) and seed < 2**64, "seed", repr(seed), "an integer from 0 to 2**64 - 1")


def check_resources(num_sms: int | None, max_buffer_bytes: int, check_inputs: bool | None) -> None:
    """Checks what a communicator may take of a device, and of the time."""
    require(check_inputs in (None, True, False), "check_inputs", repr(check_inputs), "True, False or None")
    require(num_sms is None or is_count(num_sms, 1), "num_sms", repr(num_sms), "a positive integer or None")
    require(is_count(max_buffer_bytes, 1), "max_buffer_bytes", repr(max_buffer_bytes), "a positive integer")


def check_dispatch(
    comm: EPCommunicator,
    x: Tensor | FP8Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    handle: Handle | None,
    layout: str | None,
    out: torch.dtype | str | None,
) -> None:
    """Checks the arguments of `EPCommunicator.dispatch`."""
    if not isinstance(x, FP8Tensor):
        _check_rows("x", x, comm.hidden, "a tensor or an FP8Tensor")
    data = x.data if isinstance(x, FP8Tensor) else x
    _check_device("x", data, comm)
    num_tokens, hidden = data.shape
    require(hidden == comm.hidden, "x", f"{hidden} wide", f"[num_tokens, {comm.hidden}]")
    require(layout in (None, "expert", "rank"), "layout", repr(layout), "'expert' or 'rank'")
    accepted = f"None, 'fp8', 'fp8_rows' or one of {FLOAT_DTYPES}"
    require(out is None or out in ("fp8", "fp8_rows") or out in FLOAT_DTYPES, "out", repr(out), accepted)
    wants_fp8 = isinstance(out, str)
    is_rank_layout = (layout if handle is None else getattr(handle, "layout", None)) == "rank"
    require(out != "fp8_rows" or not is_rank_layout, "out", "'fp8_rows'", "'fp8_rows' in layout 'expert'")
    require(
        not wants_fp8 or not comm.precision.leg("dispatch").hadamard,
        "out",
        repr(out),
        "a float dtype, since the dispatch leg uses the Hadamard transform, whose reverse is not FP8",
    )
    wants_gradient = torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
    require(
        not wants_fp8 or not wants_gradient,
        "x",
        "in need of a gradient",
        f"x.detach() with out={out!r}, since autograd has no FP8 rows: the caller must bring their gradient home",
    )
    limit = comm.num_max_tokens_per_rank
    require(limit is None or num_tokens <= limit, "x", f"{num_tokens} rows", f"at most num_max_tokens_per_rank={limit}")
    if handle is None:
        _check_routing(topk_idx, topk_weights, num_tokens, comm.num_experts, data.device)
        if limit is not None and layout != "rank" and data.device.type == "cpu":
            _check_distinct(topk_idx, comm.num_local_experts)
    else:
        _check_handle(comm, handle)
        require(
            topk_idx is None and topk_weights is None and layout is None,
            "topk_idx, topk_weights or layout",
            "given together with a handle",
            "only one of the two: a handle has its routes, weights and layout",
        )
        plan = handle.routing.plan
        require(data.device == plan.topk_idx.device, "x", f"on {data.device}", f"{plan.topk_idx.device}, as then")
        sent = plan.num_tokens
        require(num_tokens == sent, "x", f"{num_tokens} rows", f"{sent} rows, as in the dispatch that made the handle")


def _check_rows(argument: str, rows: Any, hidden: int, accepted: str = "a tensor") -> None:
    require(isinstance(rows, Tensor), argument, f"a {type(rows).__name__}", accepted)
    require(rows.dtype in FLOAT_DTYPES, argument, f"of dtype {rows.dtype}", f"one of {FLOAT_DTYPES}")
    require(
        rows.ndim == 2 and rows.shape[1] == hidden,
        argument,
        f"of shape {list(rows.shape)}",
        f"shape [num_rows, {hidden}]",
    )


def _check_device(argument: str, tensor: Tensor, comm: EPCommunicator) -> None:
    accepted = f"{comm.device}, where transport {comm.transport!r} moves rows"
    require(comm.device in (None, tensor.device), argument, f"on {tensor.device}", accepted)
    require(tensor.device.type in ("cpu", "cuda"), argument, f"on {tensor.device}", "a CPU or CUDA tensor")
    backend_for(tensor)


def _check_routing(topk_idx: Any, topk_weights: Any, num_tokens: int, num_experts: int, device: torch.device) -> None:
    accepted = "a tensor, or None with handle= of an earlier dispatch"
    require(isinstance(topk_idx, Tensor), "topk_idx", f"a {type(topk_idx).__name__}", accepted)
    require(topk_idx.device == device, "topk_idx", f"on {topk_idx.device}", f"{device}, where x is")
    require(
        topk_idx.dtype in (torch.int64, torch.int32),
        "topk_idx",
        f"of dtype {topk_idx.dtype}",
        "torch.int64 or torch.int32",
    )
    require(
        topk_idx.ndim == 2 and topk_idx.shape[0] == num_tokens and topk_idx.shape[1] > 0,
        "topk_idx",
        f"of shape {list(topk_idx.shape)}",
        f"shape [{num_tokens}, num_topk] with num_topk at least 1, as x has {num_tokens} rows",
    )
    if device.type == "cpu":  # a GPU looks at them on the way, without the host having to wait
        check_experts(topk_idx, num_experts)
    if topk_weights is None:
        return
    require(isinstance(topk_weights, Tensor), "topk_weights", f"a {type(topk_weights).__name__}", "a tensor or None")
    require(topk_weights.device == device, "topk_weights", f"on {topk_weights.device}", f"{device}, where x is")
    require(topk_weights.dtype == torch.float32, "topk_weights", f"of dtype {topk_weights.dtype}", "torch.float32")
    require(
        topk_weights.shape == topk_idx.shape,
        "topk_weights",
        f"of shape {list(topk_weights.shape)}",
        f"the shape of topk_idx, {list(topk_idx.shape)}",
    )


def check_experts(topk_idx: Tensor, num_experts: int) -> None:
    """Checks that all entries name an expert or none."""
    if topk_idx.numel():
        smallest, largest = (int(bound) for bound in torch.aminmax(topk_idx))
        if smallest < -1 or largest >= num_experts:
            token, slot = torch.nonzero((topk_idx < -1) | (topk_idx >= num_experts))[0].tolist()
            received = int(topk_idx[token, slot])
            require(False, f"topk_idx[{token}, {slot}]", received, f"0 to {num_experts - 1}, or -1 for none")


def _check_distinct(topk_idx: Any, num_local_experts: int) -> None:
    """A token counts once per local expert in the fixed size of the expert layout (`worst_case_expert_rows`)."""
    if topk_idx.shape[1] <= num_local_experts:
        return
    ordered = topk_idx.sort(dim=1).values
    again = torch.nonzero((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))
    if len(again):
        token, place = again[0].tolist()
        received = f"naming expert {int(ordered[token, place])} more than once"
        accepted = "distinct experts, as num_max_tokens_per_rank fixes the number of rows"
        require(False, f"topk_idx[{token}]", received, accepted)


def _check_handle(comm: EPCommunicator, handle: object) -> None:
    owner = getattr(handle, "owner", None)
    require(owner is not None, "handle", f"a {type(handle).__name__}", "the handle that dispatch returned")
    require(owner is comm, "handle", "of another communicator", "a handle that this communicator's dispatch returned")


def name_of(handle: Handle) -> str:
    """What ranks compare to see whether they mean the same dispatch."""
    return f"of dispatch {handle.routing.number}"


def check_combine(comm: EPCommunicator, y: Tensor, handle: Handle, apply_weights: bool | None) -> None:
    """Checks the arguments of `EPCommunicator.combine`."""
    _check_handle(comm, handle)
    _check_rows("y", y, comm.hidden)
    device = handle.routing.recv_topk_weights.device
    require(y.device == device, "y", f"on {y.device}", f"{device}, where recv.x is")
    backend_for(y)
    num_rows = handle.routing.num_rows
    require(
        y.shape[0] == num_rows,
        "y",
        f"of shape {list(y.shape)}",
        f"[{num_rows}, {comm.hidden}], a row for each of recv.x",
    )
    require(apply_weights in (None, True, False), "apply_weights", repr(apply_weights), "None, True or False")
    require(
        not apply_weights or handle.routing.layout == "expert",
        "apply_weights",
        "True",
        "None or False for layout 'rank', whose rows are sums over local experts already",
    )
    # forward multiplies by what came with the rows, backward by what the dispatch returned
    require(
        not handle.has_other_weights or apply_weights is False or handle.routing.layout == "rank",
        "recv.topk_weights",
        "changed in place",
        "as it came; or multiply y by other weights yourself, with apply_weights=False",
    )


def dispatch_facts(
    x: Tensor | FP8Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    handle: Handle | None,
    layout: str | None,
    out: torch.dtype | str | None,
) -> dict[str, Any]:
    """What all ranks must pass alike to a dispatch."""
    with_grad = torch.is_grad_enabled()
    return {
        "dtype of x": "fp8" if isinstance(x, FP8Tensor) else str(x.dtype),
        "num_topk": None if topk_idx is None else topk_idx.shape[1],
        "a handle": "not given" if handle is None else name_of(handle),
        "layout": layout or "expert" if handle is None else handle.routing.layout,
        "out": str(out),
        "gradient of x": with_grad and isinstance(x, Tensor) and x.requires_grad,
        "gradient of topk_weights": with_grad and topk_weights is not None and topk_weights.requires_grad,
    }


def combine_facts(y: Tensor, handle: Handle, apply_weights: bool) -> dict[str, Any]:
    """What all ranks must pass alike to a combine. Backward is collective too, so all ranks need a gradient or none."""
    return {
        "handle": name_of(handle),
        "dtype of y": str(y.dtype),
        "layout": handle.routing.layout,
        "apply_weights": apply_weights,
        "grad mode": torch.is_grad_enabled(),
    }
