"""The two movements of expert parallelism on raw rows: tokens to the ranks of their experts, and rows back home.

No autograd and no checks of user input here; `autograd.py` and `communicator.py` stand on this. Both movements have
three stages, which a `stage` hook can time: `pack` (gather or local sum, fused with quantization, into wire rows),
`wire` (one byte message per pair of ranks) and `unpack` (expansion fused with reordering or with the sum over ranks).
Where the transport has windows, `pack` writes to the memory of the other ranks and `wire` is the wait for theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from .backends import Arrivals, BufferRows, PeerRows, Rows, backend_for
from .errors import InvalidArgument
from .formats import Kind
from .memory import empty
from .precision import Leg, Precision
from .routing import ExpertLayout, NewRoutes, Routing, SendPlan, Sizes
from .transport import Transport
from .transport.base import RowMatrix, Window

# Blocks per multiprocessor that send rows while others expand what arrives, into one row each or into many; on H200.
_RANK_COUNTING_BLOCKS, _EXPERT_COUNTING_BLOCKS = 2, 1

StageHook = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False)
class WireRows:
    """Rows as they travel: `[data | scales | weights and experts of the top-k]` each, at a fixed stride.

    Attributes:
        buffer: uint8 `[num_rows, row_bytes]`.
        kind: what the data are.
        layout: offsets and sizes, a `RowLayout` of `csrc/include/fp4comm/wire.h`.
        num_topk: slots of routing metadata per row, 0 if the rows carry none.
        num_sms: multiprocessors that reading or writing them may take, None = all.
        window: where they are written to, if that is on other ranks; `buffer` then is what arrives at this one.
        lease: whether the buffer still holds them; None = for ever.
        arrivals: how to wait for them, for who reads them first; None = they are here.
    """

    buffer: Tensor
    kind: Kind
    layout: Any
    num_topk: int
    num_sms: int | None = None
    window: Window | None = None
    lease: Callable[[], bool] | None = None
    arrivals: Arrivals | None = None

    @cached_property
    def rows(self) -> Rows:
        """Data and scales."""
        if self.window is not None:
            window = self.window
            sizes = (window.table, window.num_ranks, window.num_turns)
            return PeerRows(self.kind, window.num_rows, self.layout, *sizes, self.num_sms, window.counting_blocks)
        return BufferRows(self.kind, self.buffer, self.layout, self.num_sms, self.arrivals)

    @cached_property
    def kept(self) -> WireRows:
        """The same in memory that nobody writes to.

        Raises:
            InvalidArgument: it is too late for that.
        """
        if self.lease is None:
            return self
        if not self.lease():
            raise InvalidArgument(
                "payload: its memory may have been used again; accepted with transport 'peer': before the next call of "
                "the communicator, combine and backward passes included"
            )
        return replace(self, buffer=self.buffer.clone(), lease=None)

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether the rows are nothing but numbers of that dtype, one after the other."""
        plain = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16}.get(self.kind)
        return plain == dtype and self.layout.data_bytes == self.layout.row_bytes and self.buffer.is_contiguous()

    @property
    def weights(self) -> Tensor:
        """float32 `[num_rows, num_topk]`, a view of the rows' weights."""
        start = self.layout.weight_offset
        return self.buffer[:, start : start + 4 * self.num_topk].view(torch.float32)


class Exchange:
    """Moves rows over a transport.

    Attributes:
        traffic: bytes that this rank has sent to other ranks, by leg.
        stage: called with "dispatch.pack", "dispatch.wire", ... around each stage; None = not at all.
    """

    def __init__(
        self,
        transport: Transport,
        hidden: int,
        num_experts: int,
        precision: Precision,
        seed: int,
        num_sms: int | None = None,
    ) -> None:
        self.transport = transport
        self.num_sms = num_sms
        self.hidden = hidden
        self.num_experts = num_experts
        self.num_local_experts = num_experts // transport.num_ranks
        self.precision = precision
        self.seed = seed
        self.traffic: Counter[str] = Counter()
        self.stage: StageHook | None = None
        self._calls = 0

    def pack(
        self,
        leg_name: str,
        x: Rows,
        plan: SendPlan,
        sizes: Sizes | None,
        weights: Tensor | None = None,
        with_routing: bool = False,
        counting_blocks: int = 0,
    ) -> WireRows:
        """Makes the rows that this rank sends.

        Args:
            leg_name: "dispatch" or "grad_dispatch".
            x: `[num_tokens, hidden]` rows of any kind.
            plan: which rows go where.
            sizes: of the messages; may be None where the transport has no windows.
            weights: `[num_tokens, num_topk]` float32, to travel with the routing; None = 1.
            with_routing: whether rows carry the experts and weights of their slots.
            counting_blocks: see `Transport.open_window`.
        """
        backend = backend_for(x.data)
        with self._stage(leg_name, "pack"):
            num_topk = plan.num_topk if with_routing else 0
            if self.transport.has_windows:
                assert sizes is not None
                just_met = with_routing and sizes.capacity is None  # over the sizes
                send = self._window_rows(leg_name, sizes.rows_of_all, num_topk, just_met, counting_blocks)
            else:
                send = self._wire_rows(leg_name, plan.max_rows, num_topk, x.data.device, True)
            backend.pack_tokens(x, send, plan, weights, self.num_experts, self._options(leg_name))
            return send

    def pack_again(self, leg_name: str, x: Rows, routing: Routing) -> WireRows:
        """`pack` along known routes, where received rows may be expanded while others are on their way."""
        counting_blocks = 0
        if routing.sizes.capacity is None and self.num_sms is None:  # two kernels at once would take twice as many
            counting_blocks = _RANK_COUNTING_BLOCKS if routing.slot_rows is None else _EXPERT_COUNTING_BLOCKS
        return self.pack(leg_name, x, routing.plan, routing.sizes, counting_blocks=counting_blocks)

    def to_experts(self, leg_name: str, send: WireRows, sizes: Sizes) -> WireRows:
        """Sends packed rows to the ranks of their experts.

        Returns:
            The received rows, ordered by source rank, then token.
        """
        with self._stage(leg_name, "wire"):
            if send.window is not None:
                return self._arrived(send, is_kept=True)
            if self.transport.num_ranks == 1 and len(send.buffer) >= sizes.num_recv_rows:
                return replace(send, buffer=send.buffer[: sizes.num_recv_rows])
            received = self._wire_rows(leg_name, sizes.num_recv_rows, send.num_topk, send.buffer.device)
            outgoing = _split(send.buffer, sizes.rows_to_rank)
            incoming = _places(received.buffer, sizes)
            self._travel(leg_name, outgoing, incoming)
            if received.num_topk:
                _clear_unused(received, sizes)
            return received

    def read_routing(self, arrived: WireRows, routes: NewRoutes) -> Routing:
        """Completes new routes with the metadata of the rows that came along them."""
        sizes, alignment, num_rows, mark_unused = routes.sizes, None, None, False
        if routes.layout == "expert":
            alignment = sizes.alignment
            num_rows = sizes.num_expert_rows(arrived.num_topk, self.num_local_experts)
        else:
            mark_unused = sizes.capacity is not None
        with self._stage("dispatch", "unpack"):
            backend = backend_for(arrived.buffer)
            idx, weights, counts, experts, used_rows = backend.read_routing(
                arrived, self.num_local_experts, alignment, num_rows, mark_unused
            )
        layout = None if experts is None else ExpertLayout(*experts)
        is_open = layout is not None and layout.ends.device.type == "cuda" and sizes.rows_per_expert is None
        end = layout.ends[-1:] if layout is not None and is_open and not routes.zeroes_rest else None
        return Routing(routes.plan, sizes, idx, weights, counts, layout, used_rows, end, routes.number)

    def unpack(
        self, leg_name: str, arrived: WireRows, out: Rows, routing: Routing, weights: Tensor | None = None
    ) -> None:
        """Expands received rows into the rows that experts see.

        Args:
            leg_name: the leg that they came by.
            arrived: the received rows.
            out: `[routing.num_rows, hidden]` rows of any kind. Those from `routing.end` on are undefined.
            routing: the routes that they came by.
            weights: float32, a factor for each row of `out`; None = 1. Only in the expert layout.
        """
        backend, options = backend_for(arrived.buffer), self._options(leg_name, decode=True)
        with self._stage(leg_name, "unpack"):
            backend.expand_rows(
                arrived.rows, out, routing.source_rows, routing.slot_rows, weights, options, routing.end
            )

    def received_rows(self, arrived: WireRows, routing: Routing, dtype: torch.dtype) -> Tensor:
        """The rows that experts see, as a tensor `[routing.num_rows, hidden]`; received memory itself if it will do."""
        shape = (routing.num_rows, self.hidden)
        if routing.source_rows is None and arrived.is_plain(dtype) and not self.transport.has_windows:
            memory = arrived.buffer.view(dtype)  # not as a view, which autograd would guard against changes
            recv_x = torch.empty(0, dtype=dtype, device=memory.device)
            recv_x.set_(memory.untyped_storage(), memory.storage_offset(), shape, (self.hidden, 1))
            return recv_x
        recv_x = empty(shape, dtype, arrived.buffer.device)
        self.unpack("dispatch", arrived, Rows.of(recv_x), routing)
        return recv_x

    def to_tokens(
        self,
        leg_name: str,
        y: Rows,
        routing: Routing,
        out: Tensor,
        is_weighted: bool = False,
        slot_values: Tensor | None = None,
        sums_slots: bool = False,
    ) -> Tensor | None:
        """Sends one row per received token back and sums, per token, the rows that come back, in rank order.

        Args:
            leg_name: "combine" or "grad_combine".
            y: `[num_rows, hidden]` rows as experts see them; in the expert layout they are summed per token, by slot.
            routing: the routes that the tokens came by.
            out: `[num_tokens, hidden]`, receives the sums.
            is_weighted: multiply by the received weights in the sum over slots.
            slot_values: float32 `[num_recv_tokens, num_topk]` values that travel back to each token's slots.
            sums_slots: of a slot's values add up those of all ranks, not only take that of its expert's rank.

        Returns:
            `[num_tokens, num_topk]` float32, what came back for each slot, if `slot_values` is given.
        """
        backend, plan, sizes = backend_for(y.data), routing.plan, routing.sizes
        with self._stage(leg_name, "pack"):
            send = self._pack_results(leg_name, y, routing, is_weighted, slot_values)
        with self._stage(leg_name, "wire"):
            back = send
            if send.window is not None:
                back = self._arrived(send, is_kept=False)
            elif self.transport.num_ranks > 1:
                back = self._wire_rows(leg_name, plan.max_rows, send.num_topk, y.data.device)
                self._travel(leg_name, _places(send.buffer, sizes), _split(back.buffer, sizes.rows_to_rank))
        with self._stage(leg_name, "unpack"):
            options = self._options(leg_name, decode=True)
            backend.sum_rows(back.rows, Rows.of(out), plan.token_rows, None, options=options)
            if slot_values is None:
                return None
            return _sum_slots(back.weights, plan) if sums_slots else self._collect_slots(back.weights, plan)

    def _pack_results(
        self, leg_name: str, y: Rows, routing: Routing, is_weighted: bool, slot_values: Tensor | None
    ) -> WireRows:
        backend, kind, has_windows = backend_for(y.data), self._leg(leg_name).kind, self.transport.has_windows
        if (
            not has_windows
            and slot_values is None
            and routing.slot_rows is None
            and y.kind == kind
            and y.scales is None
        ):
            layout = _layout(kind, self.hidden, 0)
            as_bytes = y.data.view(torch.uint8) if y.data.is_contiguous() else None
            if as_bytes is not None and as_bytes.shape[1] == layout.row_bytes:  # they are wire rows already
                return WireRows(as_bytes, kind, layout, 0, self.num_sms)
        num_topk = 0 if slot_values is None else slot_values.shape[1]
        num_rows = routing.num_recv_rows
        if has_windows:
            send = self._window_rows(leg_name, routing.sizes.rows_back_of_all, num_topk)
        else:
            send = self._wire_rows(leg_name, num_rows, num_topk, y.data.device, True)
        options = self._options(leg_name)
        if routing.slot_rows is None:
            used_rows = routing.used_rows if has_windows else None  # of a window the others need not be written
            backend.convert_rows(y, send.rows, used_rows, num_rows=num_rows, options=options)
        else:
            weights = routing.recv_topk_weights if is_weighted else None
            backend.sum_rows(y, send.rows, routing.slot_rows, weights, options=options)
        if slot_values is not None and send.window is not None:
            assert isinstance(send.rows, PeerRows)
            self.transport.put_slots(slot_values.contiguous(), send.rows, send.layout.weight_offset)
        elif slot_values is not None:
            send.weights.copy_(slot_values)
        return send

    def settle(self, arrived: WireRows, is_read: bool = True) -> WireRows:
        """The rows, once the kernel that waits for them has been enqueued; without such a one (`is_read`) here."""
        if arrived.arrivals is None:
            return arrived
        if not is_read:
            self.transport.await_rows(arrived.arrivals)
        return replace(arrived, arrivals=None, lease=self.transport.close_window())

    def dot(self, leg_name: str, y: Rows, arrived: WireRows, arrived_row: Tensor) -> Tensor:
        """float32 `[num_rows]`: row i of `y` times row `arrived_row[i]` of what has arrived; 0 where that is -1."""
        options = self._options(leg_name, decode=True)
        products: Tensor = backend_for(y.data).dot_rows(y, arrived.rows, b_row=arrived_row, options=options)
        return products

    def _collect_slots(self, weights: Tensor, plan: SendPlan) -> Tensor:
        """Picks, for each slot of each token, the value that the rank of its expert sent back with the token's row."""
        is_expert = (plan.topk_idx >= 0) & (plan.topk_idx < self.num_experts)
        ranks = torch.div(plan.topk_idx, self.num_local_experts, rounding_mode="floor").long()
        ranks = torch.where(is_expert, ranks, -1)
        rows = plan.token_rows.gather(1, ranks.clamp(min=0))
        values = _with_zero_row(weights)
        return values[torch.where(ranks >= 0, rows, -1), torch.arange(rows.shape[1], device=rows.device)]

    def _travel(self, leg_name: str, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        self.transport.exchange(outgoing, incoming, leg_name)
        own = self.transport.rank
        self.traffic[leg_name] += sum(message.numel() for rank, message in enumerate(outgoing) if rank != own)

    def _window_rows(
        self,
        leg_name: str,
        rows_of_all: RowMatrix | None,
        num_topk: int,
        just_met: bool = False,
        counting_blocks: int = 0,
    ) -> WireRows:
        """Rows to be written to their ranks."""
        assert rows_of_all is not None
        kind = self._leg(leg_name).kind
        layout = _layout(kind, self.hidden, num_topk)
        window = self.transport.open_window(rows_of_all, layout.row_bytes, just_met, counting_blocks)
        own = rows_of_all[self.transport.rank]
        self.traffic[leg_name] += (sum(own) - own[self.transport.rank]) * layout.row_bytes
        return WireRows(window.buffer, kind, layout, num_topk, self.num_sms, window)

    def _arrived(self, send: WireRows, is_kept: bool) -> WireRows:
        """What the other ranks have written here, once all have."""
        assert send.window is not None
        if send.window.counting_blocks:
            return replace(send, window=None, arrivals=replace(send.window.arrivals, sent=send.rows))
        self.transport.meet(send.window)
        return replace(send, window=None, lease=self.transport.lease() if is_kept else None)

    def _wire_rows(
        self, leg_name: str, num_rows: int, num_topk: int, device: torch.device, to_send: bool = False
    ) -> WireRows:
        kind = self._leg(leg_name).kind
        layout = _layout(kind, self.hidden, num_topk)
        shape = (num_rows, layout.row_bytes)
        buffer = self.transport.send_buffer(shape, device) if to_send else empty(shape, torch.uint8, device)
        return WireRows(buffer, kind, layout, num_topk, self.num_sms)

    def _leg(self, leg_name: str) -> Leg:
        return self.precision.leg(leg_name)

    def _options(self, leg_name: str, decode: bool = False) -> Any:
        """Each packing draws fresh random numbers, but what a CUDA graph replays draws those of its capture again; the
        signs of the Hadamard transform are always the same."""
        leg = self._leg(leg_name)
        self._calls += not decode
        if not leg.stochastic:
            return _options_without_stream(leg.scale_mode, leg.hadamard, self.seed)
        stream = self._calls * self.transport.num_ranks + self.transport.rank
        return backend_for(None).options(leg.scale_mode, leg.stochastic, leg.hadamard, self.seed, stream)

    def _stage(self, leg_name: str, stage: str) -> AbstractContextManager[None]:
        return nullcontext() if self.stage is None else self.stage(f"{leg_name}.{stage}")


@cache
def _layout(kind: Kind, hidden: int, num_topk: int) -> Any:
    return backend_for(None).row_layout(kind, hidden, num_topk)


@cache
def _options_without_stream(scale_mode: str, hadamard: bool, seed: int) -> Any:
    return backend_for(None).options(scale_mode, False, hadamard, seed, 0)


def _split(buffer: Tensor, num_rows: Sequence[int]) -> list[Tensor]:
    starts = [sum(num_rows[:rank]) for rank in range(len(num_rows))]
    return [buffer[start : start + num] for start, num in zip(starts, num_rows, strict=True)]


def _sum_slots(weights: Tensor, plan: SendPlan) -> Tensor:
    """Adds up, for each slot of each token, the values that came back with the token's rows, in rank order."""
    total = torch.zeros(plan.num_tokens, weights.shape[1], dtype=weights.dtype, device=weights.device)
    values = _with_zero_row(weights)
    for rows in plan.token_rows.unbind(1):
        total += values[rows]
    return total


def _with_zero_row(weights: Tensor) -> Tensor:
    """With a row at -1, which is no row of the exchange."""
    return torch.cat([weights, weights.new_zeros(1, weights.shape[1])])


def _places(buffer: Tensor, sizes: Sizes) -> list[Tensor]:
    """Received rows by source rank."""
    return [buffer[start : start + num] for start, num in zip(sizes.recv_starts, sizes.rows_from_rank, strict=True)]


def _clear_unused(rows: WireRows, sizes: Sizes) -> None:
    """Marks rows that no message has filled as of no expert."""
    if sizes.capacity is None:
        return
    for start, num in zip(sizes.recv_starts, sizes.rows_from_rank, strict=True):
        unused = rows.buffer[start + num : start + sizes.capacity, rows.layout.weight_offset :]
        if unused.numel():
            unused[:, : 4 * rows.num_topk] = 0
            unused[:, 4 * rows.num_topk : 6 * rows.num_topk] = 255
