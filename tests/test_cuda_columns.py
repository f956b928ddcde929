"""Column kernels, on a GPU and in the emulator: the bits of the CPU backend and of the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cuda_targets import Run, Target, assert_same
from numerics import RAGGED_GROUPS, SCALE_MODES, assert_same_bits, from_bits, hard_fp8, hard_mxfp4
from numpy.typing import NDArray
from torch import Tensor

from fp4comm.backends import Rows
from fp4comm.errors import InvalidArgument
from fp4comm.formats import Kind
from fp4comm.reference import codec as oracle

RNG = np.random.default_rng
ALL_CODES = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)
KINDS = (Kind.MXFP4, Kind.FP8, Kind.FP8_E8M0)
# Hidden sizes below, at and above a group and a tile of a block of threads; on a GPU also those of models.
HIDDENS = (32, 288)
LARGE_HIDDENS = (32, 288, 2048, 7168)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def arrays_of(kind: Kind, rng: np.random.Generator, num_rows: int, hidden: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Hard rows that can become column-wise."""
    if kind == Kind.MXFP4:
        return hard_mxfp4(rng, num_rows, hidden, spread=int(rng.choice([0, 6, 30])))
    codes, scales = hard_fp8(rng, num_rows, hidden, power_of_two=True)
    return (codes, scales) if kind == Kind.FP8 else oracle.fp8_to_e8m0(codes, scales)


def columns(target: Target, src: Rows, rows: Tensor | None, sizes: Sequence[int]) -> list[Tensor]:
    """What all column functions for the kind give."""
    out = list(target.backend.fp8_columns(src, rows, sizes))
    if src.kind == Kind.MXFP4:
        for mode in SCALE_MODES:
            out += target.backend.mxfp4_columns(src, rows, sizes, target.backend.options(mode))
        out += target.backend.fp8_rows_and_columns(src, rows, sizes)
    return out


def conversion(
    kind: Kind,
    arrays: Sequence[NDArray[Any]],
    rows: NDArray[np.int64] | None,
    sizes: Sequence[int],
    gap: int | None = None,
    start: int = 0,
) -> Run:
    """`columns` of rows that lie somewhere."""

    def run(t: Target) -> list[Tensor]:
        return columns(t, t.rows(kind, arrays, gap, start), None if rows is None else t.tensor(rows), sizes)

    return run


@kinds
def test_ragged_groups(target: Target, kind: Kind) -> None:
    """Rows in order, and picked, repeated and left out (-1, a row of zeros) by a map, as an exchange does."""
    num_rows = sum(RAGGED_GROUPS)
    for hidden in target.pick(HIDDENS, LARGE_HIDDENS):
        rng = RNG(hidden + kind)
        arrays = arrays_of(kind, rng, num_rows, hidden)
        few = arrays_of(kind, rng, 200, hidden)
        rows = rng.integers(-1, 200, num_rows)
        rows[300:430] = -1
        assert_same(target, conversion(kind, arrays, None, RAGGED_GROUPS), f"hidden {hidden}")
        assert_same(target, conversion(kind, few, rows, RAGGED_GROUPS), f"hidden {hidden} with a map")


@kinds
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (1,), (31,), (32, 33), (257,), (128, 128)], ids=str)
def test_sizes_of_groups(target: Target, kind: Kind, sizes: tuple[int, ...]) -> None:
    arrays = arrays_of(kind, RNG(1), sum(sizes), 96)
    assert_same(target, lambda t: columns(t, t.rows(kind, arrays), None, sizes))


@kinds
def test_any_address_and_stride(target: Target, kind: Kind) -> None:
    """Rows at odd addresses between other bytes, such as a user's views."""
    sizes = (37, 0, 128)
    rows = RNG(2).integers(-1, 165, 165)
    arrays = arrays_of(kind, RNG(3), 165, 160)
    for gap, start in ((4, 4), (32, 16), (0, 0), (12, 20)) + (() if kind == Kind.FP8 else ((1, 3), (33, 1))):
        for given in (None, rows):
            assert_same(target, conversion(kind, arrays, given, sizes, gap, start), f"gap {gap}, start {start}")


@kinds
def test_many_rows(target: Target, kind: Kind) -> None:
    """More tiles than blocks that are resident at once."""
    sizes = target.pick((500, 129, 771), (5000, 129, 20000, 0, 7001))
    arrays = arrays_of(kind, RNG(4), sum(sizes), target.pick(64, 2048))
    assert_same(target, lambda t: columns(t, t.rows(kind, arrays), None, sizes))


@kinds
def test_oracle(target: Target, kind: Kind) -> None:
    arrays = arrays_of(kind, RNG(5), sum(RAGGED_GROUPS), 160)
    data, scales = target.backend.fp8_columns(target.rows(kind, arrays), None, RAGGED_GROUPS)
    if kind == Kind.MXFP4:
        expected = oracle.mxfp4_to_fp8_columns(arrays[0], arrays[1], RAGGED_GROUPS)
        packed, bytes_ = target.backend.mxfp4_columns(target.rows(kind, arrays), None, RAGGED_GROUPS)
        both = oracle.mxfp4_to_mxfp4_columns(arrays[0], arrays[1], RAGGED_GROUPS)
        assert_same_bits(bytes_, both[1], "MXFP4 scales")
        assert_same_bits(packed, both[0], "MXFP4 data")
    else:
        codes, given = arrays
        factors = oracle.e8m0_scales(given) if kind == Kind.FP8_E8M0 else given
        expected = oracle.fp8_to_fp8_columns(codes, factors, RAGGED_GROUPS)
    assert data.dtype == torch.float8_e4m3fn
    assert_same_bits(scales, expected[1], "scales")
    assert_same_bits(data, expected[0], "data")


def test_every_exponent_difference(target: Target) -> None:
    """One tile per anchor and difference: the shift of every code by every number of binades."""
    anchors, below = (6, 7, 8, 60, 254), range(40)
    packed = np.tile(ALL_CODES, (128 * len(anchors) * len(below), 2))
    scales = np.empty((len(anchors) * len(below), 128, 1), np.uint8)
    for tile, (anchor, d) in enumerate(product(anchors, below)):
        scales[tile] = max(anchor - d, 0)
        scales[tile, tile % 128] = anchor
    expected = oracle.mxfp4_to_fp8_columns(packed, scales.reshape(-1, 1))
    src = target.rows(Kind.MXFP4, (packed, scales.reshape(-1, 1)))
    data, factors = target.backend.fp8_columns(src, None, (len(packed),))
    assert_same_bits(factors, expected[1], "scales")
    assert_same_bits(data, expected[0], "data")


def test_every_fp8_code_and_shift(target: Target) -> None:
    """Tiles of all 256 codes, one row at the largest scale and the rest d binades below it."""
    shifts = range(26)
    codes = np.resize(np.arange(256, dtype=np.uint8), (128 * len(shifts), 256))
    scales = np.ldexp(1.0, 3 - np.repeat(shifts, 128))[:, None].repeat(2, axis=1).astype(np.float32)
    scales[::128] = 8
    for bias in (2.0**-100, 1.0, 2.0**124):
        factors = (scales * bias).astype(np.float32)
        expected = oracle.fp8_to_fp8_columns(codes, factors)
        for kind, given in ((Kind.FP8, factors), (Kind.FP8_E8M0, oracle.fp8_to_e8m0(codes, factors)[1])):
            data, tile_scales = target.backend.fp8_columns(target.rows(kind, (codes, given)), None, (len(codes),))
            assert_same_bits(tile_scales, expected[1], f"{kind.name} scales")
            assert_same_bits(data, expected[0], f"{kind.name} data")


def test_every_exponent_and_largest_code_as_mxfp4(target: Target) -> None:
    """A column whose largest number is any code under any byte, the ends of the range included, beside others."""
    rng = RNG(6)
    blocks = list(product(range(0, 255, target.pick(5, 1)), range(1, 8)))
    codes = np.zeros((len(blocks), 32, 32), np.uint8)
    scales = np.empty((len(blocks), 32, 1), np.uint8)
    for i, (byte, code) in enumerate(blocks):
        codes[i] = rng.integers(0, code + 1, (32, 32)) | rng.integers(0, 2, (32, 32)) << 3
        codes[i, i % 32] = code
        scales[i] = np.maximum(byte - rng.integers(0, 6, (32, 1)), 0)
        scales[i, i % 32] = byte
    packed = oracle.pack(codes.reshape(-1, 32))
    assert_same(target, lambda t: columns(t, t.rows(Kind.MXFP4, (packed, scales.reshape(-1, 1))), None, (len(packed),)))


@pytest.mark.parametrize("bits", [0, 0x00400000, 0x3FC00000, 0x3F800001, 0x7F800000, 0x7FC00000, 0xBF800000])
def test_scales_that_are_no_powers_of_two(target: Target, bits: int) -> None:
    """Also in a group of zeros; without a row that has one, all is well."""
    codes, scales = hard_fp8(RNG(7), 200, 160, power_of_two=True)
    codes[150, 128:] = 0
    good = target.rows(Kind.FP8, (codes, scales))
    scales[[3, 150], [0, 1]] = from_bits([bits])
    bad = target.rows(Kind.FP8, (codes, scales))
    with pytest.raises(InvalidArgument, match=r"2 .*not positive normal powers of two"):
        target.backend.fp8_columns(bad, None, (129, 71))
    target.backend.fp8_columns(good, None, (129, 71))
    others = target.tensor(np.setdiff1d(np.arange(200), [3, 150]))
    one, other = (target.backend.fp8_columns(src, others, (198,)) for src in (bad, good))
    assert_same_bits(one[0], other[0])
    assert_same_bits(one[1], other[1])


def test_rows_and_columns_are_the_two_conversions(target: Target) -> None:
    sizes = (129, 0, 200)
    arrays = hard_mxfp4(RNG(8), sum(sizes), 160, 30)
    codes, scales = oracle.mxfp4_to_fp8(*arrays)
    expected = oracle.mxfp4_to_fp8_columns(*arrays, sizes)
    out = target.backend.fp8_rows_and_columns(target.rows(Kind.MXFP4, arrays), None, sizes)
    for what, got, want in zip(
        ("row codes", "row scales", "column codes", "column scales"), out, (codes, scales, *expected), strict=True
    ):
        assert_same_bits(got, want, what)
