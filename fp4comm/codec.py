"""Conversions between float tensors, MXFP4 and FP8, to the bit the same on every device.

MXFP4 holds 4-bit E2M1 codes with one power-of-two scale per 32 elements of a row; FP8 holds E4M3 codes with one scale
per 128. Tensors are `[num_rows, hidden]`, hidden a multiple of 32, and may have a row stride.

    float ---quantize_mxfp4---> MXFP4Tensor ---to_fp8----------> FP8Tensor    forward and dgrad GEMMs
                                            `--to_fp8_columns--> FP8Columns   wgrad GEMM

Both FP8 results hold the same numbers, and exactly those of the MXFP4 tensor, as long as the scales of a tile (128
elements of a row, or 128 rows of a column) are within a factor of 2**14.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backends import Rows, backend_for
from .errors import is_count, require
from .formats import BLOCK_SIZE, GROUP_SIZE, ROW_TILE, Kind
from .formats import scale_mode as parse_scale_mode
from .memory import empty

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RowCounts = Sequence[int] | Tensor  # of each group; for a tensor on a GPU the host must wait


@dataclass(frozen=True, eq=False)
class MXFP4Tensor:
    """Rows of E2M1 numbers with an E8M0 scale per block of 32.

    Attributes:
        packed: uint8 `[num_rows, hidden // 2]`, two codes per byte, the even element in the low nibble.
        scales: uint8 `[num_rows, hidden // 32]`; byte b means `2**(b - 127)`, 255 a block of NaN, 0 any block of zeros.

    Raises:
        InvalidArgument: on construction, for a wrong dtype, shape, stride or device.
    """

    packed: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        _check_matrix("packed", self.packed, torch.uint8)
        _check_hidden("packed", self.hidden)
        _check_adjacent("packed", self.packed)
        _check_scales(self.packed, self.scales, torch.uint8, self.hidden // BLOCK_SIZE, "hidden / 32")

    @property
    def hidden(self) -> int:
        """Numbers in a row."""
        return 2 * self.packed.shape[1]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.packed.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: 4.25 bits per number."""
        return self.packed.nbytes + self.scales.nbytes

    @property
    def _rows(self) -> Rows:
        return Rows(Kind.MXFP4, self.packed, self.scales)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, *, hadamard: bool = False, seed: int = 0) -> Tensor:
        """The numbers as a float tensor `[num_rows, hidden]`.

        Args:
            dtype: float32, bfloat16 or float16; rounds to nearest even where the number does not fit.
            hadamard: undo the transform that `quantize_mxfp4(hadamard=True)` made with the same seed.
            seed: of that transform.
        """
        require(dtype in FLOAT_DTYPES, "dtype", dtype, "torch.float32, torch.bfloat16 or torch.float16")
        x = empty((self.num_rows, self.hidden), dtype, self.packed.device)
        backend = backend_for(x)
        options = backend.options("even", False, hadamard, _seed(seed), 0)
        backend.convert_rows(self._rows, Rows.of(x), options=options)
        return x

    def to_fp8(self) -> FP8Tensor:
        """FP8 with one scale per 1x128, by shifting exponents: exact if the four scales are within a factor of 2**14.

        DeepGEMM (`fp8_gemm_nt`, `m_grouped_fp8_gemm_nt_contiguous`) and torch (`torch.nn.functional.scaled_mm` with
        BlockWise1x128) take it as a left operand on SM90; both want the scales with stride (1, num_rows):
        `scales.t().contiguous().t()`. TransformerEngine's blockwise FP8 holds row-wise data so.
        """
        y = FP8Tensor.empty(self.num_rows, self.hidden, self.packed.device)
        backend_for(self.packed).convert_rows(self._rows, y._rows)
        return y

    def to_fp8_columns(self, num_rows_per_expert: RowCounts | None = None, rows: Tensor | None = None) -> FP8Columns:
        """FP8 with one scale per 128x1, transposed per expert; dequantizes to the same numbers as `to_fp8`.

        Args:
            num_rows_per_expert: how the rows divide into consecutive groups; None = a single group.
            rows: int64, which rows of this tensor to take in which order, -1 = zeros; None = all as they are. A
                received payload becomes the experts' columns with `Received.source_rows`; rows beyond the groups, which
                a fixed capacity leaves, are not taken. Not checked on a GPU, where that would mean to wait for it.

        Returns:
            The layout that wgrad GEMMs take, see `FP8Columns`.
        """
        rows, sizes = self._groups(num_rows_per_expert, rows)
        data, scales = backend_for(self.packed).fp8_columns(self._rows, rows, sizes)
        return FP8Columns(data, scales, sizes)

    def to_fp8_rows_and_columns(
        self, num_rows_per_expert: RowCounts | None = None, rows: Tensor | None = None
    ) -> tuple[FP8Tensor, FP8Columns]:
        """`to_fp8` and `to_fp8_columns` of the same rows at once; on a GPU from a single read."""
        rows, sizes = self._groups(num_rows_per_expert, rows)
        data, scales, *columns = backend_for(self.packed).fp8_rows_and_columns(self._rows, rows, sizes)
        return FP8Tensor(data, scales), FP8Columns(columns[0], columns[1], sizes)

    def _groups(
        self, num_rows_per_expert: RowCounts | None, rows: Tensor | None
    ) -> tuple[Tensor | None, tuple[int, ...]]:
        if rows is None:
            return None, _group_sizes(num_rows_per_expert, self.num_rows)
        rows = _row_map(rows, self.num_rows, self.packed.device)
        sizes = None if num_rows_per_expert is None else _row_counts(num_rows_per_expert)
        rows = rows if sizes is None else rows[: sum(sizes)]
        return rows, _group_sizes(sizes, len(rows))

    def to_mxfp4_columns(self, num_rows_per_expert: RowCounts | None = None, scale_mode: str = "even") -> MXFP4Columns:
        """MXFP4 with one scale per 32 rows of a column, by dequantizing and quantizing anew: this one loses precision.

        Args:
            num_rows_per_expert: how the rows divide into consecutive groups; None = a single group.
            scale_mode: as in `quantize_mxfp4`.
        """
        sizes = _group_sizes(num_rows_per_expert, self.num_rows)
        backend = backend_for(self.packed)
        options = backend.options(parse_scale_mode(scale_mode).name.lower(), False, False, 0, 0)
        packed, scales = backend.mxfp4_columns(self._rows, None, sizes, options=options)
        return MXFP4Columns(packed, scales, sizes, self.hidden)


@dataclass(frozen=True, eq=False)
class FP8Tensor:
    """Rows of E4M3 numbers with a float32 scale per group of 128: `number = data * scale`, rounded to float32.

    Attributes:
        data: float8_e4m3fn `[num_rows, hidden]`.
        scales: float32 `[num_rows, ceil(hidden / 128)]`. Ours are powers of two; others may be any float.

    Raises:
        InvalidArgument: on construction, for a wrong dtype, shape, stride or device.
    """

    data: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        _check_matrix("data", self.data, torch.float8_e4m3fn)
        _check_hidden("data", self.hidden)
        _check_adjacent("data", self.data)
        num_groups = -(-self.hidden // GROUP_SIZE)
        _check_scales(self.data, self.scales, torch.float32, num_groups, "ceil(hidden / 128)")

    @classmethod
    def empty(cls, num_rows: int, hidden: int, device: torch.device | str | None = None) -> FP8Tensor:
        """Uninitialised memory for `num_rows` rows."""
        data = empty((num_rows, hidden), torch.float8_e4m3fn, device)
        scales = empty((num_rows, -(-hidden // GROUP_SIZE)), torch.float32, device)
        return cls(data, scales)

    @property
    def hidden(self) -> int:
        """Numbers in a row."""
        return self.data.shape[1]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: 8.25 bits per number."""
        return self.data.nbytes + self.scales.nbytes

    @property
    def _rows(self) -> Rows:
        return Rows(Kind.FP8, self.data, self.scales)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The numbers as float32, bfloat16 or float16 `[num_rows, hidden]`, rounded to nearest even."""
        require(dtype in FLOAT_DTYPES, "dtype", dtype, "torch.float32, torch.bfloat16 or torch.float16")
        x = empty((self.num_rows, self.hidden), dtype, self.data.device)
        backend_for(x).convert_rows(self._rows, Rows.of(x))
        return x

    def to_columns(self, num_rows_per_expert: RowCounts | None = None) -> FP8Columns:
        """FP8 with one scale per 128x1, transposed per expert, by shifting exponents.

        Numbers change only where they fall below the normal range of their tile of 128 x 128 (nearest even there).

        Args:
            num_rows_per_expert: how the rows divide into consecutive groups; None = a single group.

        Raises:
            InvalidArgument: a scale is not a positive normal power of two.
        """
        sizes = _group_sizes(num_rows_per_expert, self.num_rows)
        backend = backend_for(self.data)
        if self.scales.device.type == "cpu":  # on a GPU the conversion itself finds out
            _check_powers_of_two(self.scales)
        data, scales = backend.fp8_columns(self._rows, None, sizes)
        return FP8Columns(data, scales, sizes)


@dataclass(frozen=True, eq=False)
class FP8Columns:
    """E4M3 numbers of groups of rows, each group transposed, with one scale per 128 rows of a column.

    This is what DeepGEMM's `k_grouped_fp8_gemm_nt_contiguous` (recipe (1, 1, 128), groups a multiple of 128 rows) takes
    as an operand. `expert(i)` fits torch's `scaled_mm` with BlockWise1x128 (rows a multiple of 16) and, where the rows
    are a multiple of 128, the column-wise half of TransformerEngine's blockwise FP8.

    Attributes:
        data: float8_e4m3fn `[hidden * num_rows]`: per group of m rows a `[hidden, m]` matrix, one after the other.
        scales: float32 `[sum of ceil(m / 128), hidden]`, powers of two; 1.0 for a tile without a number.
        num_rows_per_expert: m of every group.

    Raises:
        InvalidArgument: on construction, for a wrong dtype, shape or device.
    """

    data: Tensor
    scales: Tensor
    num_rows_per_expert: tuple[int, ...]

    def __post_init__(self) -> None:
        num_tiles = sum(-(-m // ROW_TILE) for m in self.num_rows_per_expert)
        _check_matrix("scales", self.scales, torch.float32)
        matches = len(self.scales) == num_tiles
        require(matches, "scales", f"of {len(self.scales)} rows", f"{num_tiles} rows, one per 128 rows of an expert")
        _check_flat("data", self.data, torch.float8_e4m3fn, self.hidden * self.num_rows, self.scales)

    @property
    def hidden(self) -> int:
        """Columns of the original rows."""
        return self.scales.shape[1]

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return sum(self.num_rows_per_expert)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.data.nbytes + self.scales.nbytes

    def expert(self, i: int) -> tuple[Tensor, Tensor]:
        """Views of group `i`, of m rows: data `[hidden, m]` and scales `[ceil(m / 128), hidden]`."""
        start, size = _group(self.num_rows_per_expert, i)
        tile = sum(-(-m // ROW_TILE) for m in self.num_rows_per_expert[:i])
        data = self.data[self.hidden * start : self.hidden * (start + size)].view(self.hidden, size)
        return data, self.scales[tile : tile - (-size // ROW_TILE)]

    def dequantize(self) -> Tensor:
        """The numbers in the original order, float32 `[num_rows, hidden]`."""
        groups = []
        for i, size in enumerate(self.num_rows_per_expert):
            data, scales = self.expert(i)
            groups.append(data.t().float() * scales.repeat_interleave(ROW_TILE, dim=0)[:size])
        return torch.cat(groups) if groups else self.scales.new_empty((0, self.hidden))


@dataclass(frozen=True, eq=False)
class MXFP4Columns:
    """E2M1 numbers of groups of rows, each group transposed, with one E8M0 scale per 32 rows of a column.

    No GEMM on Hopper takes it; Blackwell's block-scaled ones do after rearranging the scales.

    Attributes:
        packed: uint8, flat: per group of m rows `[hidden, 16 * n]`, n = ceil(m / 32); the even row in the low nibble.
        scales: uint8, flat: per group `[hidden, n]`.
        num_rows_per_expert: m of every group.
        hidden: columns of the original rows.

    Raises:
        InvalidArgument: on construction, for a wrong dtype, shape or device.
    """

    packed: Tensor
    scales: Tensor
    num_rows_per_expert: tuple[int, ...]
    hidden: int

    def __post_init__(self) -> None:
        num_blocks = self.hidden * sum(-(-m // BLOCK_SIZE) for m in self.num_rows_per_expert)
        _check_flat("scales", self.scales, torch.uint8, num_blocks, self.packed)
        _check_flat("packed", self.packed, torch.uint8, 16 * num_blocks, self.scales)

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return sum(self.num_rows_per_expert)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.packed.nbytes + self.scales.nbytes

    def expert(self, i: int) -> tuple[Tensor, Tensor]:
        """Views of group `i`, of m rows: packed `[hidden, 16 * n]` and scales `[hidden, n]`, n = ceil(m / 32)."""
        _, size = _group(self.num_rows_per_expert, i)
        start = self.hidden * sum(-(-m // BLOCK_SIZE) for m in self.num_rows_per_expert[:i])
        blocks = -(-size // BLOCK_SIZE)
        stop = start + self.hidden * blocks
        packed = self.packed[16 * start : 16 * stop].view(self.hidden, 16 * blocks)
        return packed, self.scales[start:stop].view(self.hidden, blocks)

    def dequantize(self) -> Tensor:
        """The numbers in the original order, float32 `[num_rows, hidden]`."""
        x = empty((self.num_rows, self.hidden), torch.float32, self.packed.device)
        start = 0
        for i, size in enumerate(self.num_rows_per_expert):
            if size:
                x[start : start + size] = MXFP4Tensor(*self.expert(i)).dequantize(torch.float32)[:, :size].t()
            start += size
        return x


def quantize_mxfp4(
    x: Tensor | FP8Tensor,
    *,
    scale_mode: str = "even",
    stochastic: bool = False,
    hadamard: bool = False,
    seed: int = 0,
) -> MXFP4Tensor:
    """Quantizes rows to MXFP4. A block with a NaN or an Inf becomes NaN; FP8 is not rounded to another float between.

    Args:
        x: float32, bfloat16 or float16 `[num_rows, hidden]`, or an `FP8Tensor`.
        scale_mode: how the scale follows from a block's largest magnitude: "even" (nearest to the optimum), "rceil"
            (never saturates; good for gradients, and what most libraries do) or "floor" (the OCP text).
        stochastic: round up or down at random, unbiased unless the block saturates (so use "rceil"), instead of to
            nearest even. The random numbers depend on seed, row and column alone.
        hadamard: apply a random 32-point Hadamard transform to every block first, which spreads outliers. Undo it with
            `dequantize(hadamard=True)`; `to_fp8` does not undo it.
        seed: 0 to 2**64 - 1, of the rounding and of the transform.

    Raises:
        InvalidArgument: an argument has the wrong type, dtype, shape or value.
        NotAvailable: there is no back end for the device of x.
    """
    mode = parse_scale_mode(scale_mode).name.lower()
    source = _source_rows(x)
    num_rows, hidden, device = len(source.data), source.hidden, source.data.device
    y = MXFP4Tensor(
        empty((num_rows, hidden // 2), torch.uint8, device),
        empty((num_rows, hidden // BLOCK_SIZE), torch.uint8, device),
    )
    backend = backend_for(source.data)
    options = backend.options(mode, bool(stochastic), bool(hadamard), _seed(seed), 0)
    backend.convert_rows(source, y._rows, options=options)
    return y


def quantize_fp8(x: Tensor) -> FP8Tensor:
    """Quantizes rows to FP8, with the smallest power of two per 128 elements as scale that avoids saturation.

    Args:
        x: float32, bfloat16 or float16 `[num_rows, hidden]`. A group with a NaN or an Inf becomes NaN.

    Raises:
        InvalidArgument: x has the wrong type, dtype or shape.
        NotAvailable: there is no back end for the device of x.
    """
    require(not isinstance(x, FP8Tensor), "x", "an FP8Tensor", "a float tensor")
    source = _source_rows(x)
    y = FP8Tensor.empty(len(source.data), source.hidden, source.data.device)
    backend_for(source.data).convert_rows(source, y._rows)
    return y


def _source_rows(x: Tensor | FP8Tensor) -> Rows:
    if isinstance(x, FP8Tensor):
        return x._rows
    _check_matrix("x", x, *FLOAT_DTYPES)
    _check_hidden("x", x.shape[1])
    return Rows.of(x)


def _check_tensor(argument: str, tensor: Any, *dtypes: torch.dtype) -> None:
    require(isinstance(tensor, Tensor), argument, f"a {type(tensor).__name__}", "a torch.Tensor")
    require(tensor.dtype in dtypes, argument, f"of dtype {tensor.dtype}", " or ".join(map(str, dtypes)))


def _check_matrix(argument: str, tensor: Any, *dtypes: torch.dtype) -> None:
    _check_tensor(argument, tensor, *dtypes)
    require(tensor.ndim == 2, argument, f"of shape {list(tensor.shape)}", "two dimensions, [num_rows, width]")


def _check_adjacent(argument: str, tensor: Tensor) -> None:
    adjacent = tensor.numel() == 0 or tensor.shape[1] == 1 or tensor.stride(1) == 1
    require(adjacent, argument, f"of strides {tensor.stride()}", "a stride of 1 between the elements of a row")


def _check_hidden(argument: str, hidden: int) -> None:
    require(hidden > 0 and hidden % BLOCK_SIZE == 0, f"hidden of {argument}", hidden, f"a multiple of {BLOCK_SIZE}")


def _check_scales(data: Tensor, scales: Any, dtype: torch.dtype, width: int, meaning: str) -> None:
    _check_matrix("scales", scales, dtype)
    _check_adjacent("scales", scales)
    shape = [data.shape[0], width]
    require(list(scales.shape) == shape, "scales", f"of shape {list(scales.shape)}", f"{shape}, [num_rows, {meaning}]")
    require(scales.device == data.device, "scales", f"on {scales.device}", f"{data.device}, where the codes are")


def _check_flat(argument: str, tensor: Any, dtype: torch.dtype, numel: int, other: Tensor) -> None:
    _check_tensor(argument, tensor, dtype)
    flat = tensor.ndim == 1 and tensor.numel() == numel and tensor.is_contiguous()
    require(flat, argument, f"of shape {list(tensor.shape)}", f"[{numel}], contiguous")
    require(tensor.device == other.device, argument, f"on {tensor.device}", f"{other.device}, where the rest is")


def _group_sizes(num_rows_per_expert: RowCounts | None, num_rows: int) -> tuple[int, ...]:
    if num_rows_per_expert is None:
        return (num_rows,)
    sizes = _row_counts(num_rows_per_expert)
    accepted = f"non-negative numbers whose sum is the number of rows, {num_rows}"
    require(sum(sizes) == num_rows, "num_rows_per_expert", list(sizes), accepted)
    return sizes


def _row_counts(num_rows_per_expert: RowCounts) -> tuple[int, ...]:
    sizes: Any = num_rows_per_expert.tolist() if isinstance(num_rows_per_expert, Tensor) else num_rows_per_expert
    sizes = list(sizes) if isinstance(sizes, Iterable) and not isinstance(sizes, str) else sizes
    is_valid = isinstance(sizes, list) and all(is_count(size, 0) for size in sizes)
    require(is_valid, "num_rows_per_expert", repr(sizes), "non-negative integers, the number of rows of each expert")
    return tuple(map(operator.index, sizes))


def _check_powers_of_two(scales: Tensor) -> None:
    is_power_of_two = (torch.frexp(scales).mantissa == 0.5) & (scales >= 2.0**-126)
    if not is_power_of_two.all():
        row, group = torch.nonzero(~is_power_of_two)[0].tolist()
        received = scales[row, group].item()
        require(False, f"scales[{row}, {group}]", received, "positive normal powers of two, as quantize_fp8 makes")


def _row_map(rows: Tensor, num_rows: int, device: torch.device) -> Tensor:
    _check_tensor("rows", rows, torch.int64)
    require(rows.ndim == 1, "rows", f"of shape {list(rows.shape)}", "one dimension")
    require(rows.device == device, "rows", f"on {rows.device}", f"{device}, where the codes are")
    if rows.numel() and device.type == "cpu":
        smallest, largest = int(rows.min()), int(rows.max())
        require(smallest >= -1 and largest < num_rows, "rows", f"{smallest} to {largest}", f"-1 to {num_rows - 1}")
    return rows.contiguous()


def _group(sizes: tuple[int, ...], i: int) -> tuple[int, int]:
    require(0 <= i < len(sizes), "expert", i, f"0 to {len(sizes) - 1}")
    return sum(sizes[:i]), sizes[i]


def _seed(seed: int) -> int:
    is_valid = is_count(seed, 0) and operator.index(seed) < 2**64
    require(is_valid, "seed", repr(seed), "an integer from 0 to 2**64 - 1")
    return operator.index(seed)
