"""The two movements of expert parallelism on raw rows: tokens to the ranks of their experts, and rows back home.

No autograd and no checks of user input here; `autograd.py` and `communicator.py` stand on this. Both movements have
three stages, which a `stage` hook can time: `pack` (gather or local sum, fused with quantization, into wire rows),
`wire` (one byte message per pair of ranks) and `unpack` (expansion fused with reordering or with the sum over ranks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backends import Rows, backend_for
from .formats import Kind
from .memory import empty
from .precision import Leg, Precision
from .routing import NewRoutes, Routing, SendPlan
from .transport import Transport

StageHook = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False)
class WireRows:
    """Rows as they travel: `[data | scales | weights and experts of the top-k]` each, at a fixed stride.

    Attributes:
        buffer: uint8 `[num_rows, row_bytes]`.
        kind: what the data are.
        layout: offsets and sizes, a `RowLayout` of `csrc/include/fp4comm/wire.h`.
        num_topk: slots of routing metadata per row, 0 if the rows carry none.
    """

    buffer: Tensor
    kind: Kind
    layout: Any
    num_topk: int

    @property
    def rows(self) -> Rows:
        """Data and scales."""
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

    def __init__(self, transport: Transport, hidden: int, num_experts: int, precision: Precision, seed: int) -> None:
        self.transport = transport
        self.hidden = hidden
        self.num_experts = num_experts
        self.num_local_experts = num_experts // transport.num_ranks
        self.precision = precision
        self.seed = seed
        self.traffic: Counter[str] = Counter()
        self.stage: StageHook | None = None
        self._calls = 0

    def to_experts(
        self,
        leg_name: str,
        x: Rows,
        routes: NewRoutes | Routing,
        weights: Tensor | None = None,
    ) -> WireRows:
        """Sends each token's row to the ranks of its experts.

        Args:
            leg_name: "dispatch" or "grad_dispatch".
            x: `[num_tokens, hidden]` rows of any kind.
            routes: which rows go where. Rows of new routes carry the experts and weights of their slots.
            weights: `[num_tokens, num_topk]` float32, for new routes; None = 1.

        Returns:
            The received rows, ordered by source rank, then token.
        """
        backend, plan = backend_for(x.data), routes.plan
        is_new = isinstance(routes, NewRoutes)
        with self._stage(leg_name, "pack"):
            num_topk = plan.topk_idx.shape[1] if is_new else 0
            send = self._wire_rows(leg_name, plan.num_rows, num_topk)
            options = self._options(leg_name)
            backend.convert_rows(x, send.rows, src_row=plan.pair_tokens, dst_row=plan.pair_rows, options=options)
            if is_new:
                backend.write_meta(send.buffer, send.layout, plan, weights, self.num_experts)
        with self._stage(leg_name, "wire"):
            return self._travel(leg_name, send, plan.rows_per_rank.tolist(), routes.rows_from_rank)

    def read_routing(self, arrived: WireRows, routes: NewRoutes) -> Routing:
        """Completes new routes with the metadata of the rows that came along them."""
        backend = backend_for(arrived.buffer)
        with self._stage("dispatch", "unpack"):
            meta = backend.read_meta(arrived.buffer, arrived.layout, arrived.num_topk, self.num_local_experts)
            return routes.arrive(*meta)

    def unpack(
        self, leg_name: str, arrived: WireRows, out: Rows, src_row: Tensor | None, weights: Tensor | None = None
    ) -> None:
        """Expands received rows into `out`.

        Args:
            leg_name: the leg that they came by.
            arrived: the received rows.
            out: rows of any kind.
            src_row: the received row behind each row of `out`, -1 = zeros; None = the same.
            weights: float32, a factor for each row of `out`; None = 1. Only together with `src_row`.
        """
        backend, options = backend_for(arrived.buffer), self._options(leg_name, decode=True)
        with self._stage(leg_name, "unpack"):
            if weights is None:
                backend.convert_rows(arrived.rows, out, src_row=src_row, options=options)
            else:
                assert src_row is not None
                backend.sum_rows(arrived.rows, out, src_row.unsqueeze(1), weights.unsqueeze(1), options=options)

    def to_tokens(
        self,
        leg_name: str,
        y: Rows,
        routing: Routing,
        out: Tensor,
        is_weighted: bool = False,
        slot_values: Tensor | None = None,
    ) -> Tensor | None:
        """Sends one row per received token back and sums, per token, the rows that come back, in rank order.

        Args:
            leg_name: "combine" or "grad_combine".
            y: `[num_rows, hidden]` rows as experts see them; in the expert layout they are summed per token, by slot.
            routing: the routes that the tokens came by.
            out: `[num_tokens, hidden]`, receives the sums.
            is_weighted: multiply by the received weights in the sum over slots.
            slot_values: float32 `[num_recv_tokens, num_topk]` values that travel back to each token's slots.

        Returns:
            `[num_tokens, num_topk]` float32, what came back for each slot, if `slot_values` is given.
        """
        backend, plan = backend_for(y.data), routing.plan
        with self._stage(leg_name, "pack"):
            num_topk = 0 if slot_values is None else slot_values.shape[1]
            send = self._wire_rows(leg_name, routing.num_recv_tokens, num_topk)
            if routing.slot_rows is None:
                backend.convert_rows(y, send.rows, num_rows=routing.num_recv_tokens, options=self._options(leg_name))
            else:
                weights = routing.recv_topk_weights if is_weighted else None
                backend.sum_rows(y, send.rows, routing.slot_rows, weights, options=self._options(leg_name))
            if slot_values is not None:
                send.weights.copy_(slot_values)
        with self._stage(leg_name, "wire"):
            back = self._travel(leg_name, send, routing.rows_from_rank, plan.rows_per_rank.tolist())
        with self._stage(leg_name, "unpack"):
            options = self._options(leg_name, decode=True)
            backend.sum_rows(back.rows, Rows.of(out), plan.token_rows, None, options=options)
            return None if slot_values is None else self._collect_slots(back.weights, plan)

    def dot(self, leg_name: str, y: Rows, arrived: WireRows, arrived_row: Tensor) -> Tensor:
        """float32 `[num_rows]`: row i of `y` times row `arrived_row[i]` of what has arrived; 0 where that is -1."""
        options = self._options(leg_name, decode=True)
        products: Tensor = backend_for(y.data).dot_rows(y, arrived.rows, b_row=arrived_row, options=options)
        return products

    def _collect_slots(self, weights: Tensor, plan: SendPlan) -> Tensor:
        """Picks, for each slot of each token, the value that the rank of its expert sent back with the token's row."""
        ranks = torch.div(plan.topk_idx, self.num_local_experts, rounding_mode="floor").long()  # of -1: -1
        rows = plan.token_rows.gather(1, ranks.clamp(min=0))
        values = torch.cat([weights, weights.new_zeros(1, weights.shape[1])])
        return values[torch.where(ranks >= 0, rows, -1), torch.arange(rows.shape[1])]

    def _travel(
        self,
        leg_name: str,
        send: WireRows,
        rows_to_rank: Sequence[int],
        rows_from_rank: Sequence[int],
    ) -> WireRows:
        if self.transport.num_ranks == 1:
            return send
        received = self._wire_rows(leg_name, sum(rows_from_rank), send.num_topk)
        self.transport.exchange(_split(send.buffer, rows_to_rank), _split(received.buffer, rows_from_rank), leg_name)
        num_remote_rows = sum(rows_to_rank) - rows_to_rank[self.transport.rank]
        self.traffic[leg_name] += num_remote_rows * send.buffer.shape[1]
        return received

    def _wire_rows(self, leg_name: str, num_rows: int, num_topk: int) -> WireRows:
        kind = self._leg(leg_name).kind
        layout = backend_for(None).row_layout(kind, self.hidden, num_topk)
        return WireRows(empty((num_rows, layout.row_bytes), torch.uint8), kind, layout, num_topk)

    def _leg(self, leg_name: str) -> Leg:
        return self.precision.leg(leg_name)

    def _options(self, leg_name: str, decode: bool = False) -> Any:
        """Each packing draws fresh random numbers; the signs of the Hadamard transform are always the same."""
        leg = self._leg(leg_name)
        self._calls += not decode
        stream = self._calls * self.transport.num_ranks + self.transport.rank
        return backend_for(None).options(leg.scale_mode, leg.stochastic, leg.hadamard, self.seed, stream)

    def _stage(self, leg_name: str, stage: str) -> AbstractContextManager[None]:
        return nullcontext() if self.stage is None else self.stage(f"{leg_name}.{stage}")


def _split(buffer: Tensor, num_rows: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(buffer, list(num_rows))
