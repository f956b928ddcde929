"""What both kinds of buffers stand on: the communicators of a group, and how callers' tensors travel over them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import checks
from ...backends import Rows
from ...codec import FLOAT_DTYPES, FP8Tensor, quantize_fp8
from ...communicator import EPCommunicator, Handle
from ...errors import InvalidArgument, is_count, require
from ...exchange import Exchange
from ...formats import BLOCK_SIZE, GROUP_SIZE, Kind
from ...memory import empty
from ...precision import Leg, Precision
from ...routing import Routing
from ..pool import OPTIONS, Options, Pool, checked_options

X = Tensor | tuple[Tensor, Tensor]

_OPTIONS = tuple(name for name in OPTIONS if name != "num_max_tokens_per_rank")  # callers say that themselves
_EXACT = Precision.of("fp32")


_choice = checked_options("fp4", {}, _OPTIONS)  # of the buffers that are made from now on
_WIRES: dict[tuple[int, Options], Wires] = {}  # by the group's id, since those of MPI have no hash
_COUNTERS: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
_COUNTERS_OF_MPI: dict[int, tuple[Any, Iterator[int]]] = {}
_USED: list[Wires] = []  # those with communicators, of buffers from before the last `close` too


def configure(*, precision: Precision | str = "fp4", **options: Any) -> None:
    """Chooses the numbers on the wire for all buffers that are made from now on.

    Args:
        precision: a `Precision` or the name of a recipe. "fp4" (default), "fp8" and "mxfp4" compress; "bf16" moves
            bfloat16 and FP8 as they are, which is what DeepEP does; with "fp32" float32 is exact too.
        options: further arguments of `EPCommunicator`: check_inputs, max_buffer_bytes, num_sms, seed, timeout_secs,
            transport. Equal on all ranks, as is precision.

    Raises:
        InvalidArgument: an unknown recipe or option.
    """
    global _choice
    _choice = checked_options(precision, options, _OPTIONS)


def _counter_of(group: Any) -> Iterator[int]:
    """Numbers for a group's dispatches, which its ranks count alike, over all communicators and beyond `close`."""
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return _COUNTERS.setdefault(group, itertools.count(1))
    return _COUNTERS_OF_MPI.setdefault(id(group), (group, itertools.count(1)))[1]


def wires_of(group: Any) -> Wires:
    """Those of a group, for the numbers that are chosen now."""
    key = (id(group), _choice)
    if key not in _WIRES:
        _WIRES[key] = Wires(group, _choice)
    return _WIRES[key]


def communicators() -> tuple[EPCommunicator, ...]:
    """The communicators of all buffers, in the order in which they were made. Their `traffic` counts the bytes sent."""
    return tuple(comm for wires in _USED for comm in wires.communicators)


def close() -> None:
    """Closes the communicators of all buffers. Collective; to be called before the process groups are destroyed.

    A buffer that is used again afterwards makes new ones.
    """
    _WIRES.clear()
    while _USED:
        _USED.pop(0).close()


def check_alignment(expert_alignment: object) -> None:
    """Raises what is wrong with it."""
    require(is_count(expert_alignment, 1), "expert_alignment", repr(expert_alignment), "a positive integer")


def group_place(group: Any, comm: Any = None) -> tuple[Any, int, int]:
    """The group to use, this process's place in it and its size.

    Raises:
        InvalidArgument: there is none, or this process is not in it.
    """
    chosen = comm if group is None else group
    accepted = "a torch ProcessGroup or an mpi4py communicator of the ranks that share experts, this one among them"
    if hasattr(chosen, "Get_rank") and hasattr(chosen, "Get_size"):
        return chosen, chosen.Get_rank(), chosen.Get_size()
    require(callable(getattr(chosen, "rank", None)), "group", f"a {type(chosen).__name__}", accepted)
    rank = chosen.rank()
    require(rank >= 0, "group", "without this process", accepted)
    return chosen, rank, chosen.size()


@dataclass(frozen=True, eq=False)
class Routes:
    """Where the tokens of a dispatch went. Opaque to callers, whose handles hold it.

    Attributes:
        handle: of the communicator that found them; others of the group take it as well, for rows of other widths.
        num_experts, alignment, capacity: what those have in common.
        order: with a capacity in the rank layout, where the received rows are that callers see one after the other.
        num_rows: that callers see.
        made_in: the backward pass that it was made in, -1 = none.
    """

    handle: Handle
    num_experts: int
    alignment: int
    capacity: int | None
    order: Tensor | None
    num_rows: int
    made_in: int

    @property
    def routing(self) -> Routing:
        return self.handle.routing

    @property
    def is_backward(self) -> bool:
        """Whether rows that travel along them now are gradients.

        They are in a backward pass, but not in the one that made the routes, which then computes activations again.
        """
        task = torch._C._current_graph_task_id()
        return task not in (-1, self.made_in)

    def to_caller(self, rows: Tensor, unused: float = 0) -> Tensor:
        """Rows of the communicator as callers see them."""
        if self.order is not None:
            rows = rows.view(torch.uint8)[self.order].view(rows.dtype) if rows.ndim > 1 else rows[self.order]
        return fit(rows, self.num_rows, unused)

    def from_caller(self, rows: Tensor) -> Tensor:
        """The reverse."""
        if self.order is None:
            return rows[: self.routing.num_rows]
        placed = rows.new_zeros(self.order.shape[0], *rows.shape[1:])
        placed[self.order[: rows.shape[0]]] = rows[: self.order.shape[0]]
        return placed


def fit(rows: Tensor, num_rows: int, value: float = 0) -> Tensor:
    """The first `num_rows` rows, or all with rows of `value` after them."""
    if rows.shape[0] >= num_rows:
        return rows[:num_rows]
    unused = torch.full((num_rows - rows.shape[0], *rows.shape[1:]), value, dtype=torch.float32, device=rows.device)
    return torch.cat([rows.view(torch.uint8), unused.to(rows.dtype).view(torch.uint8)]).view(rows.dtype)


@dataclass(frozen=True)
class Parcel:
    """A caller's rows as a communicator takes them.

    Attributes:
        rows: `[num_tokens, width]`.
        out: what to ask of it.
        is_exact: they are bytes, which must travel as they are.
        open: from received rows to what the caller gets.
    """

    rows: Tensor | FP8Tensor
    out: torch.dtype | str | None
    is_exact: bool
    open: Callable[[Any], X]

    @property
    def width(self) -> int:
        return self.rows.hidden if isinstance(self.rows, FP8Tensor) else self.rows.shape[1]


def is_wide(leg: Leg) -> bool:
    """Whether the leg sends FP8 in a wider format, in which some of its numbers would change."""
    return leg.kind in (Kind.F32, Kind.BF16)


def wrap(x: X, leg: Leg, as_fp8: bool = False) -> Parcel:
    """Rows of floats travel as they are, FP8 with scales per 128 as an `FP8Tensor`, and the rest as bytes.

    FP8 is bytes too where the leg is wide. Floats arrive as FP8 if `as_fp8`.
    """
    fp8 = torch.float32 if leg.hadamard else "fp8"  # the reverse of a Hadamard transform is not FP8
    data, scales = x if isinstance(x, (tuple, list)) else (x, None)
    require(isinstance(data, Tensor) and data.ndim == 2, "x", what(data), "[num_tokens, hidden], or that and scales")
    if scales is None and data.dtype in FLOAT_DTYPES:
        if as_fp8:
            return Parcel(data, fp8, False, lambda rows: _opened_fp8(rows, torch.float32))
        return Parcel(data, None, False, lambda rows: rows)
    if scales is not None:
        fits = isinstance(scales, Tensor) and scales.ndim == 2 and len(scales) == len(data)
        require(fits and scales.element_size() == 4, "scales", what(scales), f"[{len(data)}, n] of 4 bytes each")
    if not _is_fp8(data, scales) or is_wide(leg):
        return _as_words(data, scales)
    assert scales is not None
    rows = FP8Tensor(data.contiguous(), _as_floats(scales))
    return Parcel(rows, fp8, False, lambda rows: _opened_fp8(rows, scales.dtype))


def what(value: Any) -> str:
    """For messages."""
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _is_fp8(data: Tensor, scales: Tensor | None) -> bool:
    if scales is None or data.dtype != torch.float8_e4m3fn or data.shape[1] % BLOCK_SIZE:
        return False
    numbers_per_scale = {torch.float32: GROUP_SIZE, torch.int32: 4 * GROUP_SIZE}.get(scales.dtype)
    return numbers_per_scale is not None and scales.shape[1] * numbers_per_scale == data.shape[1]


def _as_floats(scales: Tensor) -> Tensor:
    """float32 `[num_tokens, hidden / 128]`, of the same or of four exponents in an int32."""
    if scales.dtype == torch.float32:
        return scales.contiguous()
    exponents = scales.contiguous().view(torch.uint8).to(torch.int32)
    return (exponents << 23).view(torch.float32)


def as_exponents(scales: Tensor) -> Tensor:
    """The reverse for powers of two: int32, `[num_tokens, hidden / 512]`."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)


def _opened_fp8(rows: Tensor | FP8Tensor, dtype: torch.dtype) -> X:
    fp8 = rows if isinstance(rows, FP8Tensor) else quantize_fp8(rows)
    return fp8.data, fp8.scales if dtype == torch.float32 else as_exponents(fp8.scales)


def _as_words(data: Tensor, scales: Tensor | None) -> Parcel:
    """The bytes as float32, whose wire moves them unchanged, padded to a width that communicators take."""
    parts = [data.contiguous().view(torch.uint8)]
    parts += [] if scales is None else [scales.contiguous().view(torch.uint8)]
    widths = [part.shape[1] for part in parts]
    padding = -sum(widths) % (4 * BLOCK_SIZE)
    parts += [parts[0].new_zeros(len(data), padding)] * (padding > 0)

    def open_words(words: Tensor) -> X:
        split = words.view(torch.uint8).split([*widths, words.shape[1] * 4 - sum(widths)], dim=1)
        opened = split[0].contiguous().view(data.dtype)
        return opened if scales is None else (opened, split[1].contiguous().view(scales.dtype))

    return Parcel(torch.cat(parts, dim=1).view(torch.float32), None, True, open_words)


@dataclass(frozen=True, eq=False)
class Arrived:
    """What a dispatch with new routes brings.

    Attributes:
        x: in the form that was sent.
        topk_idx: `[received tokens, num_topk]` int32, local experts; as the communicator orders them.
        weights: of the rows as callers see them: `[num_rows, num_topk]`, or `[num_rows]` in the expert layout.
        counts: `[num_local_experts]` int64, without padding.
    """

    x: X
    topk_idx: Tensor
    weights: Tensor
    counts: Tensor
    routes: Routes


class Wires:
    """The communicators of one group and choice of numbers, one for each width and size, made when they are needed."""

    def __init__(self, group: Any, choice: Options) -> None:
        self._group, self._options, self._pool = group, dict(choice), Pool()
        self._precision: Precision = self._options["precision"]
        self.num_ranks: int = group_place(group)[2]
        self.num_users = 0

    def release(self) -> None:
        """A buffer has gone. Collective; the last one closes the communicators."""
        self.num_users -= 1
        if self.num_users == 0:
            self.close()

    def close(self) -> None:
        self._pool.close()

    @property
    def communicators(self) -> tuple[EPCommunicator, ...]:
        return self._pool.all()

    def leg(self, name: str) -> Leg:
        return self._precision.leg(name)

    def communicator(
        self, num_experts: int, hidden: int, alignment: int, capacity: int | None, is_exact: bool
    ) -> EPCommunicator:
        if self not in _USED:
            _USED.append(self)
        chosen = {"precision": _EXACT if is_exact else self._precision, "num_max_tokens_per_rank": capacity}
        return self._pool.get(
            self._group, num_experts, hidden, tuple(sorted({**self._options, **chosen}.items())), alignment
        )

    def dispatch(
        self,
        x: X,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        num_experts: int,
        *,
        layout: str = "rank",
        alignment: int = 1,
        capacity: int | None = None,
        num_rows: int | None = None,
        as_fp8: bool = False,
    ) -> Arrived:
        """Sends tokens along new routes. Collective.

        Args:
            x, topk_idx, topk_weights: of this rank's tokens.
            num_experts: of all ranks.
            layout, alignment, capacity: as in `EPCommunicator`. With a capacity in the rank layout, received rows are
                moved together.
            num_rows: that callers shall see; None = as many as there are.
            as_fp8: x is of floats that shall arrive as FP8 with scales per 128. Not where the leg is wide.
        """
        parcel = wrap(x, self.leg("dispatch"), as_fp8)
        comm = self.communicator(num_experts, parcel.width, alignment, capacity, parcel.is_exact)
        recv, handle = comm.dispatch(parcel.rows, topk_idx, topk_weights, layout=layout, out=parcel.out)
        routing, order = replace(handle.routing, number=next(_counter_of(self._group))), None
        handle = replace(handle, routing=routing)
        if routing.used_rows is not None:
            order = torch.argsort((routing.used_rows < 0).to(torch.uint8), stable=True)
        rows = routing.num_rows if num_rows is None else num_rows
        task = torch._C._current_graph_task_id()
        routes = Routes(handle, num_experts, alignment, capacity, order, rows, task)
        return Arrived(
            each(parcel.open(recv.x), routes.to_caller),
            recv.topk_idx,
            routes.to_caller(recv.topk_weights),
            recv.num_recv_tokens_per_expert,
            routes,
        )

    def dispatch_again(self, x: X, routes: Routes) -> X:
        """Sends other rows along known routes, gradients by the leg grad_dispatch. Collective."""
        leg_name = "grad_dispatch" if routes.is_backward else "dispatch"
        parcel = wrap(x, self.leg(leg_name))
        comm, handle = self._along(routes, parcel.width, parcel.is_exact)
        if parcel.is_exact or leg_name == "dispatch":
            rows = comm.dispatch(parcel.rows, handle=handle, out=parcel.out)[0].x
        else:
            rows = _dispatch_gradients(comm, handle, parcel)
        return each(parcel.open(rows), routes.to_caller)

    def combine(
        self, y: Tensor, routes: Routes, slot_weights: Tensor | None = None, bias: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Brings rows home and sums them, gradients by the leg grad_combine. Collective.

        Args:
            y: `[num_rows, hidden]`, in the order of the dispatch.
            routes: of that dispatch.
            slot_weights: what travels back for the slots of each token, as shaped by the dispatch.
            bias: `[num_tokens, hidden]` each, to add.
        """
        require(isinstance(y, Tensor), "x", what(y), "a tensor")
        leg_name = "grad_combine" if routes.is_backward else "combine"
        comm, handle = self._along(routes, y.shape[-1], False)
        error, name = None, checks.name_of(handle)
        facts = {"handle": name, "weights": slot_weights is not None, "leg": leg_name, "dtype": str(y.dtype)}
        try:
            _check_combine(y, routes, slot_weights, bias)
            y = routes.from_caller(y)
            checks.check_combine(comm, y, handle, False)
        except InvalidArgument as raised:
            error = raised
        comm._agree("combine", facts, error)
        routing = handle.routing
        values = None if slot_weights is None else routing.slot_values(routes.from_caller(slot_weights))
        shape = (routing.plan.num_tokens, y.shape[1])
        out = empty(shape, torch.float32 if bias else y.dtype, y.device)
        weights = comm._exchange.to_tokens(leg_name, Rows.of(y), routing, out, slot_values=values, sums_slots=True)
        for addend in bias:
            out += addend
        return out.to(y.dtype), weights

    def _along(self, routes: Routes, hidden: int, is_exact: bool) -> tuple[EPCommunicator, Handle]:
        """The communicator for rows of that width, and the routes as its own."""
        comm = self.communicator(routes.num_experts, hidden, routes.alignment, routes.capacity, is_exact)
        return comm, replace(routes.handle, owner=comm)


def _check_combine(y: Tensor, routes: Routes, slot_weights: Tensor | None, bias: tuple[Tensor, ...]) -> None:
    require(y.ndim == 2 and len(y) == routes.num_rows, "x", what(y), f"[{routes.num_rows}, hidden], as dispatched")
    plan, is_rank_layout = routes.routing.plan, routes.routing.experts is None
    if slot_weights is not None:
        shape = [routes.num_rows, plan.num_topk] if is_rank_layout else [routes.num_rows]
        fits = list(slot_weights.shape) == shape and slot_weights.dtype == torch.float32
        require(fits, "topk_weights", what(slot_weights), f"torch.float32 of shape {shape}")
    for addend in bias:
        shape = [plan.num_tokens, y.shape[1]]
        fits = isinstance(addend, Tensor) and list(addend.shape) == shape and addend.dtype == y.dtype
        require(fits, "bias", what(addend), f"{y.dtype} of shape {shape}, or two of them")


def _dispatch_gradients(comm: EPCommunicator, handle: Handle, parcel: Parcel) -> Tensor | FP8Tensor:
    error = None
    rows, routing = parcel.rows, handle.routing
    try:
        checks.check_dispatch(comm, rows, None, None, handle, None, None)
    except InvalidArgument as raised:
        error = raised
    facts = {"leg": "grad_dispatch", "out": str(parcel.out), "handle": checks.name_of(handle)}
    comm._agree("dispatch", facts, error)
    if parcel.out == "fp8":
        as_fp8 = FP8Tensor.empty(routing.num_rows, comm.hidden, routing.recv_topk_idx.device)
        _send_again(comm._exchange, "grad_dispatch", parcel, routing, as_fp8._rows)
        return as_fp8
    dtype = parcel.out if isinstance(parcel.out, torch.dtype) else rows.data.dtype
    received = empty((routing.num_rows, comm.hidden), dtype, rows.data.device)
    _send_again(comm._exchange, "grad_dispatch", parcel, routing, Rows.of(received))
    return received


def _send_again(exchange: Exchange, leg_name: str, parcel: Parcel, routing: Routing, out: Rows) -> None:
    rows = parcel.rows._rows if isinstance(parcel.rows, FP8Tensor) else Rows.of(parcel.rows)
    arrived = exchange.to_experts(leg_name, exchange.pack_again(leg_name, rows, routing), routing.sizes)
    exchange.unpack(leg_name, arrived, out, routing)
    exchange.settle(arrived)


def each(x: X, function: Callable[[Tensor], Tensor]) -> X:
    return function(x) if isinstance(x, Tensor) else (function(x[0]), function(x[1]))
