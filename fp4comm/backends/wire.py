"""What the rows of a message come with, as far as a backend must know."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .._cpu import RowLayout
from .rows import Rows


class Plan(Protocol):
    """What `pack_tokens` needs of a `SendPlan`."""

    @property
    def topk_idx(self) -> Tensor: ...
    @property
    def token_rows(self) -> Tensor: ...
    @property
    def rows_per_rank(self) -> Tensor: ...
    @property
    def rows_stride(self) -> int | None: ...
    @property
    def pairs(self) -> tuple[Tensor, Tensor] | None: ...


class Wire(Protocol):
    """What `pack_tokens` and `read_routing` need of `WireRows`."""

    @property
    def buffer(self) -> Tensor: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def layout(self) -> RowLayout: ...
    @property
    def num_topk(self) -> int: ...


Experts = tuple[Tensor, Tensor, Tensor, Tensor]  # of an `ExpertLayout`
