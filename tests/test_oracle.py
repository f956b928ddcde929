"""The oracle against hand-written tables, other libraries and scalar brute force."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numerics import (
    SCALE_MODES,
    all_16_bits,
    assert_same_bits,
    bf16_tensor,
    e2m1_ties,
    e4m3_ties,
    from_bits,
    hard_floats,
    hard_fp8,
    hard_mxfp4,
    scale_thresholds,
)
from numpy.typing import NDArray

from fp4comm.reference import codec as oracle
from fp4comm.reference import random as philox

RNG = np.random.default_rng


def one_block(amax: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, 32] blocks of zeros that begin with `amax`."""
    x = np.zeros((len(amax), 32), np.float32)
    x[:, 0] = amax
    return x


class TestTables:
    def test_e2m1(self) -> None:
        assert oracle.E2M1_MAGNITUDES.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        witness = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        assert_same_bits(oracle.E2M1_VALUES.astype(np.float32), witness)

    def test_e4m3(self) -> None:
        witness = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert_same_bits(oracle.canonical(oracle.E4M3_VALUES.astype(np.float32)), oracle.canonical(witness))
        assert oracle.E4M3_MAGNITUDES.max() == 448
        assert np.isnan(oracle.E4M3_VALUES).sum() == 2

    def test_nibble_order(self) -> None:
        assert oracle.pack(np.array([[1, 2, 15, 8]], np.uint8)).tolist() == [[0x21, 0x8F]]
        every_byte = np.arange(256, dtype=np.uint8)[None]
        assert_same_bits(oracle.pack(oracle.unpack(every_byte)), every_byte)


class TestNearest:
    def test_e2m1_ties_by_hand(self) -> None:
        ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        expected = [0, 1, 1, 2, 2, 4, 4]
        codes = oracle.nearest_code(ties, oracle.E2M1_MAGNITUDES)
        assert oracle.E2M1_MAGNITUDES[codes].tolist() == expected
        assert oracle.nearest_code(np.array([6, 7, 1e300]), oracle.E2M1_MAGNITUDES).tolist() == [7, 7, 7]

    def test_e2m1_formula_on_all_bf16(self) -> None:
        v = np.abs(oracle.widen_bf16(all_16_bits()))
        v = v[np.isfinite(v)].astype(np.float64)
        formula = np.minimum(np.rint(np.minimum(np.minimum(2 * v, v + 2), v / 2 + 4)), 7)
        np.testing.assert_array_equal(oracle.nearest_code(v, oracle.E2M1_MAGNITUDES), formula)

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
    def test_e2m1_ml_dtypes(self, dtype: type) -> None:
        x = e2m1_ties() if dtype is np.float32 else all_16_bits().view(dtype).astype(np.float32)
        x = np.abs(x[np.isfinite(x)])
        witness = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 7
        assert_same_bits(oracle.nearest_code(x.astype(np.float64), oracle.E2M1_MAGNITUDES), witness)

    def test_e4m3_ml_dtypes(self) -> None:
        half = all_16_bits().view(np.float16).astype(np.float32)
        x = np.concatenate([np.abs(half), e4m3_ties(), np.abs(RNG(0).standard_normal(100_000)).astype(np.float32)])
        x = x[x <= 448]
        witness = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert_same_bits(oracle.nearest_code(x.astype(np.float64), oracle.E4M3_MAGNITUDES), witness)


class TestHalfPrecision:
    def test_bf16_rounding(self) -> None:
        low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        x = from_bits(np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16) | low)
        with np.errstate(invalid="ignore"):
            witness = np.where(np.isnan(x), 0x7FC0, x.astype(ml_dtypes.bfloat16).view(np.uint16))
        assert_same_bits(oracle.round_bf16(x), witness.astype(np.uint16))

    def test_fp16_rounding(self) -> None:
        low = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
        x = from_bits(np.arange(1 << 19, dtype=np.uint32)[::2, None] << np.uint32(13) | low)
        x = np.concatenate([x.ravel(), from_bits(RNG(0).integers(0x33000000, 0x39000000, 100_000))])
        with np.errstate(over="ignore", invalid="ignore"):
            witness = np.where(np.isnan(x), 0x7E00, x.astype(np.float16).view(np.uint16))
        assert_same_bits(oracle.round_fp16(x), witness.astype(np.uint16))

    def test_widening(self) -> None:
        bits = all_16_bits()
        assert_same_bits(oracle.widen_bf16(bits), bf16_tensor(bits).float())
        witness = oracle.canonical(bits.view(np.float16).astype(np.float32))
        assert_same_bits(oracle.widen_fp16(bits), witness)


class TestMXFP4:
    @pytest.mark.parametrize("scale_mode, add", [("floor", 0), ("even", 0x200000), ("rceil", 0x3FFFFF)])
    def test_scale_is_an_add_and_a_shift(self, scale_mode: str, add: int) -> None:
        everything = np.abs(oracle.widen_bf16(all_16_bits()))
        random = from_bits(RNG(1).integers(0, 0x7F800000, 200_000))
        amax = np.concatenate([everything[np.isfinite(everything)], scale_thresholds(), random])
        formula = np.maximum((amax.view(np.uint32).astype(np.int64) + add >> 23) - 2, 0)
        np.testing.assert_array_equal(oracle.mxfp4_exponents(amax.astype(np.float64), scale_mode) + 127, formula)

    def test_scale_modes_by_hand(self) -> None:
        amax = np.array([4, 5, 6, 6.0000005, 6.9999995, 7, 7.9999995, 8], np.float32)
        for scale_mode, expected in (
            ("floor", [127] * 7 + [128]),
            ("even", [127] * 5 + [128] * 3),
            ("rceil", [127] * 3 + [128] * 5),
        ):
            assert oracle.encode_mxfp4(one_block(amax), scale_mode)[1].ravel().tolist() == expected

    def test_special_blocks(self) -> None:
        x = one_block(from_bits([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1]))
        x[2:6, 1:] = -1
        packed, scales = oracle.encode_mxfp4(x)
        assert scales.ravel().tolist() == [0, 0, 255, 255, 255, 255, 0]
        assert packed[:, 0].tolist() == [0, 8, 0, 0, 0, 0, 0]
        assert not packed[2:6].any()
        decoded = oracle.decode_mxfp4(packed, scales)
        assert_same_bits(decoded[2:6], np.full((4, 32), oracle.CANONICAL_NAN))
        assert np.signbit(decoded[1, 0])

    @pytest.mark.parametrize("scale_mode", SCALE_MODES)
    def test_encode_against_fractions(self, scale_mode: str) -> None:
        """Nearest value by exact rational search, the tie by the parity of the code."""
        x = hard_floats(RNG(2), 40, 32)
        packed, scales = oracle.encode_mxfp4(x, scale_mode)
        codes = oracle.unpack(packed)
        grid = [Fraction(v) for v in oracle.E2M1_MAGNITUDES]
        for i in np.flatnonzero(scales[:, 0] != 255):
            scale = Fraction(2) ** (int(scales[i, 0]) - 127)
            for value, code in zip(x[i], codes[i], strict=True):
                scaled = min(abs(Fraction(float(value))) / scale, Fraction(6))
                best = min(range(8), key=lambda c: (abs(grid[c] - scaled), c % 2))
                assert code == best + 8 * int(np.signbit(value))

    def test_decode_exponents(self) -> None:
        packed, scales = np.full((256, 16), 0x71, np.uint8), np.arange(256, dtype=np.uint8)[:, None]
        exact = oracle.mxfp4_values(packed, scales)
        for b in range(255):
            assert exact[b, :2].tolist() == [0.5 * 2.0 ** (b - 127), 6 * 2.0 ** (b - 127)]
        decoded = oracle.decode_mxfp4(packed, scales)
        assert decoded[252, 1] == 6 * 2.0**125
        assert np.isinf(decoded[253:255, 1]).all()
        assert np.isnan(decoded[255]).all()


class TestFP8:
    def test_scale_is_the_smallest_that_fits(self) -> None:
        amax = scale_thresholds()
        x = np.zeros((len(amax), 128), np.float32)
        x[:, 5] = -amax
        codes, scales = oracle.encode_fp8(x)
        s = scales[:, 0].astype(np.float64)
        assert (amax / s <= 448).all()
        assert ((amax / (s / 2) > 448) | (s == 2.0**-126)).all()
        formula = np.maximum((amax.view(np.uint32).astype(np.int64) + 0x1FFFFF >> 23) - 8, 1)
        np.testing.assert_array_equal(s, np.ldexp(1.0, formula - 127))
        witness = (x / scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert_same_bits(codes, witness)

    def test_special_groups(self) -> None:
        x = np.zeros((3, 160), np.float32)
        x[0, 3] = -0.0
        x[1, 128] = np.inf
        x[2, 0] = 1e-45
        codes, scales = oracle.encode_fp8(x)
        assert codes[0, 3] == 0x80
        assert (codes[1, 128:] == 0x7F).all()
        assert not codes[1, :128].any()
        assert scales.tolist() == [[1, 1], [1, 1], [2.0**-126, 1]]

    def test_decode_rounds_once(self) -> None:
        codes, scales = hard_fp8(RNG(3), 50, 160, power_of_two=False)
        for i, j in RNG(4).integers(0, (50, 160), (500, 2)):
            exact = oracle.E4M3_VALUES[codes[i, j]] * float(scales[i, j // 128])  # 4 + 24 bits: exact in float64
            with np.errstate(over="ignore"):
                assert_same_bits(oracle.decode_fp8(codes, scales)[i, j], oracle.canonical(np.float32(exact)))

    def test_to_e8m0(self) -> None:
        codes = np.full((5, 32), 0x38, np.uint8)
        scales = from_bits([0x3F800000, 0x00800000, 0x3FC00000, 0x00400000, 0xBF800000])[:, None]
        new_codes, scale_bytes = oracle.fp8_to_e8m0(codes, scales)
        assert scale_bytes[:2].ravel().tolist() == [127, 1]
        assert_same_bits(new_codes[:2], codes[:2])
        decoded = oracle.decode_fp8(new_codes, oracle.e8m0_scales(scale_bytes))
        assert decoded[:, 0].tolist() == [1, 2.0**-126, 1.5, 2.0**-127, -1]
        assert np.isnan(oracle.e8m0_scales(np.array([255], np.uint8)))
        assert oracle.e8m0_scales(np.array([0, 254], np.uint8)).tolist() == [2.0**-127, 2.0**127]


class TestWeightedSum:
    def test_scalar_loop(self) -> None:
        rng = RNG(5)
        terms = hard_floats(rng, 12, 32)
        index = rng.integers(-1, 12, (20, 4))
        weights = rng.standard_normal((20, 4)).astype(np.float32)
        result = oracle.weighted_sum(terms, index, weights)
        for i in range(20):
            total = np.zeros(32, np.float32)
            for k in range(4):
                if index[i, k] >= 0:
                    with np.errstate(over="ignore", invalid="ignore"):
                        product = (weights[i, k] * terms[index[i, k]]).astype(np.float32)
                        total = (total + product).astype(np.float32)
            assert_same_bits(result[i], oracle.canonical(total))

    def test_rounds_twice(self) -> None:
        """1 + 2**-23 squared minus its rounding: a fused multiply-add would leave 2**-46."""
        x = np.float32(1 + 2.0**-23)
        terms = np.array([[-(x * x)], [x]], np.float32)
        weights = np.array([[1, x]], np.float32)
        assert oracle.weighted_sum(terms, np.array([[0, 1]]), weights).item() == 0

    def test_starts_from_positive_zero(self) -> None:
        total = oracle.weighted_sum(np.full((1, 1), -0.0, np.float32), np.array([[0]]))
        assert not np.signbit(total).any()


def test_dot_products_scalar_loop() -> None:
    a, b = RNG(12).standard_normal((2, 5, 160)).astype(np.float32)
    for x, y, result in zip(a, b, oracle.dot_products(a, b), strict=True):
        lanes = [np.float32(0)] * 32
        for j in range(160):
            lanes[j % 32] = np.float32(lanes[j % 32] + np.float32(x[j] * y[j]))
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [np.float32(lanes[j] + lanes[j + half]) for j in range(half)]
        assert_same_bits(result, lanes[0])


class TestRandom:
    @pytest.mark.parametrize(
        "counter, seed, expected",
        [
            ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            ([0xFFFFFFFF] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                0x299F31D0A4093822,
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
    )
    def test_philox_known_answers(self, counter: list[int], seed: int, expected: list[int]) -> None:
        """The vectors of the Random123 distribution."""
        assert philox.philox4x32(np.array(counter, np.uint64), seed).tolist() == expected

    def test_rounding_bits_position(self) -> None:
        rows = np.array([0, 5, 2**32 + 7])
        bits = philox.rounding_bits(rows, 96, seed=2**40 + 3, stream=9)
        for i, row in enumerate(rows.tolist()):
            for col in (0, 1, 7, 8, 63, 94, 95):
                counter = np.array([col // 8, row % 2**32, row // 2**32, 9], np.uint64)
                word = int(philox.philox4x32(counter, 2**40 + 3)[col % 8 // 2])
                assert bits[i, col] == (word >> 16 if col % 2 else word & 0xFFFF)

    def test_stochastic_rounding_counts(self) -> None:
        """Over all 2**16 random numbers, a value goes up as often as its distance to the lower neighbour says."""
        bits = np.arange(1 << 16, dtype=np.uint64)
        grid = oracle.E2M1_MAGNITUDES
        for x in [0, 2.0**-18, 0.2, 0.5, 1.3, 1.9999, 2, 2.25, 3.999, 4, 5.5, 6, 1e30]:
            codes = oracle.stochastic_code(np.full(1 << 16, float(x)), bits)
            lower = int(np.searchsorted(grid, min(x, 6), side="right")) - 1
            step = grid[min(lower + 1, 7)] - grid[lower] or 1
            ups = int((min(x, 6) - grid[lower]) / step * 65536)
            assert ((codes == lower).sum(), (codes == lower + 1).sum()) == (65536 - ups, ups)

    def test_butterflies_are_the_hadamard_matrix(self) -> None:
        index = np.arange(32)
        parity = [[bin(i & j).count("1") % 2 for j in index] for i in index]
        matrix = 1 - 2 * np.array(parity)
        assert_same_bits(philox.butterflies(np.eye(32, dtype=np.float32)), matrix.astype(np.float32))
        integers = RNG(6).integers(-1000, 1000, (50, 32))
        np.testing.assert_array_equal(philox.butterflies(integers.astype(np.float32)), integers @ matrix)

    def test_hadamard_inverse(self) -> None:
        integers = RNG(7).integers(-1000, 1000, (4, 5, 32)).astype(np.float32)
        there = philox.hadamard_forward(integers, seed=11)
        assert_same_bits(philox.hadamard_inverse(there, seed=11), integers)
        assert not np.array_equal(there, philox.hadamard_forward(integers, seed=12))


class TestSharedScales:
    def test_row_wise_by_hand(self) -> None:
        packed = np.full((1, 64), 0x71, np.uint8)  # 0.5 and 6
        codes, scales = oracle.mxfp4_to_fp8(packed, np.array([[100, 99, 86, 85]], np.uint8))
        assert scales.tolist() == [[2.0 ** (94 - 127)]]
        values = oracle.E4M3_VALUES[codes][0, ::32].tolist(), oracle.E4M3_VALUES[codes][0, 1::32].tolist()
        # 15 binades down 0.5 lies halfway between zero and the smallest E4M3 number and goes to the even code.
        assert values == ([32, 16, 2.0**-9, 0], [384, 192, 6 * 2.0**-8, 6 * 2.0**-9])

    @pytest.mark.parametrize(
        "bytes_, empty, expected",
        [
            ([0, 0, 0, 0], True, 127),  # nothing there: scale 1
            ([0, 0, 0, 0], False, 1),
            ([6, 0, 0, 0], False, 1),
            ([8, 3, 0, 0], False, 2),
            ([255, 255, 255, 255], False, 127),
            ([255, 9, 0, 0], False, 3),
            ([254, 0, 0, 0], False, 248),
        ],
    )
    def test_scale_byte(self, bytes_: list[int], empty: bool, expected: int) -> None:
        packed = np.full((1, 64), 0x88 if empty else 0x12, np.uint8)
        codes, scales = oracle.mxfp4_to_fp8(packed, np.array([bytes_], np.uint8))
        assert scales.item() == 2.0 ** (expected - 127)
        assert ((codes == 0x7F) == (np.repeat(bytes_, 32) == 255)).all()

    def test_columns_are_transposed_tiles(self) -> None:
        """A tile of 128 rows x 32 columns, read as one row of 128 blocks, goes through the same rule."""
        packed, scales = hard_mxfp4(RNG(8), 300, 96)
        sizes = (128, 0, 172)
        codes, tile_scales = oracle.mxfp4_to_fp8_columns(packed, scales, sizes)
        assert tile_scales.shape == (3, 96)
        last = codes[128 * 96 :].reshape(96, 172)
        for block in range(3):
            e4m3, exponent = oracle._shift_blocks(
                oracle.unpack(packed[128:256]).reshape(128, 3, 32)[:, block], scales[128:256, block]
            )
            assert_same_bits(last[32 * block : 32 * block + 32, :128], e4m3.T)
            assert (tile_scales[1, 32 * block : 32 * block + 32] == 2.0 ** float(exponent)).all()

    def test_fp8_columns_lose_only_in_subnormals(self) -> None:
        codes, scales = hard_fp8(RNG(9), 12, 160, power_of_two=True)
        scales[:, 0] = np.ldexp(1.0, RNG(10).integers(-12, 13, 12))
        columns, tile_scales = oracle.fp8_to_fp8_columns(codes, scales, (5, 7))
        floats = oracle.decode_fp8(codes, scales), oracle.fp8_columns_values(columns, tile_scales, 160, (5, 7))
        assert (np.isfinite(floats[0]) == np.isfinite(floats[1])).all()
        x, y = (np.where(np.isfinite(v), v, 0).astype(np.float64) for v in floats)
        tile_scale = np.repeat(tile_scales, (5, 7), axis=0).astype(np.float64)
        half_step = np.where(np.abs(x) >= tile_scale * 2.0**-6, 0, tile_scale * 2.0**-10)  # exact above subnormals
        assert (np.abs(x - y) <= half_step).all()
        assert (x != y).any()
        with pytest.raises(ValueError, match="power of two"):
            oracle.fp8_to_fp8_columns(codes, scales * np.float32(1.5))

    def test_mxfp4_columns(self) -> None:
        """Blocks of 32 rows of one column, encoded like a row of the transposed matrix."""
        packed, scales = hard_mxfp4(RNG(11), 70, 64)
        scales[scales > 250] = 250  # float32 holds the values
        scales[3, 1] = 255
        sizes = (33, 37)
        new_packed, new_scales = oracle.mxfp4_to_mxfp4_columns(packed, scales, sizes, "rceil")
        x = oracle.decode_mxfp4(packed, scales)
        padded = np.zeros((64, 64), np.float32)
        padded[:, :33] = x[:33].T
        expected, expected_scales = oracle.encode_mxfp4(padded, "rceil")
        assert_same_bits(new_packed[: 64 * 32].reshape(64, 32), expected)
        assert_same_bits(new_scales[: 64 * 2].reshape(64, 2), expected_scales)
        restored = oracle.mxfp4_columns_values(new_packed, new_scales, 64, sizes)
        assert np.isnan(restored[:32, 32:]).all()
        assert not np.isnan(restored[:32, :32]).any()

    def test_take_rows(self) -> None:
        x = np.arange(1, 7, dtype=np.uint8).reshape(3, 2)
        assert oracle.take_rows(x, np.array([2, -1, 0])).tolist() == [[5, 6], [0, 0], [1, 2]]
