"""The loops of `fp4comm._cpu` on torch CPU tensors.

Callers have checked shapes, dtypes and devices; the assertions here only guard our own invariants. Row maps are int64
vectors: `None` is the identity, -1 a row of zeros (in a sum: no term).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .. import _cpu
from .._cpu import Options, RowLayout, isa, row_layout, set_isa, supported_isas
from ..errors import InvalidArgument, TransportError
from ..formats import BLOCK_SIZE, ROW_TILE, scale_mode
from ..memory import empty
from .rows import Rows

__all__ = [
    "Options",
    "RowLayout",
    "Rows",
    "convert_rows",
    "dot_rows",
    "expert_layout",
    "fp8_columns",
    "isa",
    "mxfp4_columns",
    "options",
    "read_meta",
    "route",
    "row_layout",
    "set_isa",
    "sum_rows",
    "supported_isas",
    "write_meta",
]

_DEFAULT = Options()


class SendRows(Protocol):
    """Which rows are sent: what `write_meta` needs of a plan. Index tensors int64."""

    @property
    def topk_idx(self) -> Tensor: ...
    @property
    def pair_tokens(self) -> Tensor: ...
    @property
    def pair_rows(self) -> Tensor: ...
    @property
    def rows_per_rank(self) -> Tensor: ...


def options(
    scale_mode_name: str = "even", stochastic: bool = False, hadamard: bool = False, seed: int = 0, stream: int = 0
) -> Options:
    """How MXFP4 is encoded, and (`hadamard`, `seed`) decoded."""
    return Options(scale_mode(scale_mode_name), int(stochastic), hadamard, seed % 2**64, stream % 2**32)


def convert_rows(
    src: Rows,
    dst: Rows,
    src_row: Tensor | None = None,
    dst_row: Tensor | None = None,
    options: Options = _DEFAULT,
    num_rows: int | None = None,
) -> None:
    """`dst[dst_row[i]] = convert(src[src_row[i]])` for i below `num_rows`; None = as many as the maps or `src` have."""
    if num_rows is None:
        num_rows = next((m.numel() for m in (src_row, dst_row) if m is not None), len(src))
    assert src.hidden == dst.hidden
    assert all(m is None or m.numel() >= num_rows for m in (src_row, dst_row))
    assert src_row is not None or len(src) >= num_rows
    assert dst_row is not None or len(dst) >= num_rows
    _cpu.convert_rows(_native(src), _native(dst), num_rows, src.hidden, _pointer(src_row), _pointer(dst_row), options)


def sum_rows(
    src: Rows,
    dst: Rows,
    src_row: Tensor,
    weights: Tensor | None = None,
    dst_row: Tensor | None = None,
    options: Options = _DEFAULT,
) -> None:
    """`dst[dst_row[i]] = sum over k of weights[i, k] * src[src_row[i, k]]` in float32, in the order of k.

    Args:
        src: the terms.
        dst: receives the sums.
        src_row: int64 `[num_rows, num_terms]`; terms of -1 are left out.
        weights: float32 of the same shape; None for a plain sum.
        dst_row: int64 `[num_rows]` or None.
        options: of the encoding into `dst`; stochastic rounding counts rows by i. `hadamard` holds for both sides.
    """
    num_rows, num_terms = src_row.shape
    assert src.hidden == dst.hidden
    assert weights is None or weights.shape == src_row.shape
    _cpu.sum_rows(
        _native(src),
        _native(dst),
        num_rows,
        num_terms,
        src.hidden,
        _pointer(src_row),
        _pointer(weights, torch.float32),
        _pointer(dst_row),
        options,
    )


def dot_rows(
    a: Rows, b: Rows, a_row: Tensor | None = None, b_row: Tensor | None = None, options: Options = _DEFAULT
) -> Tensor:
    """Dot products `a[a_row[i]] . b[b_row[i]]`, float32, summed in a fixed order; 0 where an index is -1."""
    num = next((m.numel() for m in (a_row, b_row) if m is not None), len(a))
    assert a.hidden == b.hidden
    assert all(m is None or m.numel() == num for m in (a_row, b_row))
    out = torch.empty(num, dtype=torch.float32)
    _cpu.dot_rows(_native(a), _native(b), num, a.hidden, _pointer(a_row), _pointer(b_row), out.data_ptr(), options)
    return out


def fp8_columns(src: Rows, src_row: Tensor | None, group_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Row-wise MXFP4 or FP8 (power-of-two scales) to column-wise FP8, group by group.

    Args:
        src: rows of kind MXFP4, FP8 or FP8_E8M0.
        src_row: rows of all groups, one group after the other; None = the rows of `src`.
        group_sizes: rows per group.

    Returns:
        Codes, float8_e4m3fn `[hidden * num_rows]`, per group `[hidden, m_i]`; scales, float32
        `[sum ceil(m_i / 128), hidden]`.

    Raises:
        InvalidArgument: an FP8 scale is not a positive normal power of two.
    """
    sizes = _group_sizes(src, src_row, group_sizes)
    data = empty((src.hidden * sum(group_sizes),), torch.uint8)
    scales = torch.empty((sum(-(-m // ROW_TILE) for m in group_sizes), src.hidden), dtype=torch.float32)
    bad = _cpu.fp8_columns(
        _native(src),
        src.hidden,
        _pointer(src_row),
        _pointer(sizes),
        len(group_sizes),
        data.data_ptr(),
        scales.data_ptr(),
    )
    if bad:
        raise InvalidArgument(f"{bad} FP8 scales are not positive normal powers of two; only those become column-wise")
    return data.view(torch.float8_e4m3fn), scales


def mxfp4_columns(
    src: Rows, src_row: Tensor | None, group_sizes: Sequence[int], options: Options = _DEFAULT
) -> tuple[Tensor, Tensor]:
    """Row-wise MXFP4 to column-wise MXFP4, group by group; arguments as in `fp8_columns`.

    Returns:
        Flat uint8 tensors, per group packed `[hidden, 16 * nb_i]` and scales `[hidden, nb_i]`, `nb_i = ceil(m_i / 32)`.
    """
    sizes = _group_sizes(src, src_row, group_sizes)
    num_blocks = src.hidden * sum(-(-m // BLOCK_SIZE) for m in group_sizes)
    packed = empty((num_blocks * BLOCK_SIZE // 2,), torch.uint8)
    scales = torch.empty(num_blocks, dtype=torch.uint8)
    _cpu.mxfp4_columns(
        _native(src),
        src.hidden,
        _pointer(src_row),
        _pointer(sizes),
        len(group_sizes),
        packed.data_ptr(),
        scales.data_ptr(),
        options,
    )
    return packed, scales


def route(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row per (token, rank with one of its experts), ordered by rank, then token.

    Args:
        topk_idx: int32 or int64 `[num_tokens, num_topk]` in `[-1, num_experts)`.
        num_experts: a multiple of `num_ranks`.
        num_ranks: ranks, each with `num_experts / num_ranks` experts in order.

    Returns:
        The row of each token for each rank `[num_tokens, num_ranks]`, or -1; token and row of every pair, by token,
        then rank; rows per rank. All int64.
    """
    num_tokens, num_topk = topk_idx.shape
    token_rows = torch.empty((num_tokens, num_ranks), dtype=torch.int64)
    pair_tokens = torch.empty(num_tokens * min(num_topk, num_ranks), dtype=torch.int64)
    pair_rows = torch.empty_like(pair_tokens)
    rows_per_rank = torch.empty(num_ranks, dtype=torch.int64)
    num_pairs = _cpu.route(
        *_index(topk_idx),
        num_tokens,
        num_topk,
        num_experts,
        num_ranks,
        token_rows.data_ptr(),
        pair_tokens.data_ptr(),
        pair_rows.data_ptr(),
        rows_per_rank.data_ptr(),
    )
    return token_rows, pair_tokens[:num_pairs], pair_rows[:num_pairs], rows_per_rank


def write_meta(buffer: Tensor, layout: RowLayout, plan: SendRows, weights: Tensor | None, num_experts: int) -> None:
    """Writes weights (None: 1.0) and local experts into the rows of a send buffer, uint8 `[num_rows, row_bytes]`."""
    assert buffer.is_contiguous()
    assert weights is None or weights.shape == plan.topk_idx.shape
    _cpu.write_meta(
        buffer.data_ptr(),
        layout,
        *_index(plan.topk_idx),
        _pointer(weights, torch.float32),
        _pointer(plan.pair_tokens),
        _pointer(plan.pair_rows),
        plan.pair_tokens.numel(),
        plan.topk_idx.shape[1],
        num_experts,
        plan.rows_per_rank.numel(),
        _pointer(plan.rows_per_rank),
    )


def read_meta(
    buffer: Tensor, layout: RowLayout, num_topk: int, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads what `write_meta` wrote from received rows, uint8 `[num_rows, row_bytes]`.

    Returns:
        Local experts int32 and weights float32 `[num_rows, num_topk]`; rows per local expert, int64.

    Raises:
        TransportError: an expert is out of range: what arrived is not what was sent.
    """
    assert buffer.is_contiguous()
    num_rows = buffer.shape[0]
    idx = torch.empty((num_rows, num_topk), dtype=torch.int32)
    weights = torch.empty((num_rows, num_topk), dtype=torch.float32)
    counts = torch.empty(num_local_experts, dtype=torch.int64)
    bad = _cpu.read_meta(
        buffer.data_ptr(),
        layout,
        num_rows,
        num_topk,
        idx.data_ptr(),
        weights.data_ptr(),
        counts.data_ptr(),
        num_local_experts,
    )
    if bad:
        raise TransportError(
            f"{bad} of {idx.numel()} experts in the received rows are outside [-1, {num_local_experts}): corrupt rows"
        )
    return idx, weights, counts


def expert_layout(
    idx: Tensor, counts: Tensor, alignment: int, num_rows: int | None = None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Expert-contiguous order of received rows: by local expert, row, slot; each group padded to `alignment`.

    Args:
        idx: int32 `[num_recv_rows, num_topk]`, local expert or -1.
        counts: int64, how often each local expert occurs in `idx`.
        alignment: group sizes are multiples of it.
        num_rows: rows of the result, at least the sum of the padded groups; None = that sum.

    Returns:
        The received row behind each row `[num_rows]`, or -1; the row of each slot `[num_recv_rows, num_topk]`, or -1
        (both int64); the padded group sizes.
    """
    needed = sum(-(-count // alignment) * alignment for count in counts.tolist())
    num_rows = needed if num_rows is None else num_rows
    assert num_rows >= needed
    row = torch.empty(num_rows, dtype=torch.int64)
    slot_rows = torch.empty(idx.shape, dtype=torch.int64)
    group_sizes = torch.empty(counts.numel(), dtype=torch.int64)
    _cpu.expert_layout(
        _pointer(idx, torch.int32),
        *idx.shape,
        counts.numel(),
        alignment,
        num_rows,
        _pointer(counts),
        row.data_ptr(),
        slot_rows.data_ptr(),
        group_sizes.data_ptr(),
    )
    return row, slot_rows, tuple(group_sizes.tolist())


def _native(rows: Rows) -> _cpu.Rows:
    scales = (0, 0) if rows.scales is None else _address_and_stride(rows.scales)
    return _cpu.Rows(rows.kind, *_address_and_stride(rows.data), *scales)


def _address_and_stride(tensor: Tensor) -> tuple[int, int]:
    assert tensor.device.type == "cpu"
    assert tensor.dim() == 2
    assert tensor.numel() == 0 or tensor.shape[1] == 1 or tensor.stride(1) == 1
    return tensor.data_ptr(), tensor.stride(0) * tensor.element_size()


def _pointer(tensor: Tensor | None, dtype: torch.dtype = torch.int64) -> int:
    if tensor is None:
        return 0
    assert tensor.device.type == "cpu"
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _index(topk_idx: Tensor) -> tuple[int, bool]:
    is_64 = topk_idx.dtype == torch.int64
    return _pointer(topk_idx, torch.int64 if is_64 else torch.int32), is_64


def _group_sizes(src: Rows, src_row: Tensor | None, group_sizes: Sequence[int]) -> Tensor:
    assert all(m >= 0 for m in group_sizes)
    assert sum(group_sizes) == (len(src) if src_row is None else src_row.numel())
    return torch.tensor(group_sizes, dtype=torch.int64)
