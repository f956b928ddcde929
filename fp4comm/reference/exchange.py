"""Dispatch and combine for a list of ranks in one process, to read and to test against.

NumPy and plain loops. All numbers are float32; `wire` is what they pass through between the ranks:
`wire(values float32 [rows, hidden]) -> float32 [rows, hidden]`, see `through_wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import codec

F32 = NDArray[np.float32]
Ints = NDArray[np.int64]
Wire = Callable[[F32], F32]


def through_wire(wire: str, scale_mode: str = "even") -> Wire:
    """What becomes of numbers on a wire of that format, with rounding to nearest."""

    def mxfp4(x: F32) -> F32:
        return codec.decode_mxfp4(*codec.encode_mxfp4(x, scale_mode))

    def fp8(x: F32) -> F32:
        return codec.decode_fp8(*codec.encode_fp8(x))

    def bf16(x: F32) -> F32:
        return codec.widen_bf16(codec.round_bf16(x))

    return {"mxfp4": mxfp4, "fp8": fp8, "bf16": bf16, "fp32": lambda x: x}[wire]


@dataclass
class Arrived:
    """What one rank receives: a row per token that has an expert here, by source rank, then token.

    Attributes:
        x: `[num_recv_tokens, hidden]`.
        sources: (rank, token) of each row.
        topk_idx: `[num_recv_tokens, num_topk]` local experts, -1 = on another rank.
        topk_weights: same shape, 0 where there is no local expert.
    """

    x: F32
    sources: list[tuple[int, int]]
    topk_idx: Ints
    topk_weights: F32


def dispatch(
    xs: Sequence[F32], topk_idx: Sequence[Ints], topk_weights: Sequence[F32], num_experts: int, wire: Wire
) -> list[Arrived]:
    """`xs[r]` `[num_tokens, hidden]`, `topk_idx[r]` and `topk_weights[r]` `[num_tokens, num_topk]` are rank r's."""
    num_local_experts = num_experts // len(xs)
    on_wire = [wire(x) for x in xs]
    arrived = []
    for rank in range(len(xs)):
        is_local = [(idx >= 0) & (idx // num_local_experts == rank) for idx in topk_idx]
        sources = [
            (source, int(token)) for source in range(len(xs)) for token in np.flatnonzero(is_local[source].any(1))
        ]
        tokens = [np.flatnonzero(local.any(1)) for local in is_local]
        arrived.append(
            Arrived(
                np.concatenate([x[rows] for x, rows in zip(on_wire, tokens, strict=True)]),
                sources,
                np.concatenate(
                    [
                        np.where(local, idx - rank * num_local_experts, -1)[rows]
                        for idx, local, rows in zip(topk_idx, is_local, tokens, strict=True)
                    ]
                ),
                np.concatenate(
                    [
                        np.where(local, weights, np.float32(0))[rows]
                        for weights, local, rows in zip(topk_weights, is_local, tokens, strict=True)
                    ]
                ),
            )
        )
    return arrived


def expert_rows(arrived: Arrived, num_local_experts: int, alignment: int) -> list[tuple[int, int] | None]:
    """The expert layout: (received row, slot) behind each of its rows; None = padding."""
    rows: list[tuple[int, int] | None] = []
    for expert in range(num_local_experts):
        mine = [(int(row), int(slot)) for row, slot in np.argwhere(arrived.topk_idx == expert)]
        rows += mine + [None] * (-len(mine) % alignment)
    return rows


def local_sums(y: F32, rows: list[tuple[int, int] | None], arrived: Arrived, weighted: bool) -> F32:
    """Sums the expert layout `y` per received token, in slot order: `[num_recv_tokens, hidden]`."""
    position = {row_and_slot: index for index, row_and_slot in enumerate(rows) if row_and_slot is not None}
    sums = np.zeros(arrived.x.shape, np.float32)
    for row in range(len(sums)):
        for slot in range(arrived.topk_idx.shape[1]):
            if (row, slot) in position:
                term = y[position[row, slot]]
                sums[row] += arrived.topk_weights[row, slot] * term if weighted else term
    return sums


def combine(sums: Sequence[F32], arrived: Sequence[Arrived], num_tokens: Sequence[int], wire: Wire) -> list[F32]:
    """Brings `sums[r]`, a row for each row of `arrived[r]`, home and adds them up per token in rank order."""
    out = [np.zeros((count, sums[0].shape[1]), np.float32) for count in num_tokens]
    for on_rank, results in zip(arrived, sums, strict=True):
        for (source, token), row in zip(on_rank.sources, wire(results), strict=True):
            out[source][token] += row
    return out
