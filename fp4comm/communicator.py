"""The expert-parallel communicator: what a MoE layer calls."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import checks
from .agreement import agree, begin_agreement
from .autograd import Combine, Dispatch, sum_combine, unpack_dispatch
from .backends import Rows, raise_deferred
from .codec import FP8Tensor
from .errors import ClosedError, InvalidArgument
from .exchange import Exchange, StageHook, WireRows
from .fp8_rows import FP8Rows
from .memory import to_host
from .precision import Precision
from .received import Received
from .routing import NewRoutes, Routing, SendPlan, Sizes, plan_send
from .transport import MAX_BUFFER_BYTES, make_transport


@dataclass(frozen=True, eq=False, repr=False)
class Handle:
    """What a dispatch leaves for its combine and for further dispatches along the same routes. Opaque."""

    routing: Routing
    topk_weights: Tensor
    anchor: Tensor
    owner: EPCommunicator
    weights_version: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights_version", _version_of(self.topk_weights))

    @property
    def layout(self) -> str:
        """ "expert" or "rank"."""
        return self.routing.layout

    @property
    def has_other_weights(self) -> bool:
        """Whether `topk_weights` were changed in place, which inference tensors don't tell."""
        return _version_of(self.topk_weights) != self.weights_version


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_numbers = itertools.count(1)
BY_NAME: weakref.WeakValueDictionary[str, EPCommunicator] = weakref.WeakValueDictionary()


class EPCommunicator:
    """Moves tokens to the ranks of their experts and results back, in small numbers, with gradients.

    Expert e lives on rank `e // (num_experts // num_ranks)`. All methods are collective.

    Args:
        group: the ranks that share the experts: an mpi4py communicator, a torch ProcessGroup, a one-dimensional
            DeviceMesh, None for a single process, or a `fp4comm.transport.Transport` of your own. For GPUs each
            process must have chosen its own (`torch.cuda.set_device`), as `world_group` does.
        num_experts: experts of the layer, a multiple of the number of ranks.
        hidden: width of a token, a multiple of 32.
        precision: a `Precision` or the name of a recipe: "fp4" (default), "fp8", "mxfp4", "bf16", "fp32".
        expert_alignment: each expert's rows are padded to a multiple of it (16 and 128 suit FP8 GEMMs).
        num_max_tokens_per_rank: at most so many tokens per rank and dispatch; results then have a fixed shape, and on a
            GPU the host never waits for the device, so that calls can be captured in a CUDA graph. All messages over
            NCCL then have the size of that many rows. None = as many rows as arrive.
        transport: "auto", "loopback", "mpi", "process_group", "nccl" or "peer". Where every rank has a GPU, "auto"
            takes "peer" if all are on one machine and can map each other's memory, else "nccl".
        check_inputs: compare the arguments of every call over the ranks before anything is sent, so that a bad one
            raises the same error on all of them. Costs an exchange of a few bytes per call, for which the host waits; a
            dispatch with new routing and without `num_max_tokens_per_rank` has that exchange in any case. Without
            it, all ranks or none must need gradients of y or of the dispatch. None = only where rows are on the CPU.
        seed: of stochastic rounding and of the Hadamard transform; equal on all ranks.
        timeout_secs: how long to wait for a rank before `TransportError`. None = 300, with "peer" 60.
        num_sms: multiprocessors that a GPU's packing and unpacking may take, for work that runs beside it. None = all.
            Equal on all ranks.
        max_buffer_bytes: with "peer": at most so many bytes of a GPU for the rows that arrive, in two slots that grow
            to what is needed; an exchange that needs more raises `InvalidArgument` on all ranks.

    Raises:
        InvalidArgument: on all ranks: an argument is wrong on one of them or differs between them. Only a wrong group,
            transport or timeout_secs raises on its own rank alone.
        NotAvailable: the group needs a package that is not there.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        hidden: int,
        precision: Precision | str = "fp4",
        expert_alignment: int = 1,
        num_max_tokens_per_rank: int | None = None,
        transport: str = "auto",
        check_inputs: bool | None = None,
        seed: int = 0,
        timeout_secs: float | None = None,
        num_sms: int | None = None,
        max_buffer_bytes: int = MAX_BUFFER_BYTES,
    ) -> None:
        self._transport = make_transport(group, transport, timeout_secs, max_buffer_bytes)
        self._owns_transport = self._transport is not group
        self.num_experts, self.hidden = num_experts, hidden
        is_on_gpu = self.device is not None and self.device.type == "cuda"
        self.check_inputs = not is_on_gpu if check_inputs is None else check_inputs
        self.expert_alignment, self.num_max_tokens_per_rank = expert_alignment, num_max_tokens_per_rank
        self._is_closed, self._num_sms, self._num_dispatches = False, num_sms, 0
        self.precision = Precision()
        error = None
        try:
            self.precision = Precision.of(precision)
            checks.check_sizes(num_experts, hidden, expert_alignment, num_max_tokens_per_rank, seed, self.num_ranks)
            checks.check_resources(num_sms, max_buffer_bytes, check_inputs)
        except InvalidArgument as raised:
            error = raised
        try:
            agree(self._transport, "EPCommunicator", self._facts(seed, max_buffer_bytes), error)
        except BaseException:
            self.close()
            raise
        self._exchange = Exchange(self._transport, hidden, num_experts, self.precision, seed, num_sms)
        self.name = f"communicator {next(_numbers)}"
        """By which operators of torch know it: of this process, while it lives."""
        BY_NAME[self.name] = self

    def _facts(self, seed: int, max_buffer_bytes: int) -> dict[str, object]:
        from . import __version__

        return {
            "fp4comm version": __version__,
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            **{f"precision of {name}": leg for name, leg in self.precision.legs().items()},
            "expert_alignment": self.expert_alignment,
            "num_max_tokens_per_rank": self.num_max_tokens_per_rank,
            "check_inputs": self.check_inputs,
            "seed": seed,
            "max_buffer_bytes": max_buffer_bytes,
            "num_sms": self._num_sms,
        }

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._transport.rank

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return self._transport.num_ranks

    @property
    def num_local_experts(self) -> int:
        """Experts on each rank."""
        return self.num_experts // self.num_ranks

    @property
    def device(self) -> torch.device | None:
        """Where tokens and results lie; None = on any one device (a single process)."""
        return self._transport.device

    @property
    def transport(self) -> str:
        """Name of the transport in use."""
        return self._transport.name

    @property
    def traffic(self) -> Counter[str]:
        """Bytes that this rank has sent to other ranks so far, by leg. `clear()` it to start again.

        With "peer" and `num_max_tokens_per_rank` the most that it may have been: only the device knows how many rows
        were used.
        """
        return self._exchange.traffic

    @property
    def stage_hook(self) -> StageHook | None:
        """For profiling: called with "dispatch.pack", "dispatch.wire", "dispatch.unpack", "combine.pack", ...

        It returns a context manager that is entered around that stage. None = not at all.
        """
        return self._exchange.stage

    @stage_hook.setter
    def stage_hook(self, hook: StageHook | None) -> None:
        self._exchange.stage = hook

    def dispatch(
        self,
        x: Tensor | FP8Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: Handle | None = None,
        layout: str | None = None,
        out: torch.dtype | str | None = None,
    ) -> tuple[Received, Handle]:
        """Sends every token to the ranks of its experts.

        Args:
            x: `[num_tokens, hidden]` bfloat16, float16 or float32, or an `FP8Tensor`. num_tokens may differ between
                ranks and may be 0.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, the experts of each token, -1 = none. num_topk is equal
                on all ranks. On a GPU with `num_max_tokens_per_rank`, where nobody waits for the device, numbers that
                are no expert count as -1, and the next call on the device that notices them raises.
            topk_weights: `[num_tokens, num_topk]` float32; None = 1.
            handle: of an earlier dispatch, instead of topk_idx and topk_weights: the same routes and layout, and the
                same weights as constants.
            layout: "expert" (default, rows in the order that grouped GEMMs read) or "rank"; see `Received`.
            out: dtype of `Received.x`: bfloat16, float16 or float32, by default that of x (bfloat16 for an
                `FP8Tensor`); or, neither of which is differentiable, so that x must not need a gradient: "fp8" for an
                `FP8Tensor`, "fp8_rows" for a `fp4comm.moe.FP8Rows` (layout "expert").

        Returns:
            What arrived, and the handle for `combine`. Differentiable in x and topk_weights.

        Raises:
            InvalidArgument: on all ranks (see `check_inputs`), before anything is sent.
            NotAvailable: on all ranks: a GPU has no memory left for what arrives (transport "peer").
            TransportError: a rank did not answer in time; on GPUs, where calls return before that is known, in an
                earlier call, whose results and those that followed from them are undefined.
        """
        return self._dispatch(x, topk_idx, topk_weights, handle, layout, out, {})

    def _dispatch(
        self,
        x: Tensor | FP8Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: Handle | None,
        layout: str | None,
        out: torch.dtype | str | None,
        more_facts: Mapping[str, object],
        zeroes_rest: bool = True,
    ) -> tuple[Received, Handle]:
        """`dispatch`, with more that ranks must agree about. zeroes_rest: as in `NewRoutes`."""
        self._check_open()
        facts: dict[str, object] = {}
        plan = error = None
        try:
            raise_deferred()
            checks.check_dispatch(self, x, topk_idx, topk_weights, handle, layout, out)
            facts = checks.dispatch_facts(x, topk_idx, topk_weights, handle, layout, out) | dict(more_facts)
            if topk_idx is not None:
                own_idx = topk_idx.clone(memory_format=torch.contiguous_format)
                plan = plan_send(own_idx, self.num_experts, self.num_ranks, self.num_max_tokens_per_rank)
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        if handle is not None:
            assert zeroes_rest, "its routes are made"
            self._agree("dispatch", facts, error)
            send = self._exchange.pack_again("dispatch", _rows_of(x), handle.routing)
            arrived = self._exchange.to_experts("dispatch", send, handle.routing.sizes)
            return self._unpack(x, topk_weights, arrived, handle.routing, out)
        know_sizes = self._begin_sizes(plan, facts, error)
        arrived, routing = self._send_along(plan, know_sizes, x, topk_weights, layout or "expert", zeroes_rest)
        return self._unpack(x, topk_weights, arrived, routing, out)

    def _send_along(
        self,
        plan: SendPlan | None,
        know_sizes: Callable[[], Sizes],
        x: Tensor | FP8Tensor,
        topk_weights: Tensor | None,
        layout: str,
        zeroes_rest: bool,
    ) -> tuple[WireRows, Routing]:
        """Sends tokens along new routes; what has arrived, and its routing. No plan: `know_sizes` raises why."""
        sizes = know_sizes() if self._transport.has_windows else None
        if plan is not None:  # packed while the sizes are on their way, unless it is they that say where to
            try:
                weights = None if topk_weights is None else topk_weights.contiguous()
                send = self._exchange.pack("dispatch", _rows_of(x), plan, sizes, weights, with_routing=True)
            except BaseException:
                if sizes is None:
                    know_sizes()  # its memory is in use until then
                raise
        sizes = sizes or know_sizes()
        assert plan is not None, "an error has been raised"
        self._num_dispatches += 1  # all ranks have agreed to go on, and so count alike
        arrived = self._exchange.to_experts("dispatch", send, sizes)
        return arrived, self._exchange.read_routing(
            arrived, NewRoutes(plan, sizes, layout, zeroes_rest, self._num_dispatches)
        )

    def _begin_sizes(
        self, plan: SendPlan | None, facts: dict[str, object], error: Exception | None
    ) -> Callable[[], Sizes]:
        """Exchanges what a dispatch with new routes must know; returns what waits for it."""
        capacity, alignment = self.num_max_tokens_per_rank, self.expert_alignment
        compares = self.check_inputs or capacity is None or self.device == torch.device("cpu")
        if error is not None and not compares:
            raise error
        is_fixed = plan is not None and plan.rows_stride is not None
        if is_fixed and (self.num_ranks == 1 or not compares):
            return lambda: Sizes.of_capacity(capacity or 0, self.num_ranks, alignment)
        counts = None if plan is None else plan.counts
        numbers = [self._numbers(counts)]
        if self._transport.has_windows:  # every rank must know the rows of all
            numbers.append(numbers[0][:, 1].expand(self.num_ranks, -1))
        own_counts = None if counts is None or len(numbers) > 1 else to_host(counts)
        finish = begin_agreement(self._transport, "dispatch", facts, error, numbers)

        def know() -> Sizes:
            theirs = finish().numpy()  # NumPy is quicker with a few numbers
            assert plan is not None, "an error has been raised"
            if theirs[:, 0].any():
                self._raise_invalid_experts(plan, bool(theirs[self.rank, 0]))
            if is_fixed:
                return Sizes.of_capacity(capacity or 0, self.num_ranks, alignment)
            rows_from_rank = tuple(theirs[:, 1].tolist())
            width = numbers[0].shape[1]
            per_expert = tuple(theirs[:, 2:width].sum(0).tolist()) if width > 2 else None
            if own_counts is not None:
                rows_to_rank = tuple(own_counts.numpy()[:, 1].tolist())
                return Sizes(rows_to_rank, rows_from_rank, capacity, alignment, per_expert)
            rows_of_all = tuple(map(tuple, theirs[:, width:].tolist()))
            return Sizes(rows_of_all[self.rank], rows_from_rank, capacity, alignment, per_expert, rows_of_all)

        return know

    def _numbers(self, counts: Tensor | None) -> Tensor:
        """What travels with an agreement: of equal width on all ranks, whatever they are about to do.

        On a GPU the choices of each expert are among it, since the host must know their sum; a CPU reads them from
        the rows that arrive.
        """
        is_on_host = self.device == torch.device("cpu") or (counts is not None and counts.device.type == "cpu")
        width = 2 if is_on_host else 2 + self.num_local_experts
        return (
            torch.zeros(self.num_ranks, width, device="cpu", dtype=torch.int64) if counts is None else counts[:, :width]
        )

    def _raise_invalid_experts(self, plan: SendPlan, is_own: bool) -> NoReturn:
        """All ranks know that `topk_idx` has numbers which are no experts on one of them."""
        error = None
        if is_own:
            try:
                checks.check_experts(plan.topk_idx, self.num_experts)
            except InvalidArgument as raised:
                error = raised
            with contextlib.suppress(InvalidArgument):
                raise_deferred()  # the same, by the kernel
        agree(self._transport, "dispatch", {}, error)
        raise AssertionError("one rank has an error")

    def _unpack(
        self,
        x: Tensor | FP8Tensor,
        topk_weights: Tensor | None,
        arrived: WireRows,
        routing: Routing,
        out: torch.dtype | str | None,
    ) -> tuple[Received, Handle]:
        differentiable = None if isinstance(x, FP8Tensor) else x
        dtype = torch.bfloat16 if differentiable is None else differentiable.dtype
        dtype = out if isinstance(out, torch.dtype) else dtype
        inputs = (self._exchange, arrived, routing, None if isinstance(out, str) else dtype)
        needs_graph = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (differentiable, topk_weights)
        )
        recv_x: Any
        as_fp8: FP8Tensor | FP8Rows | None = None
        if isinstance(out, str):  # first, since rows may still be on their way while this is enqueued
            kind: type[FP8Tensor] | type[FP8Rows] = FP8Tensor if out == "fp8" else FP8Rows
            as_fp8 = kind.empty(routing.num_rows, self.hidden, arrived.buffer.device)
            self._exchange.unpack("dispatch", arrived, as_fp8._rows, routing)
        if needs_graph:
            recv_x, recv_topk_weights, anchor = Dispatch.apply(differentiable, topk_weights, *inputs)
        else:
            recv_x, recv_topk_weights, anchor = unpack_dispatch(*inputs)
        recv_x = recv_x if as_fp8 is None else as_fp8
        is_rotated = self.precision.leg("dispatch").hadamard
        arrived = self._exchange.settle(arrived)
        received = Received(recv_x, recv_topk_weights, routing, arrived, is_rotated)
        return received, Handle(routing, recv_topk_weights, anchor, self)

    def combine(self, y: Tensor, handle: Handle, *, apply_weights: bool | None = None) -> Tensor:
        """Brings the experts' results home and sums them per token, in float32 and in a fixed order.

        Args:
            y: rows in the order of the dispatch's `Received.x`: `[num_rows, hidden]` bfloat16, float16 or float32.
            handle: of that dispatch.
            apply_weights: whether to multiply by the routing weights here. By default True for layout "expert". False
                if the experts have applied `Received.topk_weights` themselves; always False for layout "rank", whose
                rows are already sums over local experts. Those multiplied by here must not have been changed in place.

        Returns:
            `[num_tokens, hidden]`, dtype of y; zeros for a token without experts. Differentiable in y and the weights.

        Raises:
            InvalidArgument: on all ranks (see `check_inputs`), before anything is sent.
            NotAvailable: on all ranks: a GPU has no memory left for what arrives (transport "peer").
            TransportError: a rank did not answer in time; on GPUs, where calls return before that is known, in an
                earlier call, whose results and those that followed from them are undefined.
        """
        self._check_open()
        facts: dict[str, object] = {}
        error, has_gradient = None, False
        try:
            raise_deferred()
            checks.check_combine(self, y, handle, apply_weights)
            apply_weights = handle.routing.layout == "expert" if apply_weights is None else apply_weights
            facts = checks.combine_facts(y, handle, apply_weights)
            has_gradient = torch.is_grad_enabled() and (y.requires_grad or handle.anchor.requires_grad)
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        any_gradient = self._agree("combine", facts, error, has_gradient)
        weights = handle.topk_weights if apply_weights else None
        anchor = handle.anchor
        if any_gradient and not anchor.requires_grad:
            anchor = torch.zeros(
                (), device="cpu", requires_grad=True
            )  # backward is collective: a rank without rows takes part
        if not any_gradient:
            return sum_combine(y, weights, self._exchange, handle.routing)
        combined_x: Tensor = Combine.apply(y, weights, anchor, self._exchange, handle.routing)
        return combined_x

    def _agree(self, operation: str, facts: Mapping[str, object], error: Exception | None, flag: bool = False) -> bool:
        """Compares the arguments of a call whose row counts are known already, if that is wanted.

        Returns whether `flag` is set on any rank.
        """
        if self.check_inputs:
            numbers = self._numbers(None)
            numbers[:, 0] = int(flag)
            return bool(agree(self._transport, operation, facts, error, numbers).any())
        if error is not None:
            raise error
        return flag

    def _refuse(self, error: Exception) -> NoReturn:
        """Raises an error of this rank on all ranks, which are about to dispatch."""
        self._check_open()
        self._begin_sizes(None, {}, error)()
        raise error

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this EPCommunicator is closed")
        # neither kernels nor messages can read the tensors of a transform
        if torch._C._functorch.peek_interpreter_stack() is not None:
            accepted = "calls outside of torch.func.grad, vmap and the like, with gradients by backward()"
            raise InvalidArgument(f"this call is in a transform of torch.func; accepted: {accepted}")

    def close(self) -> None:
        """Frees the transport. May be called more than once; the communicator can't be used afterwards.

        CUDA graphs that captured its calls must be destroyed before, or NCCL waits for them without end.
        """
        if not self._is_closed and self._owns_transport:
            self._transport.close()
        self._is_closed = True

    def __enter__(self) -> EPCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> EPCommunicator:
        """Itself: copies of a module share its communicator, since all ranks must make a new one together."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an EPCommunicator can't be pickled or copied, as it belongs to this process and its group; "
            "save a module's state_dict(), and make a communicator in each process"
        )

    def __repr__(self) -> str:
        legs = ", ".join(f"{name}={leg['wire']}" for name, leg in self.precision.legs().items())
        return (
            f"EPCommunicator(rank {self.rank} of {self.num_ranks} over {self._transport.describe()}, "
            f"num_experts={self.num_experts}, hidden={self.hidden}, {legs})"
        )


def _rows_of(x: Tensor | FP8Tensor) -> Rows:
    return x._rows if isinstance(x, FP8Tensor) else Rows.of(x)
