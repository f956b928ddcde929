"""Conversions, sums and products of rows on the device. Nothing here waits for the device.

Callers have checked shapes, dtypes and devices. Row maps are int64 vectors on the device: `None` is the identity, -1 a
row of zeros (in a sum: no term). Destinations are ours: their rows are aligned to 16 bytes, their scales naturally.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import GROUP_SIZE, GemmKind, Kind, ScaleMode
from . import cuda_compile, gemm_rows
from .cpu import Options, RowLayout, options
from .cuda_compile import pointer
from .cuda_gemm_rows import quantize_gemm_rows
from .rows import BITS, PeerRows, Rows

__all__ = ["Meta", "Options", "convert_rows", "dot_rows", "expand_rows", "options", "pack_tokens", "sum_rows"]

_DEFAULT = Options()
_THREADS = 256
_WARPS = _THREADS // 32
_LOOP_THREADS = 512  # more leave too few registers
_ALIGNMENT = 16  # of rows of data: one load of a lane
_SCALE_ALIGNMENT: dict[Kind | GemmKind, int] = {Kind.FP8: 4, Kind.FP8_E8M0: 1, Kind.MXFP4: 1, GemmKind.FP8_ROW: 4}

_UNROLL = 8  # steps of a warp whose loads are under way together
_SUM_BYTES = 64  # likewise of a lane in a sum
_FEW_ROWS = 4096  # fewer than that do not fill a device with a warp each
_FEW_ROWS_PARTS = 4


@dataclass(frozen=True)
class Meta:
    """What a row of a message says of its token's choices.

    Attributes:
        layout: of the row.
        topk_idx: int32 or int64 `[num_tokens, num_topk]`; anything outside `[0, num_experts)` is no expert.
        weights: float32 of the same shape; None = 1.0.
        num_experts: over all ranks.
        rows_per_rank: int64 `[num_ranks]`, any stride; read with rows_stride only.
        rows_stride: rows that each rank owns, of which the unused ones get weights 0 and experts -1; None = no others
            than those that are sent.
    """

    layout: RowLayout
    topk_idx: Tensor
    weights: Tensor | None
    num_experts: int
    rows_per_rank: Tensor
    rows_stride: int | None


def convert_rows(
    src: Rows,
    dst: Rows,
    src_row: Tensor | None = None,
    dst_row: Tensor | None = None,
    options: Options = _DEFAULT,
    num_rows: int | None = None,
) -> None:
    """See `cpu.convert_rows`."""
    if num_rows is None:
        num_rows = next((m.numel() for m in (src_row, dst_row) if m is not None), len(src))
    assert all(m is None or m.numel() >= num_rows for m in (src_row, dst_row))
    assert src_row is not None or len(src) >= num_rows
    assert dst_row is not None or len(dst) >= num_rows
    src = _aligned(src)
    constants = _constants(src, dst, options, num_rows)
    maps = (pointer(src_row), pointer(dst_row))
    if src.arrivals is not None:
        assert src_row is None
        assert num_rows == len(src)
    num_turns = dst.num_turns if isinstance(dst, PeerRows) else num_rows
    if src.arrivals is not None:
        num_turns = src.arrivals.num_turns
    others = (pointer(dst.peers), _arrivals_pointer(src))
    args = (*src.address, *dst.address, num_rows, *maps, *_random(options), *others, num_turns)
    _launch("convert_rows", "rows_convert.cu", constants, num_turns * constants["ROW_PARTS"], args, src, dst)


def pack_tokens(x: Rows, send: Rows, token_rows: Tensor, options: Options = _DEFAULT, meta: Meta | None = None) -> None:
    """Row t of `x`, converted once, goes to the rows `token_rows[t]` of `send` that are not -1, in one launch.

    `send` keeps what is read, since the next kernel may run, and so write, at the same time.

    Args:
        x: the tokens; stochastic rounding counts them.
        send: receives them.
        token_rows: int64 `[num_tokens, num_ranks]`.
        options: of the encoding into `send`.
        meta: the choices that go with the rows; None = none.
    """
    num_tokens, num_ranks = token_rows.shape
    assert len(x) >= num_tokens
    x = _aligned(x)
    constants = _constants(x, send, options, num_tokens) | {"NUM_TARGETS": num_ranks}
    num_items = num_tokens * constants["ROW_PARTS"]
    choices: tuple[int, ...] = (0,) * 8
    if meta is None or meta.topk_idx.shape[1] == 0:
        constants |= {"META": 0, "NUM_TOPK": 0, "INDEX_BYTES": 0, "CAPACITY": 0}
    else:
        topk_idx = meta.topk_idx.contiguous()
        weights = None if meta.weights is None else meta.weights.contiguous()
        capacity = meta.rows_stride or 0
        assert weights is None or weights.shape == topk_idx.shape
        assert meta.rows_per_rank.dtype == torch.int64
        num_items += -(-capacity * num_ranks // 32)
        constants |= {
            "META": 1,
            "NUM_TOPK": topk_idx.shape[1],
            "INDEX_BYTES": topk_idx.element_size(),
            "CAPACITY": int(capacity > 0),
        }
        choices = (
            topk_idx.data_ptr(),
            pointer(weights, torch.float32),
            meta.num_experts // num_ranks,
            meta.layout.weight_offset,
            meta.layout.expert_offset,
            meta.rows_per_rank.data_ptr(),
            meta.rows_per_rank.stride(0),
            capacity,
        )
    args = (*x.address, *send.address, num_tokens, pointer(token_rows), *_random(options), *choices)
    _launch("pack_tokens", "rows_pack.cu", constants, num_items, (*args, pointer(send.peers)), x, send)
    send.source = x


def expand_rows(
    src: Rows,
    out: Rows,
    source_rows: Tensor | None = None,
    slot_rows: Tensor | None = None,
    weights: Tensor | None = None,
    options: Options = _DEFAULT,
    end: Tensor | None = None,
) -> None:
    """See `cpu.expand_rows`. One launch; with slot_rows each row of `src` is read and converted once."""
    assert source_rows is not None or weights is None
    assert out.kind != GemmKind.FP8_ROW or (weights is None and slot_rows is not None)
    if out.kind == GemmKind.FP8_ROW and not gemm_rows.has_row_scales(src, options):
        floats = gemm_rows.floats_between(src, len(out))
        expand_rows(src, Rows.of(floats), source_rows, slot_rows, weights, options, end)
        return gemm_rows.store_rows(out, *quantize_gemm_rows(floats))
    if source_rows is None or slot_rows is None:
        if weights is None or source_rows is None:
            return convert_rows(src, out, source_rows, None, options, len(out))
        return sum_rows(src, out, source_rows.view(-1, 1), weights.view(-1, 1), None, options)
    num_src, num_out = slot_rows.shape[0], source_rows.numel()
    assert len(src) >= num_src
    assert len(out) >= num_out
    src = _aligned(src)
    constants = _constants(src, out, options, num_src, through_floats=weights is not None)
    constants |= {"NUM_TARGETS": slot_rows.shape[1], "WEIGHTED": int(weights is not None)}
    if src.arrivals is not None:
        assert num_src == len(src)
        num_src = src.arrivals.num_turns
    pointers = (
        pointer(source_rows),
        pointer(weights, torch.float32),
        _arrivals_pointer(src),
        pointer(end, torch.int32),
    )
    args = (*src.address, *out.address, num_src, pointer(slot_rows), *_random(options), num_out, *pointers)
    num_items = num_src * constants["ROW_PARTS"] + -(-num_out // 32)
    _launch("expand_rows", "rows_expand.cu", constants, num_items, args, src, out)
    return None


def sum_rows(
    src: Rows,
    dst: Rows,
    src_row: Tensor,
    weights: Tensor | None = None,
    dst_row: Tensor | None = None,
    options: Options = _DEFAULT,
) -> None:
    """See `cpu.sum_rows`."""
    num_rows, num_terms = src_row.shape
    assert src.arrivals is None
    assert weights is None or weights.shape == src_row.shape
    if num_terms == 0:
        return convert_rows(src, dst, src_row.new_full((num_rows,), -1), dst_row, options)
    src = _aligned(src)
    constants = _constants(src, dst, options, num_rows, through_floats=True)
    constants |= {
        "NUM_TERMS": num_terms,
        "WEIGHTED": int(weights is not None),
        "UNROLL": max(1, min(4, _SUM_BYTES // (BITS[src.kind] * min(num_terms, 8)))),  # 8 numbers a lane
    }
    maps = (pointer(src_row), pointer(weights, torch.float32), pointer(dst_row))
    num_turns = dst.num_turns if isinstance(dst, PeerRows) else num_rows
    args = (*src.address, *dst.address, num_rows, *maps, *_random(options), pointer(dst.peers), num_turns)
    _launch("sum_rows", "rows_sum.cu", constants, num_turns * constants["ROW_PARTS"], args, src, dst)
    return None


def dot_rows(
    a: Rows, b: Rows, a_row: Tensor | None = None, b_row: Tensor | None = None, options: Options = _DEFAULT
) -> Tensor:
    """See `cpu.dot_rows`."""
    num = next((m.numel() for m in (a_row, b_row) if m is not None), len(a))
    assert a.hidden == b.hidden
    assert all(m is None or m.numel() == num for m in (a_row, b_row))
    out = torch.empty(num, dtype=torch.float32, device=a.data.device)
    a, b = _aligned(a), _aligned(b)
    constants = {"HIDDEN": a.hidden, "A_KIND": int(a.kind), "B_KIND": int(b.kind), "HADAMARD": int(options.hadamard)}
    args = (
        *a.address,
        *b.address,
        num,
        pointer(a_row),
        pointer(b_row),
        out.data_ptr(),
        _random(options)[0],
    )
    cuda_compile.launch("rows_dot.cu", "dot_rows", constants, -(-num * 4 // _THREADS), _THREADS, args)
    return out


def _launch(
    name: str, file: str, constants: dict[str, int], num_items: int, args: tuple[int, ...], src: Rows, dst: Rows
) -> None:
    """One warp per item, or, where not all of the device is to be taken, a loop.

    A limited number of multiprocessors gets a block each, which is how the device spreads them. Kernels that count rows
    and kernels that wait for rows share a device, and a kernel that waits must not keep out those it waits for.
    """
    grid, threads = -(-num_items // _WARPS), _THREADS
    num_sms = src.num_sms if dst.num_sms is None else dst.num_sms
    blocks = dst.counting_blocks if src.arrivals is None else src.arrivals.most_blocks
    if num_sms is not None:
        threads = _LOOP_THREADS
        grid = min(-(-num_items * 32 // threads), num_sms)
    elif blocks:
        grid = min(grid, blocks * _num_multiprocessors())
    if num_sms is not None or blocks:
        constants = constants | {"LOOP": 1, "THREADS": threads}
    cuda_compile.launch(file, name, constants, grid, threads, args, early=src.arrivals is not None)


@functools.cache
def _num_multiprocessors() -> int:
    if not torch.cuda.is_available():  # as kernels run in tests
        return 2
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _arrivals_pointer(src: Rows) -> int:
    return 0 if src.arrivals is None else src.arrivals.facts.data_ptr()


def _constants(src: Rows, dst: Rows, options: Options, num_rows: int, through_floats: bool = False) -> dict[str, int]:
    """Macros of `rows.cuh`. What makes no difference between two kinds is left at its default.

    Args:
        src, dst, options: of the conversion.
        num_rows: how many rows the warps share.
        through_floats: whether MXFP4 becomes floats even if it ends as MXFP4 or FP8.
    """
    assert src.hidden == dst.hidden
    assert _is_aligned(dst), "destinations are allocated with aligned rows"
    peers = {"PEERS": dst.num_ranks} if isinstance(dst, PeerRows) else {}
    if dst.counting_blocks:
        peers["SIGNAL"] = 1
    if src.arrivals is not None:
        peers["AWAIT"] = 1
    words = src.kind == Kind.MXFP4 and src.hidden % GROUP_SIZE == 0 and (src.address[2] | src.address[3]) % 4 == 0
    return peers | dict(
        _macros(
            src.kind,
            dst.kind,
            src.hidden,
            options.scale_mode,
            bool(options.rounding),
            options.hadamard,
            words,
            num_rows >= _FEW_ROWS or dst.counting_blocks > 0,  # a row is counted once
            through_floats,
        )
    )


@functools.cache
def _macros(
    src: Kind | GemmKind,
    dst: Kind | GemmKind,
    hidden: int,
    scale_mode: int,
    stochastic: bool,
    hadamard: bool,
    words: bool,
    is_many: bool,
    through_floats: bool,
) -> dict[str, int]:
    encodes = dst == Kind.MXFP4 and (through_floats or src != dst)
    decodes = src == Kind.MXFP4 and (through_floats or dst in (Kind.F32, Kind.BF16, Kind.F16))
    return {
        "HIDDEN": hidden,
        "SRC_KIND": int(src),
        "DST_KIND": int(dst),
        "SCALE_MODE": scale_mode if encodes else ScaleMode.FLOOR.value,
        "STOCHASTIC": int(encodes and stochastic),
        "HADAMARD": int((encodes or decodes) and hadamard),
        "SRC_SCALE_WORDS": int(words),
        "ROW_PARTS": 1 if is_many else _FEW_ROWS_PARTS,
        "UNROLL": _UNROLL,
    }


def _random(options: Options) -> tuple[int, int]:
    """Seed and stream; arguments of kernels are signed."""
    return (options.seed + 2**63) % 2**64 - 2**63, options.stream


def _aligned(rows: Rows) -> Rows:
    """The rows, in fresh memory if theirs is not aligned as the kernels want it."""
    if _is_aligned(rows):
        return rows
    assert rows.arrivals is None, "slots have aligned rows"
    scales = None if rows.scales is None else rows.scales.clone(memory_format=torch.contiguous_format)
    return Rows(rows.kind, rows.data.clone(memory_format=torch.contiguous_format), scales)


def _is_aligned(rows: Rows) -> bool:
    if len(rows) == 0:
        return True
    data, stride, scales, scales_stride = rows.address
    if len(rows) == 1:
        stride = scales_stride = 0
    return (data | stride) % _ALIGNMENT == 0 and (scales | scales_stride) % _SCALE_ALIGNMENT.get(rows.kind, 1) == 0
