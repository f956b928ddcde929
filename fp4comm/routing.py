"""From the router's choice of experts to the rows that are sent, received and computed.

A token sends **one row to each rank** that has at least one of its experts. Rows are ordered by destination rank, then
token; they arrive ordered by source rank, then token (the *rank* layout). Experts want their rows next to each other:
the *expert* layout has one row per received token and local expert, ordered by expert, then received row, then slot
of the top-k, each expert's rows padded to a multiple of `expert_alignment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .backends import backend_for

# NumPy does the small index arithmetic below: torch would split it over threads, for which ranks that share cores wait.


@dataclass(frozen=True, eq=False)
class SendPlan:
    """Which rows this rank sends.

    Attributes:
        topk_idx: `[num_tokens, num_topk]` int32 or int64, -1 = no expert.
        token_rows: `[num_tokens, num_ranks]` int64, row of the send buffer that holds the token for the rank, or -1.
        pair_tokens, pair_rows: `[num_rows]` int64, the same as (token, row) pairs, token by token, so that a token is
            read and quantized once for all its rows.
        rows_per_rank: `[num_ranks]` int64.
    """

    topk_idx: Tensor
    token_rows: Tensor
    pair_tokens: Tensor
    pair_rows: Tensor
    rows_per_rank: Tensor

    @property
    def num_tokens(self) -> int:
        return self.topk_idx.shape[0]

    @property
    def num_rows(self) -> int:
        return self.pair_tokens.shape[0]


def plan_send(topk_idx: Tensor, num_experts: int, num_ranks: int) -> SendPlan:
    """The rows to send for `topk_idx` `[num_tokens, num_topk]`, whose entries are in `[-1, num_experts)`."""
    return SendPlan(topk_idx, *backend_for(topk_idx).route(topk_idx, num_experts, num_ranks))


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """Where each received row goes in the expert layout.

    Attributes:
        rows: `[num_expert_rows]` int64, the received row behind each row; -1 = padding.
        slot_rows: `[num_recv_tokens, num_topk]` int64, the row of each received (token, slot); -1 = no local expert.
        rows_per_expert: rows of each local expert, padding included.
    """

    rows: Tensor
    slot_rows: Tensor
    rows_per_expert: tuple[int, ...]

    @cached_property
    def slots(self) -> Tensor:
        """`[num_expert_rows]` int64, each row's place in the flattened `slot_rows`; -1 = padding."""
        rows = self.slot_rows.numpy().ravel()
        present = np.flatnonzero(rows >= 0)
        slots = np.full(self.rows.shape, -1)
        slots[rows[present]] = present
        return torch.from_numpy(slots)

    def from_slots(self, values: Tensor) -> Tensor:
        """Values of `[num_recv_tokens, num_topk]` in expert order, `[num_expert_rows]`; padding is 0."""
        return take(values.flatten(), self.slots)

    def to_slots(self, values: Tensor) -> Tensor:
        """The reverse: values of `[num_expert_rows]` as `[num_recv_tokens, num_topk]`; 0 where there is no row."""
        return take(values, self.slot_rows)


def take(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` for a vector of values and an index of any shape, where -1 gives 0."""
    padded = np.append(values.numpy(), np.zeros(1, values.numpy().dtype))
    return torch.from_numpy(padded[index.numpy()])


@dataclass(frozen=True, eq=False)
class Routing:
    """The routes of a dispatch, as both ends know them. No tensor in it belongs to an autograd graph.

    Attributes:
        plan: rows sent.
        rows_from_rank: rows received from each rank.
        recv_topk_idx: `[num_recv_tokens, num_topk]` int32, local experts, -1 = not here.
        recv_topk_weights: same shape, float32.
        num_recv_tokens_per_expert: `[num_local_experts]` int64.
        experts: the expert layout; None = experts see the rank layout.
        fixed_num_rows: number of rows that experts see if it is fixed; None = as many as needed.
    """

    plan: SendPlan
    rows_from_rank: tuple[int, ...]
    recv_topk_idx: Tensor
    recv_topk_weights: Tensor
    num_recv_tokens_per_expert: Tensor
    experts: ExpertLayout | None
    fixed_num_rows: int | None

    @property
    def layout(self) -> str:
        """ "expert" or "rank"."""
        return "rank" if self.experts is None else "expert"

    @property
    def num_recv_tokens(self) -> int:
        return sum(self.rows_from_rank)

    @property
    def num_rows(self) -> int:
        """How many rows experts see."""
        if self.experts is not None:
            return self.experts.rows.shape[0]
        return self.num_recv_tokens if self.fixed_num_rows is None else self.fixed_num_rows

    @cached_property
    def source_rows(self) -> Tensor | None:
        """`[num_rows]` int64, the received row behind each row that experts see; -1 = zeros. None = the same rows."""
        if self.experts is not None:
            return self.experts.rows
        if self.fixed_num_rows is None:
            return None
        rows = torch.arange(self.fixed_num_rows)
        return torch.where(rows < self.num_recv_tokens, rows, -1)

    @property
    def slot_rows(self) -> Tensor | None:
        """`[num_recv_tokens, num_topk]` int64, rows of the experts to sum per received token. None = rank layout."""
        return None if self.experts is None else self.experts.slot_rows

    def weights_for_experts(self) -> Tensor:
        """The weights as experts see them: `[num_rows]` in the expert layout, else `[num_rows, num_topk]`."""
        if self.experts is not None:
            return self.experts.from_slots(self.recv_topk_weights)
        weights = self.recv_topk_weights.new_zeros(self.num_rows, self.recv_topk_weights.shape[1])
        weights[: self.num_recv_tokens] = self.recv_topk_weights
        return weights

    def slot_values(self, values: Tensor) -> Tensor:
        """The reverse for values of that shape: `[num_recv_tokens, num_topk]`."""
        return values[: self.num_recv_tokens] if self.experts is None else self.experts.to_slots(values)


@dataclass(frozen=True, eq=False)
class NewRoutes:
    """What is known of a routing before the first rows have arrived."""

    plan: SendPlan
    rows_from_rank: tuple[int, ...]
    layout: str
    alignment: int
    fixed_num_rows: int | None

    def arrive(self, recv_topk_idx: Tensor, recv_topk_weights: Tensor, counts: Tensor) -> Routing:
        """Completes the routing with the metadata that came with the rows; `counts` are rows per local expert."""
        experts = None
        if self.layout == "expert":
            layout = backend_for(recv_topk_idx).expert_layout(
                recv_topk_idx, counts, self.alignment, self.fixed_num_rows
            )
            experts = ExpertLayout(*layout)
        return Routing(
            self.plan, self.rows_from_rank, recv_topk_idx, recv_topk_weights, counts, experts, self.fixed_num_rows
        )


def worst_case_expert_rows(num_recv_tokens: int, num_topk: int, num_local_experts: int, alignment: int) -> int:
    """The most rows that the expert layout of `num_recv_tokens` received tokens can have.

    A token counts once per expert, so a `topk_idx` that names an expert twice for a token can exceed it.
    """
    used = num_recv_tokens * min(num_topk, num_local_experts)
    padded = used + (alignment - 1) * min(num_local_experts, used)
    return padded // alignment * alignment
