"""The two movements of expert parallelism on raw rows: tokens to the ranks of their experts, and rows back home.

No autograd and no checks of user input here; `autograd.py` and `communicator.py` stand on this. Both movements have
three stages, which a `stage` hook can time: `pack` (gather or local sum, fused with quantization, into wire rows),
`wire` (one byte message per pair of ranks) and `unpack` (expansion fused with reordering or with the sum over ranks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import Rows, backend_for
from .formats import Kind
from .precision import Leg
from .routing import SendPlan
from .transport import Transport

StageHook = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class WireRows:
    """Rows as they travel: `[data | scales | weights and experts of the top-k]` each, at a fixed stride.

    Attributes:
        buffer: uint8 `[num_rows, row_bytes]`.
        kind: what the data are.
        layout: offsets and sizes, from `RowLayout` in `csrc/include/fp4comm/wire.h`.
        num_topk: slots of routing metadata per row, 0 if the rows carry none.
    """

    buffer: Tensor
    kind: Kind
    layout: object
    num_topk: int

    @property
    def rows(self) -> Rows:
        start = self.layout.scale_offset
        scales = self.buffer[:, start : start + self.layout.scale_bytes] if self.layout.scale_bytes else None
        return Rows(self.kind, self.buffer[:, : self.layout.data_bytes], scales)

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

    def __init__(self, transport: Transport, hidden: int, num_experts: int, seed: int) -> None:
        self.transport = transport
        self.hidden = hidden
        self.num_experts = num_experts
        self.seed = seed
        self.traffic: Counter[str] = Counter()
        self.stage: StageHook | None = None
        self._calls = 0
        self._pool: dict[str, Tensor] = {}  # grow-only scratch by use; never handed out

    def to_experts(
        self,
        leg_name: str,
        leg: Leg,
        x: Rows,
        plan: SendPlan,
        rows_from_rank: list[int],
        weights: Tensor | None = None,
        with_routing: bool = False,
    ) -> WireRows:
        """Sends each token's row to the ranks of its experts.

        Args:
            leg_name: "dispatch" or "grad_dispatch", for timing and traffic.
            leg: the wire format and its options.
            x: `[num_tokens, hidden]` rows of any kind.
            plan: which rows go where.
            rows_from_rank: how many rows each rank sends here.
            weights: `[num_tokens, num_topk]` float32 that travel with the routing; None = 1.
            with_routing: whether rows carry the experts and weights of their slots.

        Returns:
            The received rows, ordered by source rank, then token, in memory of their own.
        """
        backend = backend_for(x.data)
        num_topk = plan.topk_idx.shape[1] if with_routing else 0
        rows_to_rank = plan.rows_per_rank.tolist()
        with self._stage(leg_name, "pack"):
            send = self._wire_rows(leg, plan.num_rows, num_topk, None if self.transport.num_ranks == 1 else "send")
            options = self._options(leg)
            backend.convert_rows(x, send.rows, src_row=plan.pair_tokens, dst_row=plan.pair_rows, options=options)
            if with_routing:
                backend.write_meta(send.buffer, send.layout, plan, weights, self.num_experts)
        with self._stage(leg_name, "wire"):
            return self._travel(leg_name, leg, send, rows_to_rank, rows_from_rank, None)

    def to_tokens(
        self,
        leg_name: str,
        leg: Leg,
        y: Rows,
        plan: SendPlan,
        rows_from_rank: list[int],
        out: Tensor,
        slot_rows: Tensor | None = None,
        weights: Tensor | None = None,
        slot_values: Tensor | None = None,
    ) -> Tensor | None:
        """Sends one row per received token back and sums, per token, the rows that come back, in rank order.

        Args:
            leg_name: "combine" or "grad_combine".
            leg: the wire format and its options.
            y: rows of the rank layout, or with `slot_rows` of the expert layout.
            plan: the plan that the tokens were sent with.
            rows_from_rank: how many rows each rank had sent here.
            out: `[num_tokens, hidden]`, receives the sums.
            slot_rows: `[num_recv_tokens, num_topk]` rows of `y` to sum per received token, in slot order.
            weights: float32 `[num_recv_tokens, num_topk]` factors of that sum; None = 1.
            slot_values: float32 `[num_recv_tokens, num_topk]` values that travel back to each token's slots.

        Returns:
            `[num_tokens, num_topk]` float32, what came back for each slot, if `slot_values` is given.
        """
        backend = backend_for(y.data)
        num_rows = sum(rows_from_rank)
        num_topk = 0 if slot_values is None else slot_values.shape[1]
        with self._stage(leg_name, "pack"):
            send = self._wire_rows(leg, num_rows, num_topk, "send")
            if slot_rows is None:
                backend.convert_rows(y, send.rows, num_rows=num_rows, options=self._options(leg))
            else:
                backend.sum_rows(y, send.rows, slot_rows, weights, options=self._options(leg))
            if slot_values is not None:
                send.weights.copy_(slot_values)
        with self._stage(leg_name, "wire"):
            back = self._travel(leg_name, leg, send, rows_from_rank, plan.rows_per_rank.tolist(), "recv")
        with self._stage(leg_name, "unpack"):
            backend.sum_rows(back.rows, Rows.of(out), plan.token_rows, None, options=self._options(leg, decode=True))
            return None if slot_values is None else self._collect_slots(back.weights, plan)

    def unpack(
        self, leg_name: str, leg: Leg, arrived: WireRows, out: Rows, src_row: Tensor | None, weights: Tensor | None = None
    ) -> None:
        """Expands received rows into `out`; row i of it is row `src_row[i]` of them (-1 = zeros), times `weights[i]`."""
        backend = backend_for(arrived.buffer)
        options = self._options(leg, decode=True)
        with self._stage(leg_name, "unpack"):
            if weights is None:
                backend.convert_rows(arrived.rows, out, src_row=src_row, options=options)
            else:
                backend.sum_rows(arrived.rows, out, src_row.unsqueeze(1), weights.unsqueeze(1), options=options)

    def dot(self, leg: Leg, y: Rows, arrived: WireRows, arrived_row: Tensor) -> Tensor:
        """float32 `[num_rows]`: row i of `y` times row `arrived_row[i]` of what has arrived; 0 where that is -1."""
        backend = backend_for(arrived.buffer)
        options = self._options(leg, decode=True)
        return backend.dot_rows(y, arrived.rows, a_row=None, b_row=arrived_row, options=options)

    def _collect_slots(self, weights: Tensor, plan: SendPlan) -> Tensor:
        ranks = plan.topk_idx.long() // (self.num_experts // self.transport.num_ranks)
        rows = plan.token_rows.gather(1, ranks.clamp(min=0))
        if not weights.numel():
            return weights.new_zeros(rows.shape)
        slot_values = weights[rows.clamp(min=0), torch.arange(rows.shape[1])]
        return torch.where(ranks >= 0, slot_values, 0)

    def _travel(
        self,
        leg_name: str,
        leg: Leg,
        send: WireRows,
        rows_to_rank: list[int],
        rows_from_rank: list[int],
        use: str | None,
    ) -> WireRows:
        if self.transport.num_ranks == 1:
            return send
        received = self._wire_rows(leg, sum(rows_from_rank), send.num_topk, use)
        row_bytes = send.buffer.shape[1]
        self.transport.exchange(send.buffer.split(rows_to_rank), received.buffer.split(rows_from_rank))
        self.traffic[leg_name] += (sum(rows_to_rank) - rows_to_rank[self.transport.rank]) * row_bytes
        return received

    def _wire_rows(self, leg: Leg, num_rows: int, num_topk: int, use: str | None) -> WireRows:
        """Rows in the scratch memory kept for `use`, or in memory of their own."""
        layout = backend_for(None).row_layout(leg.kind, self.hidden, num_topk)
        num_bytes = num_rows * layout.row_bytes
        if use is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        else:
            if use not in self._pool or self._pool[use].numel() < num_bytes:
                self._pool[use] = torch.empty(num_bytes, dtype=torch.uint8)
            buffer = self._pool[use][:num_bytes]
        return WireRows(buffer.view(num_rows, layout.row_bytes), leg.kind, layout, num_topk)

    def _options(self, leg: Leg, decode: bool = False):  # noqa: ANN202
        """Each packing draws fresh random numbers; signs of the Hadamard transform are the same on all ranks, always."""
        if not decode:
            self._calls += 1
        stream = (self._calls * self.transport.num_ranks + self.transport.rank) % 2**32
        return backend_for(None).options(leg.scale_mode, leg.stochastic, leg.hadamard, self.seed, stream)

    def _stage(self, leg_name: str, stage: str) -> AbstractContextManager:
        return nullcontext() if self.stage is None else self.stage(f"{leg_name}.{stage}")
