"""From the router's choice of experts to the rows that are sent, received and computed.

A token sends **one row to each rank** that has at least one of its experts. Rows are ordered by destination rank, then
token; they arrive ordered by source rank, then token (the *rank* layout). Experts want their rows next to each other:
the *expert* layout has one row per received token and local expert, ordered by expert, then received row, then slot
of the top-k, each expert's rows padded to a multiple of `expert_alignment`.

With a *capacity* every rank's received rows have a place of that many rows, so that all shapes are known beforehand;
rows of a place that stay unused belong to no expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .backends import backend_for


@dataclass(frozen=True, eq=False)
class SendPlan:
    """Which rows this rank sends.

    Attributes:
        topk_idx: `[num_tokens, num_topk]` int32 or int64, -1 = no expert.
        token_rows: `[num_tokens, num_ranks]` int64, row of the send buffer that holds the token for the rank, or -1.
        counts: `[num_ranks, 2 + num_local_experts]` int64, per rank: the number of entries of topk_idx that are no
            expert at all (equal in all rows), rows for that rank, choices of each of its experts.
        max_rows: rows of the send buffer, of which not all need be used.
        rows_stride: each rank's rows have a place of so many; None = they follow each other.
        pairs: the used entries of token_rows as (token, row) vectors, token by token; None where nobody needs them.
    """

    topk_idx: Tensor
    token_rows: Tensor
    counts: Tensor
    max_rows: int
    rows_stride: int | None
    pairs: tuple[Tensor, Tensor] | None

    @property
    def num_tokens(self) -> int:
        return self.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        return self.topk_idx.shape[1]

    @property
    def num_ranks(self) -> int:
        return self.token_rows.shape[1]

    @property
    def rows_per_rank(self) -> Tensor:
        """`[num_ranks]` int64, a view."""
        return self.counts[:, 1]


def plan_send(topk_idx: Tensor, num_experts: int, num_ranks: int, capacity: int | None = None) -> SendPlan:
    """The rows to send for `topk_idx` `[num_tokens, num_topk]`.

    Args:
        topk_idx: entries in `[-1, num_experts)`; on a GPU others count as -1, see `SendPlan.counts`.
        num_experts: of all ranks.
        num_ranks: ranks, each with `num_experts / num_ranks` experts in order.
        capacity: at most so many tokens per rank, so that on a GPU the sizes of messages need not be known; on the CPU
            they are known in any case, and nothing more than necessary is sent.
    """
    backend = backend_for(topk_idx)
    rows_stride = None if topk_idx.device.type == "cpu" else capacity
    token_rows, counts, pairs = backend.route(topk_idx, num_experts, num_ranks, rows_stride)
    if rows_stride is not None:
        max_rows = num_ranks * rows_stride
    elif pairs is not None:
        max_rows = pairs[0].numel()
    else:
        max_rows = topk_idx.shape[0] * min(topk_idx.shape[1], num_ranks)
    return SendPlan(topk_idx, token_rows, counts, max_rows, rows_stride, pairs)


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """Where each received row goes in the expert layout.

    Attributes:
        rows: `[num_expert_rows]` int64, the received row behind each row; -1 = padding.
        slot_rows: `[num_recv_rows, num_topk]` int64, the row of each received (row, slot); -1 = no local expert.
        ends: `[num_local_experts]` int32, where the rows of each local expert end, padding included.
        row_weights: `[num_expert_rows]` float32, the routing weight of each row; 0 at padding.
    """

    rows: Tensor
    slot_rows: Tensor
    ends: Tensor
    row_weights: Tensor


def take(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` for a vector of values and an index of any shape, where -1 gives 0."""
    if values.device.type == "cpu":  # NumPy: torch would split it over threads, for which ranks that share cores wait
        padded = np.append(values.numpy(), np.zeros(1, values.numpy().dtype))
        return torch.from_numpy(padded[index.numpy()])
    return torch.cat([values, values.new_zeros(1)])[index]


@dataclass(frozen=True, eq=False)
class Sizes:
    """How many rows go where, as far as the host knows.

    Attributes:
        rows_to_rank, rows_from_rank: rows of the messages to and from each rank.
        capacity: rows of the place of each source rank among the received rows; None = they follow each other.
        alignment: of the expert layout.
        rows_per_expert: received choices of each local expert; None = not known before the rows have been read.
        rows_of_all: rows from each rank (first index) to each; None = not known, nor needed.
    """

    rows_to_rank: tuple[int, ...]
    rows_from_rank: tuple[int, ...]
    capacity: int | None
    alignment: int
    rows_per_expert: tuple[int, ...] | None
    rows_of_all: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of_capacity(cls, capacity: int, num_ranks: int, alignment: int) -> Sizes:
        """Every message has a place of `capacity` rows."""
        rows = (capacity,) * num_ranks
        return cls(rows, rows, capacity, alignment, None, (rows,) * num_ranks)

    @property
    def rows_back_of_all(self) -> tuple[tuple[int, ...], ...]:
        """`rows_of_all` for the way back."""
        assert self.rows_of_all is not None
        return tuple(zip(*self.rows_of_all, strict=True))

    @property
    def num_recv_rows(self) -> int:
        """Received rows, unused ones of a capacity included."""
        return sum(self.rows_from_rank) if self.capacity is None else len(self.rows_from_rank) * self.capacity

    @property
    def recv_starts(self) -> list[int]:
        """Where the rows of each source rank start."""
        if self.capacity is not None:
            return [rank * self.capacity for rank in range(len(self.rows_from_rank))]
        return [sum(self.rows_from_rank[:rank]) for rank in range(len(self.rows_from_rank))]

    @property
    def padded_rows_per_expert(self) -> tuple[int, ...] | None:
        """Rows of each local expert with padding."""
        if self.rows_per_expert is None:
            return None
        return tuple(-(-count // self.alignment) * self.alignment for count in self.rows_per_expert)

    def num_expert_rows(self, num_topk: int, num_local_experts: int) -> int | None:
        """Rows of the expert layout; None = as many as needed."""
        if self.capacity is not None:
            return worst_case_expert_rows(self.num_recv_rows, num_topk, num_local_experts, self.alignment)
        return None if self.padded_rows_per_expert is None else sum(self.padded_rows_per_expert)


@dataclass(frozen=True, eq=False)
class Routing:
    """The routes of a dispatch, as both ends know them. No tensor in it belongs to an autograd graph.

    Attributes:
        plan: rows sent.
        sizes: how many.
        recv_topk_idx: `[num_recv_rows, num_topk]` int32, local experts, -1 = not here.
        recv_topk_weights: same shape, float32.
        num_recv_tokens_per_expert: `[num_local_experts]` int64.
        experts: the expert layout; None = experts see the rank layout.
        used_rows: `[num_recv_rows]` int64, with a capacity in the rank layout: the number of each received row, -1 for
            those that no message has filled. Else None.
        end: int32 `[1]`, on a GPU: what rows of experts hold from there on is undefined. None = zeros, where there are
            such rows.
        number: of the dispatch that has made them, which all ranks count alike: so ranks notice if they mean routes of
            different dispatches.
    """

    plan: SendPlan
    sizes: Sizes
    recv_topk_idx: Tensor
    recv_topk_weights: Tensor
    num_recv_tokens_per_expert: Tensor
    experts: ExpertLayout | None
    used_rows: Tensor | None
    end: Tensor | None
    number: int

    @property
    def layout(self) -> str:
        """ "expert" or "rank"."""
        return "rank" if self.experts is None else "expert"

    @property
    def num_recv_rows(self) -> int:
        return self.sizes.num_recv_rows

    @property
    def num_rows(self) -> int:
        """How many rows experts see."""
        return self.num_recv_rows if self.experts is None else self.experts.rows.shape[0]

    @cached_property
    def num_rows_per_expert(self) -> tuple[int, ...]:
        """Rows of each local expert with padding. Waits for the device if only it knows them."""
        if self.experts is None:
            return ()
        known = self.sizes.padded_rows_per_expert
        if known is not None:
            return known
        ends = [0, *self.experts.ends.tolist()]
        return tuple(end - start for start, end in pairwise(ends))

    @property
    def source_rows(self) -> Tensor | None:
        """`[num_rows]` int64, the received row behind each row that experts see; -1 = zeros. None = the same rows."""
        return self.used_rows if self.experts is None else self.experts.rows

    @property
    def slot_rows(self) -> Tensor | None:
        """`[num_recv_rows, num_topk]` int64, rows of the experts to sum per received row. None = rank layout."""
        return None if self.experts is None else self.experts.slot_rows

    def weights_for_experts(self) -> Tensor:
        """The weights as experts see them: `[num_rows]` in the expert layout, else `[num_rows, num_topk]`."""
        return self.recv_topk_weights.clone() if self.experts is None else self.experts.row_weights.clone()

    def slot_values(self, values: Tensor) -> Tensor:
        """The reverse for values of that shape: `[num_recv_rows, num_topk]`."""
        return values if self.experts is None else take(values, self.experts.slot_rows)


@dataclass(frozen=True, eq=False)
class NewRoutes:
    """What is known of a routing before the first rows have arrived.

    Attributes:
        zeroes_rest: whether rows after those of the last expert must be zeros.
        number: see `Routing`.
    """

    plan: SendPlan
    sizes: Sizes
    layout: str
    zeroes_rest: bool
    number: int


def worst_case_expert_rows(num_recv_tokens: int, num_topk: int, num_local_experts: int, alignment: int) -> int:
    """The most rows that the expert layout of `num_recv_tokens` received tokens can have.

    A token counts once per expert, so a `topk_idx` that names an expert twice for a token can exceed it.
    """
    used = num_recv_tokens * min(num_topk, num_local_experts)
    padded = used + (alignment - 1) * min(num_local_experts, used)
    return padded // alignment * alignment
