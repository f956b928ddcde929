"""The plain dispatcher, a baseline: one BF16 row per (token, expert) choice, sorted by expert, with no number changed.

It stands on the same transport as fp4comm, so the difference is what fp4comm does differently. On the CPU it has the
same loops, too; on a GPU rows are brought in order by torch's `index_select`, as Megatron-Core's all-to-all dispatcher
does, and summed by fp4comm's kernel, which reads each row once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4comm.backends import Rows, backend_for, cpu
from fp4comm.transport import Transport

from .common import Scratch


@dataclass(frozen=True)
class Routes:
    """How one dispatch went.

    Attributes:
        tokens: int64 `[num_send_rows]`, the token behind each row of the send buffer.
        choice_rows: int64 `[num_tokens, num_topk]`, row of the send buffer of each choice, -1 = none.
        weights: float32, same shape.
        rows_to_rank, rows_from_rank: rows sent and received.
        arrival_rows: int64 `[num_recv_rows]`, the received row behind each row in expert order; None = not reordered.
        expert_rows: the inverse.
    """

    tokens: Tensor
    choice_rows: Tensor
    weights: Tensor
    rows_to_rank: list[int]
    rows_from_rank: list[int]
    arrival_rows: Tensor | None
    expert_rows: Tensor | None


class PerChoice:
    """Dispatch and combine of that kind; experts get their rows in the order expert, source rank, token, slot.

    Results lie in memory that the next call uses again, which is the best that a dispatcher can do about page faults.

    Args:
        transport: carries the rows.
        num_experts: experts of all ranks.
        reorder: whether rows are brought into that order on arrival; they arrive in the order of rank, expert.
        device: where the rows lie.
    """

    def __init__(
        self, transport: Transport, num_experts: int, reorder: bool, device: torch.device | None = None
    ) -> None:
        self.transport, self.num_experts, self.reorder = transport, num_experts, reorder
        self.device = torch.device("cpu") if device is None else device
        self._scratch = Scratch(device)

    def route(self, topk_idx: Tensor, topk_weights: Tensor) -> Routes:
        """Which rows go where; the host waits for the numbers of rows."""
        flat = topk_idx.flatten()
        counts = torch.bincount(flat + 1, minlength=self.num_experts + 1).cpu()
        order = torch.argsort(flat, stable=True)[int(counts[0]) :]
        choice_rows = torch.full_like(flat, -1)
        choice_rows[order] = torch.arange(len(order), device=flat.device)
        to_rank = counts[1:].view(self.transport.num_ranks, -1)
        from_rank = self.transport.all_to_all(to_rank)
        arrival_rows = expert_rows = None
        if self.reorder:
            arrival_rows = _by_expert(from_rank.to(self.device))
            expert_rows = torch.empty_like(arrival_rows)
            expert_rows[arrival_rows] = torch.arange(len(arrival_rows), device=self.device)
        return Routes(
            order // topk_idx.shape[1],
            choice_rows.view_as(topk_idx),
            topk_weights,
            to_rank.sum(1).tolist(),
            from_rank.sum(1).tolist(),
            arrival_rows,
            expert_rows,
        )

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, routes: Routes | None = None
    ) -> tuple[Tensor, Routes]:
        """Rows of `x`, BF16 `[num_tokens, hidden]`, at their experts: BF16 `[num_recv_rows, hidden]`.

        `routes` are those of an earlier dispatch with the same `topk_idx`.
        """
        routes = self.route(topk_idx, topk_weights) if routes is None else routes
        send = self._send_rows(len(routes.tokens), x.shape[1])
        gather(x, send, routes.tokens)
        arrived = self._travel(send, routes.rows_to_rank, routes.rows_from_rank, "arrived")
        if routes.arrival_rows is None:
            return arrived, routes
        recv_x = self._rows("recv_x", *arrived.shape)
        gather(arrived, recv_x, routes.arrival_rows)
        return recv_x, routes

    def combine(self, y: Tensor, routes: Routes) -> Tensor:
        """Brings BF16 rows in the order of dispatch's result home and sums them with their weights, in float32."""
        send = y
        if routes.expert_rows is not None:
            send = self._send_rows(len(y), y.shape[1])
            gather(y, send, routes.expert_rows)
        back = self._travel(send, routes.rows_from_rank, routes.rows_to_rank, "back")  # not "arrived": y may lie there
        combined_x = self._rows("combined_x", len(routes.choice_rows), y.shape[1])
        backend_for(y).sum_rows(Rows.of(back), Rows.of(combined_x), routes.choice_rows, routes.weights)
        return combined_x

    def _travel(self, send: Tensor, rows_to_rank: list[int], rows_from_rank: list[int], use: str) -> Tensor:
        received = self._rows(use, sum(rows_from_rank), send.shape[1])
        self.transport.exchange(messages(send, rows_to_rank), messages(received, rows_from_rank))
        return received

    def _send_rows(self, num_rows: int, hidden: int) -> Tensor:
        """On a GPU memory of the transport, as fp4comm's own rows have it."""
        if self.device.type == "cpu":
            return self._rows("send", num_rows, hidden)
        return self.transport.send_buffer((num_rows, 2 * hidden), self.device).view(torch.bfloat16)

    def _rows(self, use: str, num_rows: int, hidden: int) -> Tensor:
        return self._scratch.rows(use, num_rows, hidden, torch.bfloat16)


def gather(src: Tensor, dst: Tensor, src_row: Tensor) -> None:
    """`dst[i] = src[src_row[i]]`, BF16."""
    if src.device.type == "cpu":
        cpu.convert_rows(Rows.of(src), Rows.of(dst), src_row=src_row)
    else:
        torch.index_select(src, 0, src_row, out=dst)


def messages(rows: Tensor, rows_per_rank: list[int]) -> list[Tensor]:
    """The bytes of consecutive groups of rows, as transports take them."""
    return [part.view(torch.uint8).flatten() for part in torch.split(rows, rows_per_rank)]


def _by_expert(counts: Tensor) -> Tensor:
    """Expert order of rows that lie by rank, then expert, `counts` `[num_ranks, num_local_experts]` of each."""
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return torch.argsort(experts.repeat_interleave(counts.flatten()), stable=True)
