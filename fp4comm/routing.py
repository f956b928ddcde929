"""From the router's choice of experts to the rows that are sent, received and computed.

A token sends **one row to each rank** that has at least one of its experts. Rows are ordered by destination rank, then
token; they arrive ordered by source rank, then token (the *rank* layout). Experts want their rows next to each other:
the *expert* layout has one row per received token and local expert, ordered by expert, then received row, then slot
of the top-k, each expert's rows padded to a multiple of `expert_alignment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .backends import backend_for


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ExpertLayout:
    """Where each received row goes in the expert layout.

    Attributes:
        rows: `[num_expert_rows]` int64, the received row behind each row; -1 = padding.
        slot_rows: `[num_recv_tokens, num_topk]` int64, the row of each received (token, slot); -1 = not a local expert.
        rows_per_expert: rows of each local expert, padding included.
    """

    rows: Tensor
    slot_rows: Tensor
    rows_per_expert: tuple[int, ...]

    @cached_property
    def slots(self) -> Tensor:
        """`[num_expert_rows]` int64, index into the flattened `[num_recv_tokens, num_topk]` of each row; -1 = padding."""
        flat = self.slot_rows.flatten()
        present = torch.nonzero(flat >= 0).flatten()
        slots = torch.full_like(self.rows, -1)
        slots[flat[present]] = present
        return slots

    def from_slots(self, values: Tensor) -> Tensor:
        """`[num_recv_tokens, num_topk]` values in expert order: `[num_expert_rows]`, padding 0."""
        return torch.where(self.slots >= 0, values.flatten()[self.slots.clamp(min=0)], 0) if values.numel() else (
            values.new_zeros(self.slots.shape)
        )

    def to_slots(self, values: Tensor) -> Tensor:
        """The reverse of `from_slots`: `[num_expert_rows]` values by `[num_recv_tokens, num_topk]`, 0 where none."""
        return torch.where(self.slot_rows >= 0, values[self.slot_rows.clamp(min=0)], 0) if values.numel() else (
            values.new_zeros(self.slot_rows.shape)
        )


def plan_experts(recv_topk_idx: Tensor, counts: Tensor, alignment: int, num_rows: int | None = None) -> ExpertLayout:
    """The expert layout of the received rows.

    Args:
        recv_topk_idx: `[num_recv_tokens, num_topk]` int32, local experts, -1 = not here.
        counts: `[num_local_experts]` int64, how often each occurs.
        alignment: each expert's rows are padded to a multiple of it.
        num_rows: total number of rows, for fixed shapes; None = no more than needed.
    """
    backend = backend_for(recv_topk_idx)
    return ExpertLayout(*backend.expert_layout(recv_topk_idx, counts, alignment, num_rows))


def worst_case_expert_rows(num_recv_tokens: int, num_topk: int, num_local_experts: int, alignment: int) -> int:
    """The most rows that the expert layout of `num_recv_tokens` received tokens can have."""
    used = num_recv_tokens * min(num_topk, num_local_experts)
    return used + (alignment - 1) * min(num_local_experts, used)
