"""Oracle of every conversion between number formats.

Arrays stand for tensors as follows: float32 arrays for float32, uint16 bit patterns for BF16 and FP16, uint8 codes for
E4M3, and for MXFP4 a pair (packed uint8 [rows, hidden // 2], scales uint8 [rows, hidden // 32]). FP8 is a pair (codes
uint8 [rows, hidden], scales float32 [rows, ceil(hidden / 128)]). In column-wise results groups of rows (one per expert)
follow one another; each is [hidden, ...] with the rows of the group innermost.

Products and sums that the formats define in float32 are done in float32; all else is exact in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .random import BLOCK, hadamard_forward, hadamard_inverse, rounding_bits

Bytes = NDArray[np.uint8]
Bits16 = NDArray[np.uint16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

GROUP = 128  # elements (row-wise) or rows (column-wise) that share an FP8 scale
NAN_SCALE = 255
NAN_E4M3 = 0x7F
CANONICAL_NAN = np.uint32(0x7FC00000).view(np.float32)


def magnitudes(exponent_bits: int, mantissa_bits: int) -> F64:
    """Values of the non-negative codes of a small IEEE-like format, as if no code meant Inf or NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = np.divmod(np.arange(2 ** (exponent_bits + mantissa_bits)), 2**mantissa_bits)
    significand = np.where(exponent == 0, mantissa, mantissa + 2**mantissa_bits).astype(np.float64)
    values: F64 = np.ldexp(significand, np.maximum(exponent, 1) - bias - mantissa_bits)
    return values


E2M1_MAGNITUDES = magnitudes(2, 1)  # 0, .5, 1, 1.5, 2, 3, 4, 6
E2M1_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
E4M3_MAGNITUDES = magnitudes(4, 3)[:NAN_E4M3]  # 0 ... 448; the last code of each sign is NaN
E4M3_VALUES = np.concatenate([E4M3_MAGNITUDES, [np.nan], -E4M3_MAGNITUDES, [np.nan]])
FP16_MAGNITUDES = magnitudes(5, 10)[:0x7C00]


def nearest_code(magnitude: F64, grid: F64) -> Bytes:
    """Index of the grid value nearest to each magnitude; a tie goes to the even index, the end of the grid saturates.

    Only comparisons with midpoints, which float64 holds exactly: nothing rounds.
    """
    midpoints = (grid[:-1] + grid[1:]) / 2
    below = np.searchsorted(midpoints, magnitude, side="left")  # the number of midpoints < magnitude
    tie = magnitude == midpoints[np.minimum(below, len(midpoints) - 1)]
    code: Bytes = (below + (tie & (below % 2 == 1))).astype(np.uint8)
    return code


def significand_and_exponent(x: F64) -> tuple[F64, Ints]:
    """`m` in [1, 2) and `a` with x = m * 2**a, for x > 0."""
    fraction, exponent = np.frexp(x)
    return 2 * fraction, exponent.astype(np.int64) - 1


def not_finite(x: F32) -> Bools:
    """Whether there is a NaN or an Inf along the last axis."""
    finite: Bools = np.asarray(np.isfinite(x))
    return np.asarray(~finite.all(axis=-1))


def canonical(x: F32) -> F32:
    """`x` with one bit pattern for all NaNs."""
    return np.where(np.isnan(x), CANONICAL_NAN, x)


# --- BF16 and FP16


def round_to_bits(x: F32, exponent_bits: int, mantissa_bits: int) -> Bits16:
    """Nearest-even rounding to a 16-bit IEEE format; overflow gives Inf, a NaN the positive quiet NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    infinity = (2**exponent_bits - 1) << mantissa_bits
    finite: F64 = np.where(np.isfinite(x), np.abs(x), 0).astype(np.float64)
    _, exponent = significand_and_exponent(finite)
    exponent = np.where(finite == 0, 1 - bias, np.maximum(exponent, 1 - bias))
    quanta = np.rint(np.ldexp(finite, mantissa_bits - exponent)).astype(np.int64)
    # A significand of 2**mantissa_bits or more carries into the exponent field by itself.
    bits = np.minimum(((exponent + bias - 1) << mantissa_bits) + quanta, infinity)
    bits = np.where(np.isinf(x), infinity, bits) | np.signbit(x).astype(np.int64) << 15
    patterns: Bits16 = np.where(np.isnan(x), infinity | 1 << (mantissa_bits - 1), bits).astype(np.uint16)
    return patterns


def round_bf16(x: F32) -> Bits16:
    """float32 to BF16 bit patterns."""
    return round_to_bits(x, 8, 7)


def widen_bf16(bits: Bits16) -> F32:
    """BF16 bit patterns to float32, NaN payloads included."""
    x: F32 = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x


def round_fp16(x: F32) -> Bits16:
    """float32 to FP16 bit patterns."""
    return round_to_bits(x, 5, 10)


def widen_fp16(bits: Bits16) -> F32:
    """FP16 bit patterns to float32; every NaN becomes the canonical one."""
    positive = np.concatenate([FP16_MAGNITUDES, [np.inf], np.full(0x3FF, np.nan)]).astype(np.float32)
    return canonical(np.concatenate([positive, -positive])[bits])


# --- MXFP4


def pack(codes: Bytes) -> Bytes:
    """[..., n] codes to [..., n // 2] bytes; the even element is the low nibble."""
    packed: Bytes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def unpack(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 2 * n] codes."""
    codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def mxfp4_exponents(amax: F64, scale_mode: str) -> Ints:
    """Exponents of the block scales for the largest magnitudes `amax` = m * 2**a; -127 for a block of zeros."""
    m, a = significand_and_exponent(amax)
    raised = {"floor": np.zeros_like(m, bool), "even": m >= 1.75, "rceil": m > 1.5}[scale_mode]
    return np.where(amax > 0, np.maximum(a - 2 + raised, -127), -127)


def stochastic_code(magnitude: F64, bits: NDArray[np.uint64]) -> Bytes:
    """Rounds down or up at random; up with probability (distance to the lower neighbour) / step, in units of 2**-16."""
    magnitude = np.minimum(magnitude, 6.0)
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0))
    fixed_point = np.trunc(magnitude / step * 2**16).astype(np.int64)
    rounded = ((fixed_point + bits.astype(np.int64)) >> 16) * step
    return np.searchsorted(E2M1_MAGNITUDES, rounded).astype(np.uint8)


def _encode_blocks(
    x: NDArray[Any], broken: Bools, scale_mode: str, bits: NDArray[np.uint64] | None = None
) -> tuple[Bytes, Bytes]:
    """Codes and scale bytes of exact numbers [..., 32]; a broken block (it held NaN or Inf) becomes a NaN block."""
    values = np.where(broken[..., None], 0, x).astype(np.float64)
    exponents = mxfp4_exponents(np.abs(values).max(axis=-1, initial=0), scale_mode)
    scaled = np.ldexp(np.abs(values), -exponents[..., None])
    codes = nearest_code(scaled, E2M1_MAGNITUDES) if bits is None else stochastic_code(scaled, bits)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(3)
    return codes, np.where(broken, NAN_SCALE, exponents + 127).astype(np.uint8)


def encode_mxfp4(
    x: F32,
    scale_mode: str = "even",
    *,
    stochastic: bool = False,
    hadamard: bool = False,
    seed: int = 0,
    stream: int = 0,
    row_index: Ints | None = None,
) -> tuple[Bytes, Bytes]:
    """float32 [rows, hidden] to MXFP4.

    Args:
        x: the numbers; an FP8 tensor comes as `decode_fp8` of it, BF16 and FP16 widened.
        scale_mode: "floor", "even" or "rceil".
        stochastic: stochastic instead of nearest-even rounding.
        hadamard: transform every block first.
        seed: of the rounding bits and of the signs of the transform.
        stream: separates rounding bits of the same seed.
        row_index: rows as the rounding bits count them; 0, 1, 2, ... if None.

    Returns:
        (packed, scales).
    """
    num_rows, hidden = x.shape
    blocks = np.asarray(x, np.float32).reshape(num_rows, hidden // BLOCK, BLOCK)
    if hadamard:
        blocks = hadamard_forward(blocks, seed)
    bits = None
    if stochastic:
        rows = np.arange(num_rows) if row_index is None else row_index
        bits = rounding_bits(rows, hidden, seed, stream).reshape(blocks.shape)
    codes, scales = _encode_blocks(blocks, not_finite(blocks), scale_mode, bits)
    return pack(codes.reshape(num_rows, hidden)), scales


def mxfp4_values(packed: Bytes, scales: Bytes) -> F64:
    """The exact numbers [rows, hidden] that MXFP4 stands for; NaN in NaN blocks."""
    values = E2M1_VALUES[unpack(packed)].reshape(*scales.shape, BLOCK)
    exact = np.ldexp(values, scales[..., None].astype(np.int64) - 127)
    return np.where(scales[..., None] == NAN_SCALE, np.nan, exact).reshape(len(packed), 2 * packed.shape[1])


def decode_mxfp4(packed: Bytes, scales: Bytes, *, hadamard: bool = False, seed: int = 0) -> F32:
    """MXFP4 to float32 [rows, hidden]. For BF16 or FP16 round the result: it is exact up to overflow."""
    with np.errstate(over="ignore"):
        x = mxfp4_values(packed, scales).astype(np.float32)
    if hadamard:
        x = hadamard_inverse(x.reshape(*scales.shape, BLOCK), seed).reshape(x.shape)
    return canonical(x)


# --- FP8


def _pad_axis(x: NDArray[Scalar], axis: int, multiple: int) -> NDArray[Scalar]:
    """Zeros (zero codes, zero blocks) appended until the length of `axis` is a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return np.pad(x, widths)


def encode_fp8(x: F32) -> tuple[Bytes, F32]:
    """float32 [rows, hidden] to E4M3 with the smallest power-of-two scale per 128 that keeps amax / scale <= 448.

    Scales stop at 2**-126. A group of zeros has scale 1; one with NaN or Inf has scale 1 and all codes NaN.
    """
    num_rows, hidden = x.shape
    scales_per_row = -(-hidden // GROUP)
    groups = _pad_axis(np.asarray(x, np.float32), 1, GROUP).reshape(num_rows, scales_per_row, GROUP)
    broken = not_finite(groups)
    values = np.where(broken[..., None], 0, groups).astype(np.float64)
    amax = np.abs(values).max(axis=-1, initial=0)
    m, a = significand_and_exponent(amax)
    exponents = np.where(amax > 0, np.maximum(a - 8 + (m > 1.75), -126), 0)  # 448 = 1.75 * 2**8
    codes = nearest_code(np.ldexp(np.abs(values), -exponents[..., None]), E4M3_MAGNITUDES)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    codes[broken] = NAN_E4M3
    codes = codes.reshape(num_rows, scales_per_row * GROUP)[:, :hidden]
    return codes, np.ldexp(1.0, exponents).astype(np.float32)


def decode_fp8(codes: Bytes, scales: F32) -> F32:
    """FP8 to float32: one rounding of code value times scale."""
    values = E4M3_VALUES[codes].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return canonical(values * np.repeat(scales, GROUP, axis=1)[:, : codes.shape[1]])


def e8m0_scales(scale_bytes: Bytes) -> F32:
    """E8M0 bytes to float32 scales, 2**-127 and NaN included."""
    is_nan = scale_bytes == NAN_SCALE
    exact = np.ldexp(1.0, np.where(is_nan, 0, scale_bytes.astype(np.int64) - 127)).astype(np.float32)
    return np.where(is_nan, CANONICAL_NAN, exact)


def is_power_of_two(scales: F32) -> Bools:
    """True for positive normal powers of two, the scales that E8M0 and an exact transposition can take."""
    result: Bools = (scales >= np.float32(2**-126)) & np.isfinite(scales) & (np.frexp(scales)[0] == 0.5)
    return result


def fp8_to_e8m0(codes: Bytes, scales: F32) -> tuple[Bytes, Bytes]:
    """FP8 with float32 scales to FP8 with E8M0 scales; groups with other scales are encoded anew."""
    new_codes, new_scales = encode_fp8(decode_fp8(codes, scales))
    keep = is_power_of_two(scales)
    keep_elements = np.repeat(keep, GROUP, axis=1)[:, : codes.shape[1]]
    _, exponents = significand_and_exponent(np.where(keep, scales, new_scales).astype(np.float64))
    return np.where(keep_elements, codes, new_codes), (exponents + 127).astype(np.uint8)


def weighted_sum(terms: F32, row_index: Ints, weights: F32 | None = None) -> F32:
    """Sums rows of `terms` [n, hidden] in order, in float32, rounding the product and the sum separately.

    Args:
        terms: the rows that can be summed.
        row_index: [num_rows, num_terms]; -1 leaves a term out.
        weights: float32 like `row_index`, or None for a plain sum.

    Returns:
        float32 [num_rows, hidden].
    """
    total = np.zeros((len(row_index), terms.shape[1]), np.float32)
    for k in range(row_index.shape[1]):
        present = np.flatnonzero(row_index[:, k] >= 0)
        with np.errstate(over="ignore", invalid="ignore"):
            term = terms[row_index[present, k]]
            if weights is not None:
                term = weights[present, k, None] * term
            total[present] = total[present] + term
    return canonical(total)


def dot_products(a: F32, b: F32) -> F32:
    """Dot products of rows [n, hidden] in float32, every product and sum rounded.

    Column j adds to lane j % 32, in order; then lane j adds lane j + half, for half = 16, 8, 4, 2, 1.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        products = (a * b).reshape(len(a), a.shape[1] // 32, 32)
        lanes = np.zeros((len(a), 32), np.float32)
        for i in range(products.shape[1]):
            lanes = lanes + products[:, i]
        for half in (16, 8, 4, 2, 1):
            lanes = lanes[:, :half] + lanes[:, half:]
    return canonical(lanes[:, 0])


# --- MXFP4 -> FP8: several blocks get one scale by shifting, not by measuring


def _shift_blocks(codes: Bytes, scales: Bytes) -> tuple[Bytes, Ints]:
    """Gives the blocks of a tile, codes [..., blocks, 32] and scales [..., blocks], one FP8 scale.

    The largest exponent is anchored so that its code 6 becomes 384: up to 14 binades below it all values stay exact.

    Returns:
        E4M3 codes shaped like `codes`, and the exponents [...] of the scales.
    """
    is_nan = scales == NAN_SCALE
    largest = np.where(is_nan, 0, scales).max(axis=-1, initial=0).astype(np.int64)
    nonzero = ((codes % 8 != 0) & ~is_nan[..., None]).any(axis=(-2, -1))
    scale_byte = np.where((largest == 0) & ~nonzero, 127, np.maximum(largest - 6, 1))
    shift = scales.astype(np.int64) - scale_byte[..., None]
    shifted = np.ldexp(E2M1_MAGNITUDES[codes % 8], shift[..., None])
    e4m3 = nearest_code(shifted, E4M3_MAGNITUDES) | (codes >> np.uint8(3)) << np.uint8(7)
    return np.where(is_nan[..., None], np.uint8(NAN_E4M3), e4m3), scale_byte - 127


def mxfp4_to_fp8(packed: Bytes, scales: Bytes) -> tuple[Bytes, F32]:
    """MXFP4 to row-wise FP8 (1x128)."""
    num_rows, num_blocks = scales.shape
    blocks = _pad_axis(unpack(packed).reshape(num_rows, num_blocks, BLOCK), 1, 4)
    tiles = blocks.reshape(num_rows, -(-num_blocks // 4), 4, BLOCK)
    codes, exponents = _shift_blocks(tiles, _pad_axis(scales, 1, 4).reshape(tiles.shape[:-1]))
    codes = codes.reshape(num_rows, tiles.shape[1] * GROUP)[:, : num_blocks * BLOCK]
    return codes, np.ldexp(1.0, exponents).astype(np.float32)


# --- column-wise results


def take_rows(x: NDArray[Scalar], row_index: Ints) -> NDArray[Scalar]:
    """Rows of `x`; -1 is a row of zero bytes: a zero block with scale byte 0, an E4M3 zero."""
    return np.where((row_index >= 0)[:, None], x[np.maximum(row_index, 0)], np.zeros((), x.dtype))


def row_groups(num_rows: int, group_sizes: Sequence[int] | None) -> Iterator[slice]:
    """The rows of each group; one group of all rows if `group_sizes` is None."""
    start = 0
    for size in [num_rows] if group_sizes is None else group_sizes:
        yield slice(start, start + size)
        start += size


def _join(data: list[Bytes], scales: list[F64], hidden: int) -> tuple[Bytes, F32]:
    """Flat data and stacked [tiles, hidden] scales of all groups."""
    flat = np.concatenate([np.zeros(0, np.uint8), *(part.ravel() for part in data)])
    return flat, np.concatenate([np.zeros((0, hidden)), *scales]).astype(np.float32)


def mxfp4_to_fp8_columns(packed: Bytes, scales: Bytes, group_sizes: Sequence[int] | None = None) -> tuple[Bytes, F32]:
    """MXFP4 to column-wise FP8 (128x1): a tile of 128 rows x 32 columns shares a scale.

    Returns:
        codes, flat: per group of m rows a [hidden, m] matrix; scales float32 [sum of ceil(m / 128), hidden].
    """
    num_rows, num_blocks = scales.shape
    data, tile_scales = [], []
    for rows in row_groups(num_rows, group_sizes):
        codes = _pad_axis(unpack(packed[rows]).reshape(-1, num_blocks, BLOCK), 0, GROUP)
        tiles = codes.reshape(-1, GROUP, num_blocks, BLOCK).swapaxes(1, 2)
        block_scales = _pad_axis(scales[rows], 0, GROUP).reshape(-1, GROUP, num_blocks).swapaxes(1, 2)
        e4m3, exponents = _shift_blocks(tiles, block_scales)
        columns = e4m3.transpose(1, 3, 0, 2).reshape(num_blocks * BLOCK, -1)
        data.append(columns[:, : rows.stop - rows.start])
        tile_scales.append(np.repeat(np.ldexp(1.0, exponents), BLOCK, axis=1))
    return _join(data, tile_scales, num_blocks * BLOCK)


def fp8_to_fp8_columns(codes: Bytes, scales: F32, group_sizes: Sequence[int] | None = None) -> tuple[Bytes, F32]:
    """Row-wise FP8 with power-of-two scales to column-wise FP8: a tile of 128 x 128 takes its largest scale.

    Layout of the result as in `mxfp4_to_fp8_columns`. Raises ValueError for other scales.
    """
    if not is_power_of_two(scales).all():
        raise ValueError("every scale must be a positive normal power of two")
    num_rows, hidden = codes.shape
    num_groups = scales.shape[1]
    data, tile_scales = [], []
    for rows in row_groups(num_rows, group_sizes):
        padded: Bytes = _pad_axis(_pad_axis(codes[rows], 0, GROUP), 1, GROUP)
        tiles = padded.reshape(-1, GROUP, num_groups, GROUP)
        padded_scales = _pad_axis(scales[rows], 0, GROUP)
        exponents = significand_and_exponent(padded_scales.astype(np.float64))[1].reshape(-1, GROUP, num_groups)
        magnitude = tiles & np.uint8(0x7F)
        counts: Bools = np.any((magnitude > 0) & (magnitude < NAN_E4M3), axis=-1)
        target = np.where(counts, exponents, np.int64(-1000)).max(axis=1)
        target = np.where(counts.any(axis=1), target, 0)
        values = np.abs(E4M3_VALUES[tiles])
        shifted = np.ldexp(values, np.where(counts, exponents - target[:, None, :], 0)[..., None])
        rounded = nearest_code(shifted, E4M3_MAGNITUDES) | tiles & np.uint8(0x80)
        result = np.where(magnitude == NAN_E4M3, tiles, rounded).reshape(-1, num_groups * GROUP)
        data.append(result[: rows.stop - rows.start, :hidden].T)
        tile_scales.append(np.repeat(np.ldexp(1.0, target), GROUP, axis=1)[:, :hidden])
    return _join(data, tile_scales, hidden)


def fp8_columns_values(codes: Bytes, scales: F32, hidden: int, group_sizes: Sequence[int] | None = None) -> F32:
    """The numbers [rows, hidden] of column-wise FP8."""
    num_rows = len(codes) // hidden
    x = np.zeros((num_rows, hidden), np.float32)
    tile = 0
    for rows in row_groups(num_rows, group_sizes):
        size = rows.stop - rows.start
        columns = codes[rows.start * hidden : rows.stop * hidden].reshape(hidden, size)
        num_tiles = -(-size // GROUP)
        x[rows] = decode_fp8(columns, np.ascontiguousarray(scales[tile : tile + num_tiles].T)).T
        tile += num_tiles
    return x


def mxfp4_to_mxfp4_columns(
    packed: Bytes, scales: Bytes, group_sizes: Sequence[int] | None = None, scale_mode: str = "even"
) -> tuple[Bytes, Bytes]:
    """Row-wise to column-wise MXFP4, by encoding the exact values anew in blocks of 32 rows of a column.

    Returns:
        per group of m rows packed [hidden, 16 * n] and scales [hidden, n], n = ceil(m / 32); both flat.
    """
    x = mxfp4_values(packed, scales)
    hidden = x.shape[1]
    all_packed, all_scales = [np.zeros(0, np.uint8)], [np.zeros(0, np.uint8)]
    for rows in row_groups(len(x), group_sizes):
        columns = _pad_axis(x[rows].T, 1, BLOCK)
        blocks = columns.reshape(hidden, -1, BLOCK)
        codes, block_scales = _encode_blocks(blocks, np.isnan(blocks).any(axis=-1), scale_mode)
        all_packed.append(pack(codes).ravel())
        all_scales.append(block_scales.ravel())
    return np.concatenate(all_packed), np.concatenate(all_scales)


def mxfp4_columns_values(packed: Bytes, scales: Bytes, hidden: int, group_sizes: Sequence[int]) -> F32:
    """The numbers [rows, hidden] of column-wise MXFP4."""
    x = np.zeros((sum(group_sizes), hidden), np.float32)
    start = 0
    for rows in row_groups(len(x), group_sizes):
        size = rows.stop - rows.start
        stop = start + hidden * -(-size // BLOCK)
        values = decode_mxfp4(
            packed[16 * start : 16 * stop].reshape(hidden, -1), scales[start:stop].reshape(hidden, -1)
        )
        x[rows] = values[:, :size].T
        start = stop
    return x
