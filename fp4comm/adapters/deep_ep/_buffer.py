"""`Buffer`, DeepEP's first interface: the dispatch and combine that training uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import check_experts
from ...errors import ClosedError, InvalidArgument, NotAvailable, require
from ._config import Config, low_latency_size_hint
from ._events import EventHandle, EventOverlap, communication_stream, enqueue
from ._low_latency import LowLatency
from ._wires import Routes, X, check_alignment, group_place, wires_of

Bias = Tensor | tuple[Tensor, Tensor] | None


@dataclass(frozen=True, eq=False)
class Handle:
    """The routes of a dispatch. Opaque.

    Attributes:
        has_topk: whether the experts of the tokens are known, not just their ranks.
    """

    routes: Routes
    has_topk: bool


class Buffer(LowLatency):
    """Moves tokens to the ranks of their experts and back, one row per token and rank. Collective, as all its calls.

    Arguments, results and their order are those of `deep_ep.Buffer`. No call is differentiable: the caller's backward
    of `dispatch` is a `combine`, and that of `combine` a `dispatch` with the handle. Inside a backward pass these take
    the legs grad_combine and grad_dispatch of the precision.

    The numbers on the wire are those that `configure` or `install` had chosen when the buffer was made.

    Args:
        group: the ranks that share the experts, a torch ProcessGroup.
        comm: an mpi4py communicator instead, with `group=None`.
        explicitly_destroy: whether `destroy` will be called.
        enable_shrink: must be False: ranks can't be masked out.
        num_nvl_bytes, num_rdma_bytes: kept as attributes; memory is taken as needed.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: without effect.

    Raises:
        InvalidArgument: no group, or one without this process.
        NotAvailable: `enable_shrink`.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if enable_shrink:
            raise NotAvailable("enable_shrink: fp4comm can't go on without a rank; accepted: False")
        self.group, self.rank, self.group_size = group_place(group, comm)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy, self.enable_shrink = explicitly_destroy, enable_shrink
        self._wires = wires_of(self.group)
        self._wires.num_users += 1
        self._is_destroyed = False

    def destroy(self) -> None:
        """Gives the buffer up. Collective; the last buffer of a group closes its communicators.

        Raises:
            InvalidArgument: the buffer was made without `explicitly_destroy=True`.
        """
        require(self.explicitly_destroy, "explicitly_destroy", "False", "True in the constructor, to call destroy()")
        if not self._is_destroyed:
            self._is_destroyed = True
            self._wires.release()

    def _require_open(self) -> None:
        if self._is_destroyed:
            raise ClosedError("this Buffer has been destroyed")

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 is supported: True."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets `Buffer.num_sms`, an even number, for configs. fp4comm's kernels take `configure(num_sms=...)`."""
        require(new_num_sms % 2 == 0, "new_num_sms", new_num_sms, "an even number")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event after all that has been enqueued on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A `Config` for its size hints, for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A `Config` for its size hints, for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """A number of bytes for `num_rdma_bytes`, which takes none of them."""
        return low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that asynchronous calls run on.

        Raises:
            NotAvailable: there is no GPU.
        """
        if not torch.cuda.is_available():
            raise NotAvailable("get_comm_stream needs a GPU")
        return communication_stream(torch.device("cuda", torch.cuda.current_device()))

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Not available: there is no memory that callers may write to.

        Raises:
            NotAvailable: always.
        """
        raise NotAvailable("get_local_buffer_tensor: fp4comm has no buffer for callers; use tensors of your own")

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """What this rank's tokens ask for. Not collective.

        Args:
            topk_idx: `[num_tokens, num_topk]` int64 or int32, the experts of each token, -1 = none.
            num_experts: of all ranks.
            previous_event, async_finish: as in `dispatch`.
            allocate_on_comm_stream: without effect.

        Returns:
            `num_tokens_per_rank` int32 `[num_ranks]`; None (there is no level of RDMA ranks); `num_tokens_per_expert`
            int32 `[num_experts]`; `is_token_in_rank` bool `[num_tokens, num_ranks]`; the event.
        """
        require(topk_idx.ndim == 2, "topk_idx", f"of shape {list(topk_idx.shape)}", "[num_tokens, num_topk]")
        is_split = num_experts > 0 and num_experts % self.group_size == 0
        require(is_split, "num_experts", num_experts, f"a positive multiple of the {self.group_size} ranks")
        if topk_idx.device.type == "cpu":
            check_experts(topk_idx, num_experts)

        def count() -> tuple[Tensor, None, Tensor, Tensor]:
            is_chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.int32, device=topk_idx.device)
            is_expert = (topk_idx >= 0) & (topk_idx < num_experts)  # of a GPU's numbers that are none, dispatch says so
            places = torch.where(is_expert, topk_idx, num_experts).long()
            is_chosen.scatter_add_(1, places, torch.ones_like(places).int())
            per_expert = is_chosen[:, :num_experts]
            is_token_in_rank = per_expert.unflatten(1, (self.group_size, -1)).any(2)
            return (
                is_token_in_rank.sum(0, dtype=torch.int32),
                None,
                per_expert.sum(0, dtype=torch.int32),
                is_token_in_rank,
            )

        layout, event = enqueue(count, topk_idx, previous_event, async_finish)
        return (*layout, EventOverlap(event))

    def dispatch(
        self,
        x: X,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[X, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Sends every token once to each rank that has any of its experts.

        Args:
            x: `[num_tokens, hidden]` bfloat16, float16 or float32; or FP8, as a pair of float8_e4m3fn
                `[num_tokens, hidden]` and scales `[num_tokens, hidden / 128]` float32 or, four exponents in a number,
                `[num_tokens, hidden / 512]` int32.
            handle: of an earlier dispatch, for the same routes; then no layout and no top-k.
            num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank: of `get_dispatch_layout`. The routes are those
                of topk_idx, or without one those of is_token_in_rank.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, -1 = none.
            topk_weights: `[num_tokens, num_topk]` float32, with topk_idx.
            expert_alignment: the counts are rounded up to a multiple of it.
            num_worst_tokens: so many rows are returned, those after the received ones zeros without experts, and on a
                GPU the host doesn't wait. Equal on all ranks, and at least the number of ranks times the tokens of any.
            previous_event: wait for it first.
            async_finish: on a GPU, leave it to the caller to wait for the returned event.
            num_tokens_per_rdma_rank, config, allocate_on_comm_stream: without effect.

        Returns:
            The received rows in the form of x, ordered by source rank, then token; their top-k, `[num_rows, num_topk]`
            in the dtype of topk_idx, as local experts, -1 = elsewhere; their weights, 0 elsewhere; the number of tokens
            of each local expert (empty with num_worst_tokens); the handle; the event. With a handle: rows, None four
            times, and the event.

        Raises:
            InvalidArgument, TransportError: as `EPCommunicator.dispatch`.
        """
        self._require_open()
        check_alignment(expert_alignment)
        inputs = (x, topk_idx, topk_weights, is_token_in_rank, handle)
        if handle is not None:
            _check_handle(handle)
            given = topk_idx is not None or topk_weights is not None
            require(not given, "topk_idx or topk_weights", "given with a handle", "None, as a handle has its routes")
            again = handle.routes
            recv_x, event = enqueue(lambda: self._wires.dispatch_again(x, again), inputs, previous_event, async_finish)
            return recv_x, None, None, None, None, EventOverlap(event)
        has_layout = not any(part is None for part in (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert))
        accepted = "num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert of get_dispatch_layout, or a handle"
        require(has_layout, "the layout", "not given", accepted)
        require((topk_idx is None) == (topk_weights is None), "topk_weights", "without topk_idx or the reverse", "both")
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        accepted = f"0, or the {self.group_size} ranks times the most tokens of any"
        require(
            num_worst_tokens == 0 or num_worst_tokens >= self.group_size, "num_worst_tokens", num_worst_tokens, accepted
        )
        capacity = num_worst_tokens // self.group_size or None
        num_experts = num_tokens_per_expert.numel()

        def work() -> tuple[X, Tensor | None, Tensor | None, list[int], Handle]:
            idx = self._experts_of_ranks(is_token_in_rank, num_experts) if topk_idx is None else topk_idx
            arrived = self._wires.dispatch(
                x, idx, topk_weights, num_experts, capacity=capacity, num_rows=num_worst_tokens or None
            )
            made = Handle(arrived.routes, topk_idx is not None)
            counts = [] if capacity else self._counts(arrived.counts, num_tokens_per_expert, topk_idx is not None)
            padded = [-(-count // expert_alignment) * expert_alignment for count in counts]
            if topk_idx is None:
                return arrived.x, None, None, padded, made
            recv_topk_idx = arrived.routes.to_caller(arrived.topk_idx, -1).to(topk_idx.dtype)
            return arrived.x, recv_topk_idx, arrived.weights, padded, made

        received, event = enqueue(work, inputs, previous_event, async_finish)
        return (*received, EventOverlap(event))

    def _experts_of_ranks(self, is_token_in_rank: Tensor, num_experts: int) -> Tensor:
        """Routes to the same ranks: the first expert of each."""
        first = torch.arange(0, num_experts, num_experts // self.group_size, device=is_token_in_rank.device)
        return torch.where(is_token_in_rank, first, -1)

    def _counts(self, received: Tensor, asked: Tensor, has_topk: bool) -> list[int]:
        """Tokens of each local expert. Without top-k only the senders know them. Collective then."""
        if has_topk:
            counts: list[int] = received.tolist()
            return counts
        comm = self._wires.communicators[0]
        of_all = comm._transport.all_to_all(asked.to("cpu", torch.int64).view(self.group_size, -1))
        total: list[int] = of_all.sum(0).tolist()
        return total

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Brings rows home and sums them per token, without weights, in float32.

        Args:
            x: `[num_rows, hidden]` bfloat16, float16 or float32, in the order of the dispatch's rows.
            handle: of that dispatch.
            topk_weights: `[num_rows, num_topk]` float32, to bring home as well: for each slot of a token, the sum of
                those of all ranks that it went to.
            bias: one or two tensors `[num_tokens, hidden]` of x's dtype to add.
            previous_event, async_finish: as in `dispatch`.
            config, allocate_on_comm_stream: without effect.

        Returns:
            `[num_tokens, hidden]`, dtype of x; `[num_tokens, num_topk]` float32 or None; the event.

        Raises:
            InvalidArgument, TransportError: as `EPCommunicator.combine`.
        """
        self._require_open()
        _check_handle(handle)
        accepted = "None, for a handle of a dispatch without topk_idx"
        require(topk_weights is None or handle.has_topk, "topk_weights", "given", accepted)
        biases = addends(bias)
        combined, event = enqueue(
            lambda: self._wires.combine(x, handle.routes, topk_weights, biases),
            (x, topk_weights, biases, handle),
            previous_event,
            async_finish,
        )
        return (*combined, EventOverlap(event))


def addends(bias: Bias) -> tuple[Tensor, ...]:
    """None, one or two tensors as a tuple."""
    if bias is None or isinstance(bias, Tensor):
        return () if bias is None else (bias,)
    is_pair = isinstance(bias, (tuple, list)) and len(bias) == 2
    require(is_pair, "bias", f"a {type(bias).__name__}", "None, a tensor or two of them")
    return tuple(bias)


def _check_handle(handle: Any) -> None:
    if not isinstance(handle, Handle):
        raise InvalidArgument(f"handle is a {type(handle).__name__}; accepted: the handle that dispatch returned")
