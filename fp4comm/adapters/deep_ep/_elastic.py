"""`ElasticBuffer`, DeepEP's second interface: one call for layout and dispatch, rows per rank or per expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ClosedError, InvalidArgument, NotAvailable, require
from ...routing import Routing
from ._buffer import Bias, addends
from ._events import EventHandle, EventOverlap, communication_stream, enqueue
from ._wires import Arrived, Routes, Wires, X, check_alignment, group_place, what, wires_of

_SIZE_UNIT = 2 << 20
_MOST_TOPK = 32


@dataclass(eq=False)
class EPHandle:
    """The routes of a dispatch, for combine and for further dispatches, and what it knows of the received rows.

    Attributes:
        do_expand: whether there is a row for each token and local expert, else for each token.
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: `[num_tokens, num_topk]`, a copy unless `do_handle_copy=False`.
        num_recv_tokens: received tokens; without the host's knowledge the most that they may be.
        num_expanded_tokens: rows with one for each expert, padding included; likewise.
        num_recv_tokens_per_expert_list: padded counts of the local experts; empty without the host's knowledge.
        psum_num_recv_tokens_per_scaleup_rank: int32 `[num_ranks]`, received tokens of each rank, added up.
        psum_num_recv_tokens_per_expert: int32 `[num_local_experts]`: padded counts added up. With `do_expand`, of each
            expert the padded counts before it and its own without padding: where its rows end.
        num_unaligned_recv_tokens_per_expert: int32 `[num_local_experts]`.
        token_metadata_at_forward, channel_linked_list: None.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    _routes: Routes
    _recv_topk_idx: Tensor | None
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    @property
    def recv_src_metadata(self) -> Tensor:
        """Not available, as `dst_buffer_slot_idx`: rows say nothing of where they come from but by their order.

        Raises:
            NotAvailable: always.
        """
        raise NotAvailable("recv_src_metadata: fp4comm's rows are ordered by source rank, then token, instead")

    @property
    def dst_buffer_slot_idx(self) -> Tensor:
        """See `recv_src_metadata`."""
        raise NotAvailable("dst_buffer_slot_idx: fp4comm has no buffer with slots")


class ElasticBuffer:
    """Moves tokens to the ranks of their experts and back. Collective, as all its calls.

    Arguments, results and their order are those of `deep_ep.ElasticBuffer`; legs and numbers are as for `Buffer`. Rows
    are always in a fixed order. Only the expert-parallel calls are there, not Engram, pipeline and all-gather ones.

    Args:
        group: the ranks that share the experts: a torch ProcessGroup or an mpi4py communicator.
        num_max_tokens_per_rank: default of `dispatch`.
        explicitly_destroy: whether `destroy` will be called.
        num_bytes, num_cpu_bytes, hidden, num_topk, use_fp8_dispatch: memory is taken as needed; num_bytes is kept.
        deterministic, allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute, sl_idx,
            num_allocated_qps, num_cpu_timeout_secs, num_gpu_timeout_secs: without effect.

    Raises:
        InvalidArgument: no group, or one without this process.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group, self.rank_idx, self.num_ranks = group_place(group)
        hint = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = hint if num_bytes is None else num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps, self.explicitly_destroy = num_allocated_qps, explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._wires: Wires | None = wires_of(self.group)
        self._wires.num_users += 1

    def destroy(self) -> None:
        """Gives the buffer up. Collective; the last buffer of a group closes its communicators.

        Raises:
            InvalidArgument: the buffer was made without `explicitly_destroy=True`.
        """
        require(self.explicitly_destroy, "explicitly_destroy", "False", "True in the constructor, to call destroy()")
        if self._wires is not None:
            self._wires.release()
        self._wires = None

    def _open_wires(self) -> Wires:
        if self._wires is None:
            raise ClosedError("this ElasticBuffer has been destroyed")
        return self._wires

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """A number of bytes for `num_bytes`, which takes none of them: the rows that may arrive, as BF16."""
        num_ranks = group_place(group)[2]
        row_bytes = 2 * hidden + 12 * (num_topk or _MOST_TOPK)
        return -(-2 * num_ranks * num_max_tokens_per_rank * row_bytes // _SIZE_UNIT) * _SIZE_UNIT

    @staticmethod
    def capture() -> EventHandle:
        """An event after all that has been enqueued on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that asynchronous calls run on.

        Raises:
            NotAvailable: there is no GPU.
        """
        if not torch.cuda.is_available():
            raise NotAvailable("get_comm_stream needs a GPU")
        return communication_stream(torch.device("cuda", torch.cuda.current_device()))

    def get_physical_domain_size(self) -> tuple[int, int]:
        """`(1, num_ranks)`: fp4comm makes no difference between ranks."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """`(1, num_ranks)`: fp4comm makes no difference between ranks."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """A number for `num_sms` arguments, which have no effect; see `configure(num_sms=...)`."""
        return 24

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """A number for `num_qps` arguments, which have no effect."""
        return self.num_allocated_qps

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """All ranks wait for each other on the host; on a GPU, after its work is done."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        wait = getattr(self.group, "Barrier", None)
        if wait is None:
            torch.distributed.barrier(self.group)
        else:
            wait()

    def dispatch(
        self,
        x: X,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[X, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends every token once to each rank that has any of its experts.

        Args:
            x: `[num_tokens, hidden]` bfloat16, float16 or float32; FP8 as for `Buffer.dispatch`; or rows of any other
                dtype, alone or with `[num_tokens, n]` scales of 4 bytes each, which travel as they are.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, -1 = none.
            topk_weights: `[num_tokens, num_topk]` float32 or None.
            cumulative_local_expert_recv_stats: int32 `[num_local_experts]`, to which the counts are added.
            num_experts: of all ranks.
            num_max_tokens_per_rank: at most so many tokens of any rank, needed and looked at with do_cpu_sync=False; by
                default that of the constructor.
            expert_alignment: each expert's rows (`do_expand`) or counts are padded to a multiple of it; None = 1.
            previous_event, previous_event_before_epilogue: wait for them first.
            async_with_compute_stream: on a GPU, leave it to the caller to wait for the returned event.
            handle: of an earlier dispatch, for the same routes and layout, instead of topk_idx; weights may be new.
            do_handle_copy: the handle gets a copy of topk_idx.
            do_cpu_sync: the host waits for the exact sizes. Without, they are those of the worst case, and on a GPU the
                host doesn't wait. None = with.
            do_expand: a row for each token and local expert, next to each other, in the order of experts.
            do_zero_padding: padding is zeros. It is in any case.
            use_tma_aligned_col_major_sf: scales are column-major, columns padded to a multiple of 4.
            num_sms, num_qps, allocate_on_comm_stream: without effect.

        Returns:
            The received rows in the form of x, ordered by source rank, then token (within an expert with do_expand);
            their top-k as local experts, -1 = elsewhere, or None with do_expand; their weights, `[num_rows, num_topk]`
            or with do_expand `[num_rows]`, None without topk_weights; the handle; the event.

        Raises:
            InvalidArgument, TransportError: as `EPCommunicator.dispatch`.
        """
        wires = self._open_wires()
        check_alignment(1 if expert_alignment is None else expert_alignment)
        if previous_event_before_epilogue is not None:
            previous_event_before_epilogue.current_stream_wait()
        require(do_expand or not do_zero_padding, "do_zero_padding", "True", "False, without do_expand")

        def work() -> tuple[X, Tensor | None, Tensor | None, EPHandle]:
            if handle is not None:
                require(topk_idx is None, "topk_idx", "given with a handle", "None, as a handle has its routes")
                require(not do_cpu_sync, "do_cpu_sync", "True with a handle", "None or False")
                rows, idx, weights, made = _dispatch_again(wires, x, topk_weights, handle)
            else:
                most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
                plan = _Plan(num_experts, most, expert_alignment or 1, do_expand, do_cpu_sync in (None, True), num_sms)
                rows, idx, weights, made = plan.dispatch(wires, x, topk_idx, topk_weights, do_handle_copy)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(made.num_unaligned_recv_tokens_per_expert)
            if use_tma_aligned_col_major_sf and not isinstance(rows, Tensor):
                rows = rows[0], _tma_aligned(rows[1])
            return rows, idx, weights, made

        inputs = (x, topk_idx, topk_weights, handle, cumulative_local_expert_recv_stats)
        received, event = enqueue(work, inputs, previous_event, async_with_compute_stream)
        return (*received, EventOverlap(event))

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Brings rows home and sums them per token, without weights, in float32.

        Args:
            x: `[num_rows, hidden]` bfloat16, float16 or float32, in the order of the dispatch's rows.
            handle: of that dispatch.
            topk_weights: float32, shaped as the dispatch's, to bring home as well.
            bias: one or two tensors `[num_tokens, hidden]` of x's dtype to add.
            previous_event, previous_event_before_epilogue, async_with_compute_stream: as in `dispatch`.
            num_sms, num_qps, allocate_on_comm_stream: without effect.

        Returns:
            `[num_tokens, hidden]`, dtype of x; `[num_tokens, num_topk]` float32 or None; the event.

        Raises:
            InvalidArgument, TransportError: as `EPCommunicator.combine`.
        """
        wires = self._open_wires()
        _check_handle(handle)
        if previous_event_before_epilogue is not None:
            previous_event_before_epilogue.current_stream_wait()
        biases = addends(bias)
        combined, event = enqueue(
            lambda: wires.combine(x, handle._routes, topk_weights, biases),
            (x, topk_weights, biases, handle),
            previous_event,
            async_with_compute_stream,
        )
        return (*combined, EventOverlap(event))


@dataclass(frozen=True)
class _Plan:
    """How a dispatch with new routes is made."""

    num_experts: int | None
    most: int
    alignment: int
    do_expand: bool
    is_exact: bool
    num_sms: int

    def dispatch(
        self, wires: Wires, x: X, topk_idx: Tensor | None, topk_weights: Tensor | None, do_copy: bool
    ) -> tuple[X, Tensor | None, Tensor | None, EPHandle]:
        is_matrix = isinstance(topk_idx, Tensor) and topk_idx.ndim == 2
        require(is_matrix, "topk_idx", what(topk_idx), "[num_tokens, num_topk], or a handle instead")
        require(self.num_experts is not None, "num_experts", "None", "the number of experts of all ranks")
        accepted = "a number above 0, with do_cpu_sync=False"
        require(self.is_exact or self.most > 0, "num_max_tokens_per_rank", self.most, accepted)
        assert topk_idx is not None
        assert self.num_experts is not None
        num_ranks = wires.num_ranks
        num_local_experts = self.num_experts // num_ranks
        expanded = self._most_expanded(num_ranks, topk_idx.shape[1], num_local_experts)
        num_rows = None if self.is_exact else expanded if self.do_expand else num_ranks * self.most
        arrived = wires.dispatch(
            x,
            topk_idx,
            topk_weights,
            self.num_experts,
            layout="expert" if self.do_expand else "rank",
            alignment=self.alignment if self.do_expand else 1,
            capacity=None if self.is_exact else self.most,
            num_rows=num_rows,
        )
        handle = self._handle(arrived, topk_idx.clone() if do_copy else topk_idx, expanded)
        recv_topk_idx = handle._recv_topk_idx
        return arrived.x, recv_topk_idx, None if topk_weights is None else arrived.weights, handle

    def _most_expanded(self, num_ranks: int, num_topk: int, num_local_experts: int) -> int:
        most = num_ranks * self.most * min(num_topk, num_local_experts) + (self.alignment - 1) * num_local_experts
        return -(-most // self.alignment) * self.alignment

    def _handle(self, arrived: Arrived, topk_idx: Tensor, most_expanded: int) -> EPHandle:
        routing, counts = arrived.routes.routing, arrived.counts
        padded = (counts + self.alignment - 1) // self.alignment * self.alignment
        ends = padded.cumsum(0) - padded + counts if self.do_expand else padded.cumsum(0)
        per_expert = padded.tolist() if self.is_exact else []
        recv_topk_idx = None
        if not self.do_expand:
            recv_topk_idx = arrived.routes.to_caller(arrived.topk_idx, -1).to(topk_idx.dtype)
        assert self.num_experts is not None
        return EPHandle(
            do_expand=self.do_expand,
            num_experts=self.num_experts,
            expert_alignment=self.alignment,
            num_max_tokens_per_rank=self.most,
            num_sms=self.num_sms,
            topk_idx=topk_idx,
            num_recv_tokens=routing.num_recv_rows,
            num_expanded_tokens=sum(per_expert) if self.is_exact else most_expanded,
            num_recv_tokens_per_expert_list=per_expert,
            psum_num_recv_tokens_per_scaleup_rank=_tokens_of_ranks(routing).cumsum(0).to(torch.int32),
            psum_num_recv_tokens_per_expert=ends.to(torch.int32),
            num_unaligned_recv_tokens_per_expert=counts.to(torch.int32),
            _routes=arrived.routes,
            _recv_topk_idx=recv_topk_idx,
        )


def _tokens_of_ranks(routing: Routing) -> Tensor:
    """int64 `[num_ranks]`, received tokens by source rank."""
    device, sizes = routing.recv_topk_idx.device, routing.sizes
    if sizes.capacity is None:
        return torch.tensor(sizes.rows_from_rank, device=device)
    is_used = (routing.recv_topk_idx >= 0).any(1)
    return is_used.view(-1, sizes.capacity).sum(1)


def _dispatch_again(
    wires: Wires, x: X, topk_weights: Tensor | None, handle: EPHandle
) -> tuple[X, Tensor | None, Tensor | None, EPHandle]:
    _check_handle(handle)
    rows = wires.dispatch_again(x, handle._routes)
    weights = None if topk_weights is None else _weights_again(wires, topk_weights, handle._routes)
    return rows, handle._recv_topk_idx, weights, handle


def _weights_again(wires: Wires, topk_weights: Tensor, routes: Routes) -> Tensor:
    """Other weights along known routes: all of a token's in a row of their own, of which the experts' are taken."""
    routing, num_topk = routes.routing, topk_weights.shape[1]
    rows = wires.dispatch_again(topk_weights.contiguous().view(torch.uint8), routes)
    assert isinstance(rows, Tensor)
    values = rows.view(torch.float32)
    slot_rows = routing.slot_rows
    if slot_rows is None:
        is_here = routes.to_caller(routing.recv_topk_idx, -1) >= 0
        return torch.where(is_here, values, 0.0)
    slots = torch.full((len(values) + 1,), -1, dtype=torch.int64, device=values.device)  # the last for no row
    slots[slot_rows] = torch.arange(num_topk, device=values.device).expand_as(slot_rows)
    own = slots[:-1, None]
    return torch.where(own >= 0, values.gather(1, own.clamp(min=0)), 0.0).squeeze(1)


def _tma_aligned(scales: Tensor) -> Tensor:
    """The same, column after column, each of which starts at a multiple of four."""
    num_rows, width = scales.shape
    columns = scales.new_empty(width, -(-num_rows // 4) * 4)[:, :num_rows]
    return columns.copy_(scales.t()).t()


def _check_handle(handle: Any) -> None:
    if not isinstance(handle, EPHandle):
        raise InvalidArgument(f"handle is a {type(handle).__name__}; accepted: the EPHandle that dispatch returned")
