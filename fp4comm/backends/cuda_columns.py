"""Column-wise outputs on the device: row-wise MXFP4 or FP8, transposed group by group to one exponent per tile.

The host knows the groups; where there are several, a table of them is copied to the device and kept for a while, so a
graph must not capture that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidArgument, NotAvailable
from ..formats import BLOCK_SIZE, GROUP_SIZE, ROW_TILE, GemmKind, Kind
from . import cuda_compile
from .cpu import Options
from .rows import Rows

_THREADS = 128  # for each span of columns; a block of threads takes several
_MXFP4_COLUMNS = 256  # of a span
_FP8_COLUMNS = 128
_REQUANTIZED_COLUMNS = 512

# Spans, and blocks per multiprocessor that registers are limited for.
_MXFP4_SPANS, _MXFP4_MIN_BLOCKS = 1, 5
_FP8_SPANS, _FP8_MIN_BLOCKS = 2, 4

_FLOAT_SCALES = (Kind.FP8, GemmKind.FP8_ROW)

_DEFAULT = Options()


def fp8_columns(src: Rows, src_row: Tensor | None, group_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """As `cpu.fp8_columns`. Waits for the device if `src` has float32 scales, which it looks through.

    Raises:
        InvalidArgument: a float32 scale is not a positive normal power of two. Bytes of FP8_E8M0 are not checked.
    """
    if src.kind == Kind.MXFP4:
        codes, scales, _ = _fp8_from_mxfp4(src, src_row, group_sizes, with_rows=False)
        return codes, scales
    source = _Source.of(src, src_row, group_sizes, ROW_TILE)
    codes, scales = _new_columns(source)
    check = src.kind == Kind.FP8
    bad = torch.zeros(1, dtype=torch.int32, device=codes.device) if check else None
    cuda_compile.launch(
        "columns_fp8.cu",
        "fp8_to_fp8_columns",
        {
            "HIDDEN": src.hidden,
            "SPANS": _FP8_SPANS,
            "SRC_KIND": int(src.kind),
            "MIN_BLOCKS": _FP8_MIN_BLOCKS,
            "GIVEN": 0,
        },
        source.num_tiles * -(-src.hidden // (_FP8_SPANS * _FP8_COLUMNS)),
        _FP8_SPANS * _THREADS,
        (*source.arguments(), codes.data_ptr(), scales.data_ptr(), 0 if bad is None else bad.data_ptr(), 0, 0),
    )
    if bad is not None and (num_bad := int(bad.item())):
        raise InvalidArgument(
            f"{num_bad} FP8 scales are not positive normal powers of two; only those become column-wise"
        )
    return codes.view(torch.float8_e4m3fn), scales


def fp8_rows_and_columns(
    src: Rows, src_row: Tensor | None, group_sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MXFP4 to row-wise and column-wise FP8, read once.

    Returns:
        Row-wise codes float8_e4m3fn `[num_rows, hidden]` and scales float32 `[num_rows, ceil(hidden / 128)]`;
        column-wise codes and scales as of `fp8_columns`.
    """
    assert src.kind == Kind.MXFP4
    codes, scales, rows = _fp8_from_mxfp4(src, src_row, group_sizes, with_rows=True)
    assert rows is not None
    return *rows, codes, scales


def mxfp4_columns(
    src: Rows, src_row: Tensor | None, group_sizes: Sequence[int], options: Options = _DEFAULT
) -> tuple[Tensor, Tensor]:
    """As `cpu.mxfp4_columns`. `options` make no difference: on numbers that were MXFP4 all scale modes agree."""
    source = _Source.of(src, src_row, group_sizes, BLOCK_SIZE)
    num_blocks = src.hidden * source.num_tiles
    packed = torch.empty(num_blocks * (BLOCK_SIZE // 2), dtype=torch.uint8, device=src.data.device)
    scales = torch.empty(num_blocks, dtype=torch.uint8, device=src.data.device)
    cuda_compile.launch(
        "columns_to_mxfp4.cu",
        "mxfp4_to_mxfp4_columns",
        {"HIDDEN": src.hidden, "SPANS": 1},
        source.num_tiles * -(-src.hidden // _REQUANTIZED_COLUMNS),
        _THREADS,
        (*source.arguments(), packed.data_ptr(), scales.data_ptr()),
    )
    return packed, scales


def _fp8_from_mxfp4(
    src: Rows, src_row: Tensor | None, group_sizes: Sequence[int], with_rows: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    source = _Source.of(src, src_row, group_sizes, ROW_TILE)
    codes, scales = _new_columns(source)
    rows = _new_rows(source) if with_rows else None
    assert src.scales is not None
    constants = {
        "HIDDEN": src.hidden,
        "SPANS": _MXFP4_SPANS,
        "WITH_ROWS": int(with_rows),
        "SCALES_ALIGNED": int(_is_aligned(source.rows.scales, 8)),
        "MIN_BLOCKS": _MXFP4_MIN_BLOCKS,
        "GIVEN": 0,
    }
    cuda_compile.launch(
        "columns_mxfp4.cu",
        "mxfp4_to_fp8_columns",
        constants,
        source.num_tiles * -(-src.hidden // (_MXFP4_SPANS * _MXFP4_COLUMNS)),
        _MXFP4_SPANS * _THREADS,
        (
            *source.arguments(),
            codes.data_ptr(),
            scales.data_ptr(),
            *((0, 0) if rows is None else (rows[0].data_ptr(), rows[1].data_ptr())),
            0,
            0,
        ),
    )
    if rows is not None:
        rows = rows[0].view(torch.float8_e4m3fn), rows[1]
    return codes.view(torch.float8_e4m3fn), scales, rows


def gemm_columns(
    src: Rows,
    src_row: Tensor | None,
    row_scales: Tensor,
    group_sizes: Sequence[int] | None = None,
    end: Tensor | None = None,
) -> Tensor:
    """As `cpu.gemm_columns`."""
    assert end is None or group_sizes is None
    sizes = (len(row_scales),) if group_sizes is None else group_sizes
    assert row_scales.is_contiguous()
    assert row_scales.dtype == torch.float32
    source = _Source.of(src, src_row, sizes, ROW_TILE)
    codes = torch.empty(src.hidden * source.num_rows, dtype=torch.float8_e4m3fn, device=src.device)
    constants = {"HIDDEN": src.hidden, "GIVEN": 1}
    given = row_scales.data_ptr(), cuda_compile.pointer(end, torch.int32)
    if src.kind == Kind.MXFP4:
        is_aligned = int(_is_aligned(source.rows.scales, 8))
        constants |= {"SPANS": _MXFP4_SPANS, "WITH_ROWS": 0, "SCALES_ALIGNED": is_aligned}
        constants |= {"MIN_BLOCKS": _MXFP4_MIN_BLOCKS}
        file, name, spans, columns = "columns_mxfp4.cu", "mxfp4_to_fp8_columns", _MXFP4_SPANS, _MXFP4_COLUMNS
        pointers: tuple[int, ...] = (codes.data_ptr(), 0, 0, 0, *given)
    else:
        constants |= {"SPANS": _FP8_SPANS, "SRC_KIND": int(src.kind), "MIN_BLOCKS": _FP8_MIN_BLOCKS}
        file, name, spans, columns = "columns_fp8.cu", "fp8_to_fp8_columns", _FP8_SPANS, _FP8_COLUMNS
        pointers = (codes.data_ptr(), 0, 0, *given)
    grid = source.num_tiles * -(-src.hidden // (spans * columns))
    cuda_compile.launch(file, name, constants, grid, spans * _THREADS, (*source.arguments(), *pointers))
    return codes


@dataclass(frozen=True)
class _Source:
    """Rows, where they are taken from, and their groups as kernels look them up."""

    rows: Rows
    src_row: Tensor | None
    groups: Tensor | None
    num_groups: int
    num_rows: int
    num_tiles: int

    @classmethod
    def of(cls, src: Rows, src_row: Tensor | None, group_sizes: Sequence[int], rows_per_tile: int) -> _Source:
        sizes = np.array([m for m in group_sizes if m > 0], dtype=np.int64)  # without rows there is nothing to write
        tiles = -(-sizes // rows_per_tile)
        num_rows = int(sizes.sum())
        assert all(m >= 0 for m in group_sizes)
        assert num_rows == (len(src) if src_row is None else src_row.numel())
        assert src_row is None or (src_row.dtype == torch.int64 and src_row.is_contiguous())
        groups = None if len(sizes) <= 1 else _table_of(sizes, rows_per_tile, src.device)
        scales = None if src.scales is None else _aligned(src.scales, 4 if src.kind in _FLOAT_SCALES else 1)
        rows = Rows(src.kind, _aligned(src.data, 16), scales)
        return cls(rows, src_row, groups, len(sizes), num_rows, int(tiles.sum()))

    def arguments(self) -> tuple[int, ...]:
        """The first arguments of every kernel."""
        assert self.rows.scales is not None
        return (
            *_address_and_stride(self.rows.data),
            *_address_and_stride(self.rows.scales),
            0 if self.src_row is None else self.src_row.data_ptr(),
            0 if self.groups is None else self.groups.data_ptr(),
            self.num_groups,
            self.num_rows,
        )


def _table_of(sizes: np.ndarray, rows_per_tile: int, device: torch.device) -> Tensor:
    """First row and first tile of every group, and their sums."""
    if (sizes == sizes[0]).all():  # by the device: a graph may capture that
        size, numbers = int(sizes[0]), torch.arange(len(sizes) + 1, device=device)
        return torch.stack([numbers * size, numbers * -(-size // rows_per_tile)])
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotAvailable("columns of groups of several sizes in a CUDA graph: the table comes from the host")
    return _table(tuple(sizes.tolist()), rows_per_tile, device, _stream(device))


def _stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream


@functools.lru_cache(maxsize=64)
def _table(sizes: tuple[int, ...], rows_per_tile: int, device: torch.device, stream: int) -> Tensor:
    """Kept, since the groups of a step are those of several calls. `stream` is the one that it is copied on."""
    rows = np.array(sizes, dtype=np.int64)
    return _to_device(_starts(rows, -(-rows // rows_per_tile)), device)


def _starts(*counts: np.ndarray) -> Tensor:
    """Per vector of counts, where each begins, and their sum."""
    starts = np.zeros((len(counts), len(counts[0]) + 1), dtype=np.int64)
    np.cumsum(np.stack(counts), axis=1, out=starts[:, 1:])
    return torch.from_numpy(starts)


def _to_device(table: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


def _new_columns(source: _Source) -> tuple[Tensor, Tensor]:
    """Codes (bytes) and scales, to be filled."""
    hidden, device = source.rows.hidden, source.rows.data.device
    codes = torch.empty(hidden * source.num_rows, dtype=torch.uint8, device=device)
    return codes, torch.empty((source.num_tiles, hidden), dtype=torch.float32, device=device)


def _new_rows(source: _Source) -> tuple[Tensor, Tensor]:
    hidden, device = source.rows.hidden, source.rows.data.device
    codes = torch.empty((source.num_rows, hidden), dtype=torch.uint8, device=device)
    scales = torch.empty((source.num_rows, -(-hidden // GROUP_SIZE)), dtype=torch.float32, device=device)
    return codes, scales


def _address_and_stride(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.stride(0) * tensor.element_size()


def _is_aligned(tensor: Tensor | None, alignment: int) -> bool:
    return tensor is not None and all(value % alignment == 0 for value in _address_and_stride(tensor))


def _aligned(tensor: Tensor, alignment: int) -> Tensor:
    """The tensor, or a copy whose rows begin at multiples of `alignment`."""
    if tensor.numel() == 0 or _is_aligned(tensor, alignment):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
