"""The plain dispatcher, a baseline: one BF16 row per (token, expert) choice, sorted by expert, with no number changed.

It stands on the same transport and the same loops as fp4comm, so the difference is what fp4comm does differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4comm.backends import Rows, cpu
from fp4comm.transport import Transport

from .common import Scratch


@dataclass(frozen=True)
class Routes:
    """How one dispatch went.

    Attributes:
        choice_rows: int64 `[num_tokens, num_topk]`, row of the send buffer of each choice, -1 = none.
        weights: float32, same shape.
        rows_to_rank, rows_from_rank: rows sent and received.
        arrival_rows: int64 `[num_recv_rows]`, the received row behind each row in expert order; None = not reordered.
    """

    choice_rows: Tensor
    weights: Tensor
    rows_to_rank: list[int]
    rows_from_rank: list[int]
    arrival_rows: Tensor | None


class PerChoice:
    """Dispatch and combine of that kind; experts get their rows in the order expert, source rank, token, slot.

    Results lie in memory that the next call uses again, which is the best that a dispatcher can do about page faults.

    Args:
        transport: carries the rows.
        num_experts: experts of all ranks.
        reorder: whether rows are brought into that order on arrival; they arrive in the order of rank, expert.
    """

    def __init__(self, transport: Transport, num_experts: int, reorder: bool) -> None:
        self.transport, self.num_experts, self.reorder = transport, num_experts, reorder
        self._scratch = Scratch()

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Routes]:
        """Rows of `x`, BF16 `[num_tokens, hidden]`, at their experts: BF16 `[num_recv_rows, hidden]`."""
        flat = topk_idx.flatten()
        order = torch.argsort(flat, stable=True)[int((flat < 0).sum()) :]
        choice_rows = torch.full_like(flat, -1)
        choice_rows[order] = torch.arange(len(order))
        counts = torch.bincount(flat[order], minlength=self.num_experts).view(self.transport.num_ranks, -1)
        recv_counts = self.transport.all_to_all(counts)
        rows_to_rank, rows_from_rank = counts.sum(1).tolist(), recv_counts.sum(1).tolist()
        send = self._rows("send", len(order), x.shape[1])
        cpu.convert_rows(Rows.of(x), Rows.of(send), src_row=order // topk_idx.shape[1])
        arrived = self._travel(send, rows_to_rank, rows_from_rank, "arrived")
        arrival_rows = _by_expert(recv_counts) if self.reorder else None
        routes = Routes(choice_rows.view_as(topk_idx), topk_weights, rows_to_rank, rows_from_rank, arrival_rows)
        if arrival_rows is None:
            return arrived, routes
        recv_x = self._rows("recv_x", *arrived.shape)
        cpu.convert_rows(Rows.of(arrived), Rows.of(recv_x), src_row=arrival_rows)
        return recv_x, routes

    def combine(self, y: Tensor, routes: Routes) -> Tensor:
        """Brings BF16 rows in the order of dispatch's result home and sums them with their weights, in float32."""
        send = y
        if routes.arrival_rows is not None:
            send = self._rows("send", len(y), y.shape[1])
            cpu.convert_rows(Rows.of(y), Rows.of(send), dst_row=routes.arrival_rows)
        back = self._travel(send, routes.rows_from_rank, routes.rows_to_rank, "back")  # not "arrived": y may lie there
        combined_x = self._rows("combined_x", len(routes.choice_rows), y.shape[1])
        cpu.sum_rows(Rows.of(back), Rows.of(combined_x), routes.choice_rows, routes.weights)
        return combined_x

    def _travel(self, send: Tensor, rows_to_rank: list[int], rows_from_rank: list[int], use: str) -> Tensor:
        received = self._rows(use, sum(rows_from_rank), send.shape[1])
        self.transport.exchange(messages(send, rows_to_rank), messages(received, rows_from_rank))
        return received

    def _rows(self, use: str, num_rows: int, hidden: int) -> Tensor:
        return self._scratch.rows(use, num_rows, hidden, torch.bfloat16)


def messages(rows: Tensor, rows_per_rank: list[int]) -> list[Tensor]:
    """The bytes of consecutive groups of rows, as transports take them."""
    return [part.view(torch.uint8).flatten() for part in torch.split(rows, rows_per_rank)]


def _by_expert(counts: Tensor) -> Tensor:
    """Expert order of rows that lie by rank, then expert, `counts` `[num_ranks, num_local_experts]` of each."""
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return torch.argsort(experts.repeat_interleave(counts.flatten()), stable=True)
