"""The low-latency half of `Buffer`: fixed shapes, a row for each token and expert, weights applied at home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgument, NotAvailable, require
from ._events import EventOverlap, enqueue
from ._wires import Routes, Wires, X, as_exponents, each, is_wide

_FP8_MAX, _LEAST_AMAX = 448.0, 1e-4


@dataclass(frozen=True, eq=False)
class LowLatencyHandle:
    """The routes of a low-latency dispatch. Opaque.

    Attributes:
        routes: every slot of every token is a token of its own, with one expert.
        places: `[num_local_experts, rows of an expert]`, the row of the expert layout behind each place, -1 = none.
        zero_copy_buffer: what `get_next_low_latency_combine_buffer` has returned.
    """

    routes: Routes
    places: Tensor
    hidden: int
    zero_copy_buffer: list[Tensor] = field(default_factory=list)


class LowLatency:
    """Methods of `Buffer`."""

    _wires: Wires
    group_size: int

    def _require_open(self) -> None:
        raise NotImplementedError  # `Buffer` has its own

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Without effect: there is nothing to clean between calls."""

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[X, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Sends every token to each of its experts. On a GPU the host doesn't wait.

        Args:
            x: `[num_tokens, hidden]` bfloat16 (or float16, float32), at most num_max_dispatch_tokens_per_rank tokens.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, -1 = none.
            num_max_dispatch_tokens_per_rank: equal on all ranks.
            num_experts: of all ranks.
            cumulative_local_expert_recv_stats: int32 `[num_local_experts]`, to which the counts are added.
            use_fp8: return FP8: float8_e4m3fn and float32 scales per 128, whose last two dimensions are column-major.
            round_scale: scales are powers of two. They are in any case where the wire is mxfp4 or fp8.
            use_ue8m0: with round_scale: scales as int32 of four exponents each.
            async_finish: as in `dispatch`.
            return_recv_hook: return a function to call before the results are used. Here they have arrived already.
            dispatch_wait_recv_cost_stats: must be None.

        Returns:
            `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]` rows of each expert, ordered by
            source rank, then token, zeros after the last; how many, int32 `[num_local_experts]`; the handle; the event;
            the hook or None.
        """
        self._require_open()
        _refuse_statistics(dispatch_wait_recv_cost_stats)
        is_fp8_size = not use_fp8 or x.shape[1] % (512 if use_ue8m0 else 128) == 0
        require(is_fp8_size, "hidden", x.shape[1], "a multiple of 128 for FP8, of 512 with use_ue8m0")
        require(
            not use_ue8m0 or (round_scale and use_fp8), "use_ue8m0", "True", "False, or with use_fp8 and round_scale"
        )
        limit = num_max_dispatch_tokens_per_rank
        num_topk, num_local_experts = topk_idx.shape[1], num_experts // self.group_size
        inputs = (x, topk_idx, cumulative_local_expert_recv_stats)

        def work() -> tuple[X, Tensor, LowLatencyHandle]:
            is_sent_as_fp8 = use_fp8 and is_wide(self._wires.leg("dispatch"))
            rows: X = _quantized(x, round_scale) if is_sent_as_fp8 else x
            repeated = each(rows, lambda part: _repeat(part, num_topk))
            capacity = limit * num_topk  # with more than these all ranks raise, not only the one that has them
            arrived = self._wires.dispatch(
                repeated,
                topk_idx.reshape(-1, 1),
                None,
                num_experts,
                layout="expert",
                capacity=capacity,
                as_fp8=use_fp8 and not is_sent_as_fp8,
            )
            starts = arrived.counts.cumsum(0) - arrived.counts
            index = torch.arange(self.group_size * limit, device=x.device).expand(num_local_experts, -1)
            places = torch.where(index < arrived.counts[:, None], starts[:, None] + index, -1)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(arrived.counts)
            packed = each(arrived.x, lambda part: _gather(part, places))
            if use_fp8:
                packed = packed[0], _scales(packed[1], use_ue8m0)
            return packed, arrived.counts.to(torch.int32), LowLatencyHandle(arrived.routes, places, x.shape[1])

        (packed, counts, handle), event = enqueue(work, inputs, None, async_finish)
        return packed, counts, handle, EventOverlap(event), _nothing_left if return_recv_hook else None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Brings the experts' rows home and sums them per token, with weights, in float32.

        Args:
            x: `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]`, as dispatched.
            topk_idx: that of the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32.
            handle: of the dispatch.
            use_logfmt: without effect: the wire is the leg "combine" of the precision.
            zero_copy: take the rows from what `get_next_low_latency_combine_buffer` returned instead of from x.
            async_finish, return_recv_hook: as in `low_latency_dispatch`.
            out: `[num_tokens, hidden]` to write to, or None.
            combine_wait_recv_cost_stats: must be None.

        Returns:
            `[num_tokens, hidden]`, dtype of x; the event; the hook or None.
        """
        self._require_open()
        _check_handle(handle)
        _refuse_statistics(combine_wait_recv_cost_stats)
        if zero_copy:
            require(
                bool(handle.zero_copy_buffer), "zero_copy", "True", "after get_next_low_latency_combine_buffer(handle)"
            )
            x = handle.zero_copy_buffer[0]
        num_tokens, num_topk = topk_weights.shape
        expected = handle.routes.routing.plan.num_tokens
        require(
            num_tokens * num_topk == expected,
            "topk_weights",
            f"for {num_tokens} tokens",
            f"{expected // num_topk}, as dispatched",
        )
        places = handle.places
        shape = [*places.shape, handle.hidden]
        require(list(x.shape) == shape, "x", f"of shape {list(x.shape)}", f"shape {shape}")

        def work() -> Tensor:
            rows = x.new_zeros(handle.routes.num_rows + 1, handle.hidden)  # the last for places without a row
            rows[places.flatten()] = x.reshape(-1, handle.hidden)
            slots = self._wires.combine(rows[:-1], handle.routes)[0].unflatten(0, (num_tokens, num_topk))
            weights = topk_weights.masked_fill(topk_idx < 0, 0).unsqueeze(2)
            combined = (slots.float() * weights).sum(1).to(x.dtype)
            return combined if out is None else out.copy_(combined)

        combined, event = enqueue(work, (x, topk_idx, topk_weights, out, handle), None, async_finish)
        return combined, EventOverlap(event), _nothing_left if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Memory for the rows of the next `low_latency_combine(zero_copy=True)` with the handle, which copies it.

        Returns:
            bfloat16 `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]`, zeros.
        """
        _check_handle(handle)
        shape = (*handle.places.shape, handle.hidden)
        handle.zero_copy_buffer[:] = [torch.zeros(shape, dtype=torch.bfloat16, device=handle.places.device)]
        return handle.zero_copy_buffer[0]

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Not available, as the two below: fp4comm can't go on without a rank.

        Raises:
            NotAvailable: always.
        """
        raise NotAvailable("low_latency_update_mask_buffer: fp4comm can't go on without a rank")

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """See `low_latency_update_mask_buffer`."""
        raise NotAvailable("low_latency_query_mask_buffer: fp4comm can't go on without a rank")

    def low_latency_clean_mask_buffer(self) -> None:
        """See `low_latency_update_mask_buffer`."""
        raise NotAvailable("low_latency_clean_mask_buffer: fp4comm can't go on without a rank")


def _nothing_left() -> None:
    """The hook: what it would wait for has been done, or is ordered on the current stream."""


def _refuse_statistics(statistics: Any) -> None:
    if statistics is not None:
        raise NotAvailable(
            "wait_recv_cost_stats: fp4comm doesn't measure how long each rank was waited for; accepted: None"
        )


def _check_handle(handle: Any) -> None:
    if not isinstance(handle, LowLatencyHandle):
        kind = type(handle).__name__
        raise InvalidArgument(f"handle is a {kind}; accepted: the handle that low_latency_dispatch returned")


def _repeat(rows: Tensor, times: int) -> Tensor:
    """Each row that many times."""
    return rows.view(torch.uint8).repeat_interleave(times, 0).view(rows.dtype)


def _gather(rows: Tensor, places: Tensor) -> Tensor:
    """`rows[places]`, zeros where that is -1, for any dtype."""
    as_bytes = rows.view(torch.uint8)
    padded = torch.cat([as_bytes, as_bytes.new_zeros(1, as_bytes.shape[1])])
    return padded[places].view(rows.dtype)


def _scales(scales: Tensor, use_ue8m0: bool) -> Tensor:
    """With the last two dimensions column-major, and as exponents if asked for."""
    chosen = as_exponents(scales) if use_ue8m0 else scales
    return chosen.transpose(1, 2).contiguous().transpose(1, 2)


def _quantized(x: Tensor, round_scale: bool) -> tuple[Tensor, Tensor]:
    """FP8 with a scale per 128, the smallest that doesn't saturate."""
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2, keepdim=True).clamp(_LEAST_AMAX) / _FP8_MAX
    if round_scale:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return (groups / scales).to(torch.float8_e4m3fn).view(x.shape), scales.squeeze(2)
