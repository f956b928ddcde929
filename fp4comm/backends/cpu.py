"""The loops of `fp4comm._cpu` on torch CPU tensors.

Callers have checked shapes, dtypes and devices; the assertions here only guard our own invariants. Row maps are int64
vectors: `None` is the identity, -1 a row of zeros (in a sum: no term).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import _cpu
from .._cpu import Options, RowLayout, isa, row_layout, set_isa, supported_isas
from ..errors import InvalidArgument, TransportError
from ..formats import BLOCK_SIZE, GROUP_SIZE, ROW_TILE, GemmKind, Kind, scale_mode
from ..memory import empty
from . import gemm_rows
from .gemm_rows import expert_scales, quantize_gemm_rows
from .rows import Rows
from .wire import Experts, Plan, Wire

__all__ = [
    "Options",
    "RowLayout",
    "Rows",
    "convert_rows",
    "dot_rows",
    "expand_rows",
    "expert_layout",
    "expert_scales",
    "fp8_columns",
    "fp8_rows_and_columns",
    "gemm_columns",
    "isa",
    "mxfp4_columns",
    "options",
    "pack_tokens",
    "quantize_gemm_rows",
    "read_routing",
    "route",
    "row_layout",
    "set_isa",
    "sum_rows",
    "supported_isas",
]

_DEFAULT = Options()


def options(
    scale_mode_name: str = "even", stochastic: bool = False, hadamard: bool = False, seed: int = 0, stream: int = 0
) -> Options:
    """How MXFP4 is encoded, and (`hadamard`, `seed`) decoded."""
    return Options(scale_mode(scale_mode_name), int(stochastic), hadamard, int(seed) % 2**64, stream % 2**32)


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
    out = torch.empty(num, device="cpu", dtype=torch.float32)
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
    scales = torch.empty((sum(-(-m // ROW_TILE) for m in group_sizes), src.hidden), device="cpu", dtype=torch.float32)
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


def fp8_rows_and_columns(
    src: Rows, src_row: Tensor | None, group_sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MXFP4 rows to FP8 both ways; arguments as in `fp8_columns`.

    Returns:
        Row-wise codes `[num_rows, hidden]` and scales `[num_rows, ceil(hidden / 128)]`; what `fp8_columns` returns.
    """
    num_rows, num_groups = sum(group_sizes), -(-src.hidden // GROUP_SIZE)
    codes = empty((num_rows, src.hidden), torch.uint8)
    scales = empty((num_rows, num_groups), torch.float32)
    convert_rows(src, Rows(Kind.FP8, codes, scales), src_row=src_row)
    return codes.view(torch.float8_e4m3fn), scales, *fp8_columns(src, src_row, group_sizes)


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
    scales = torch.empty(num_blocks, device="cpu", dtype=torch.uint8)
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


def pack_tokens(
    x: Rows, send: Wire, plan: Plan, weights: Tensor | None, num_experts: int, options: Options = _DEFAULT
) -> None:
    """Converts each token's row once and writes it for every rank that it goes to, with its routing if there is room.

    Args:
        x: rows of the tokens. Stochastic rounding counts them.
        send: receives the rows; with `num_topk` slots of routing each, or none.
        plan: which rows.
        weights: float32 of the shape of `plan.topk_idx`; None = 1.
        num_experts: of all ranks.
        options: of the encoding.
    """
    assert plan.pairs is not None
    tokens, rows = plan.pairs
    convert_rows(x, send.rows, src_row=tokens, dst_row=rows, options=options)
    if send.num_topk:
        _write_meta(send.buffer, send.layout, plan, weights, num_experts)


def expand_rows(
    src: Rows,
    out: Rows,
    source_rows: Tensor | None = None,
    slot_rows: Tensor | None = None,
    weights: Tensor | None = None,
    options: Options = _DEFAULT,
    end: Tensor | None = None,
) -> None:
    """`out[i] = convert(src[source_rows[i]])`, zeros where that is -1.

    Args:
        src: the rows.
        out: receives rows of any kind.
        source_rows: int64 `[len(out)]`; None = the same rows.
        slot_rows: int64 `[len(src), n]`, the reverse of source_rows if the caller has it; this backend needs none.
        weights: float32 `[len(out)]`, a factor for each row; only with source_rows.
        options: of decoding and encoding.
        end: int32 `[1]`: what rows from there on hold may be anything, which this backend makes no use of.
    """
    if out.kind == GemmKind.FP8_ROW:
        assert weights is None
        _expand_to_gemm_rows(src, out, source_rows, options)
    elif weights is None:
        convert_rows(src, out, src_row=source_rows, options=options)
    else:
        assert source_rows is not None
        sum_rows(src, out, source_rows.unsqueeze(1), weights.unsqueeze(1), options=options)


def _expand_to_gemm_rows(src: Rows, out: Rows, source_rows: Tensor | None, options: Options) -> None:
    if not gemm_rows.has_row_scales(src, options):
        floats = gemm_rows.floats_between(src, len(out))
        convert_rows(src, Rows.of(floats), src_row=source_rows, options=options)
        return gemm_rows.store_rows(out, *quantize_gemm_rows(floats))
    floats = torch.empty((len(out), src.hidden), dtype=torch.float32, device="cpu")
    convert_rows(src, Rows.of(floats), src_row=source_rows)
    scales = gemm_rows.scales_of_rows(src)
    if source_rows is not None:
        scales = torch.where(source_rows < 0, gemm_rows.LEAST_SCALE, scales[source_rows])
    gemm_rows.store_rows(out, gemm_rows.move_rows(floats, scales), scales)
    return None


def gemm_columns(
    src: Rows,
    src_row: Tensor | None,
    row_scales: Tensor,
    group_sizes: Sequence[int] | None = None,
    end: Tensor | None = None,
) -> Tensor:
    """Rows brought to scales that are given, each group of them transposed: the codes, in flat memory.

    Args:
        src: FP8 rows with one scale each, or MXFP4 rows.
        src_row: int64 `[num_rows]`, the row of src behind each; -1 = zeros, None = the same rows.
        row_scales: float32 `[num_rows]`, powers of two: at least the row's own, or 2**-6 times its largest block's.
        group_sizes: rows of each group; None = one group.
        end: as in `expand_rows`, of one group.
    """
    if src.kind == GemmKind.FP8_ROW:
        assert src_row is None
        floats = gemm_rows.floats_of_rows(src)
    else:
        floats = torch.empty((len(row_scales), src.hidden), dtype=torch.float32, device="cpu")
        convert_rows(src, Rows.of(floats), src_row)
    sizes = [len(row_scales)] if group_sizes is None else group_sizes
    return gemm_rows.turn_groups(gemm_rows.move_rows(floats, row_scales), sizes)


def route(
    topk_idx: Tensor, num_experts: int, num_ranks: int, rows_stride: int | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """One row per (token, rank with one of its experts), ordered by rank, then token.

    Args:
        topk_idx: int32 or int64 `[num_tokens, num_topk]` in `[-1, num_experts)`.
        num_experts: a multiple of `num_ranks`.
        num_ranks: ranks, each with `num_experts / num_ranks` experts in order.
        rows_stride: must be None: rows follow each other.

    Returns:
        `token_rows`, `counts` and `pairs` of a `SendPlan`.
    """
    assert rows_stride is None
    num_tokens, num_topk = topk_idx.shape
    token_rows = torch.empty((num_tokens, num_ranks), device="cpu", dtype=torch.int64)
    pair_tokens = torch.empty(num_tokens * min(num_topk, num_ranks), device="cpu", dtype=torch.int64)
    pair_rows = torch.empty_like(pair_tokens)
    rows_per_rank = torch.empty(num_ranks, device="cpu", dtype=torch.int64)
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
    choices = np.bincount(topk_idx.numpy().ravel() + 1, minlength=num_experts + 1)[1:]
    counts = np.zeros((num_ranks, 2 + num_experts // num_ranks), np.int64)
    counts[:, 1] = rows_per_rank.numpy()
    counts[:, 2:] = choices.reshape(num_ranks, -1)
    return token_rows, torch.from_numpy(counts), (pair_tokens[:num_pairs], pair_rows[:num_pairs])


def _write_meta(buffer: Tensor, layout: RowLayout, plan: Plan, weights: Tensor | None, num_experts: int) -> None:
    """Writes weights (None: 1.0) and local experts into the rows of a send buffer, uint8 `[num_rows, row_bytes]`."""
    assert buffer.is_contiguous()
    assert weights is None or weights.shape == plan.topk_idx.shape
    assert plan.pairs is not None
    tokens, rows = plan.pairs
    rows_per_rank = plan.rows_per_rank.contiguous()
    _cpu.write_meta(
        buffer.data_ptr(),
        layout,
        *_index(plan.topk_idx),
        _pointer(weights, torch.float32),
        _pointer(tokens),
        _pointer(rows),
        tokens.numel(),
        plan.topk_idx.shape[1],
        num_experts,
        rows_per_rank.numel(),
        _pointer(rows_per_rank),
    )


def read_routing(
    arrived: Wire,
    num_local_experts: int,
    alignment: int | None = None,
    num_rows: int | None = None,
    mark_unused: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Experts | None, Tensor | None]:
    """Reads the routing of received rows, and orders them by expert.

    Args:
        arrived: the rows.
        num_local_experts: of this rank.
        alignment: each expert's rows are padded to a multiple of it; None = no expert layout.
        num_rows: rows of the expert layout, at least as many as needed; None = as many as needed.
        mark_unused: whether some rows may have been filled by no message.

    Returns:
        Local experts int32 and weights float32 `[num_recv_rows, num_topk]`; rows per local expert, int64; what makes an
        `ExpertLayout`, or None; if mark_unused, the number of each row with an expert and -1 for the others, int64, or
        else None.

    Raises:
        TransportError: an expert is out of range: what arrived is not what was sent.
    """
    idx, weights, counts = _read_meta(arrived.buffer, arrived.layout, arrived.num_topk, num_local_experts)
    source_rows = None
    if mark_unused:
        is_used = (idx.numpy() >= 0).any(1)
        source_rows = torch.from_numpy(np.where(is_used, np.arange(len(idx)), -1))
    if alignment is None:
        return idx, weights, counts, None, source_rows
    rows, slot_rows, sizes = expert_layout(idx, counts, alignment, num_rows)
    slots = slot_rows.numpy()
    row_weights = np.zeros(len(rows), np.float32)
    row_weights[slots[slots >= 0]] = weights.numpy()[slots >= 0]
    ends = torch.from_numpy(np.cumsum(sizes, dtype=np.int32))
    return idx, weights, counts, (rows, slot_rows, ends, torch.from_numpy(row_weights)), source_rows


def _read_meta(
    buffer: Tensor, layout: RowLayout, num_topk: int, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads what `_write_meta` wrote from received rows, uint8 `[num_rows, row_bytes]`.

    Returns:
        Local experts int32 and weights float32 `[num_rows, num_topk]`; rows per local expert, int64.

    Raises:
        TransportError: an expert is out of range: what arrived is not what was sent.
    """
    assert buffer.is_contiguous()
    num_rows = buffer.shape[0]
    idx = torch.empty((num_rows, num_topk), device="cpu", dtype=torch.int32)
    weights = torch.empty((num_rows, num_topk), device="cpu", dtype=torch.float32)
    counts = torch.empty(num_local_experts, device="cpu", dtype=torch.int64)
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
    row = torch.empty(num_rows, device="cpu", dtype=torch.int64)
    slot_rows = torch.empty(idx.shape, device="cpu", dtype=torch.int64)
    group_sizes = torch.empty(counts.numel(), device="cpu", dtype=torch.int64)
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
    assert rows.data.device.type == "cpu"
    return _cpu.Rows(rows.kind, *rows.address)


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
    return torch.tensor(group_sizes, device="cpu", dtype=torch.int64)
