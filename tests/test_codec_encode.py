"""Quantization to MXFP4 and FP8: bit equality with the oracle on every instruction set and a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numerics import (
    SCALE_MODES,
    all_16_bits,
    assert_same_bits,
    bf16_tensor,
    e2m1_ties,
    e4m3_ties,
    fp16_tensor,
    from_bits,
    hard_floats,
    hard_fp8,
    on_device,
    scale_thresholds,
)
from numpy.typing import NDArray

from fp4comm.codec import FP8Tensor, MXFP4Tensor, quantize_fp8, quantize_mxfp4
from fp4comm.reference import codec as oracle

pytestmark = pytest.mark.usefixtures("everywhere")
modes = pytest.mark.parametrize("scale_mode", SCALE_MODES)
RNG = np.random.default_rng
F32 = NDArray[np.float32]
# Block maxima as magnitude bits: zero, subnormals, around the clamp, around 1, 1.5, 1.75, 448, and the largest.
BF16_MAXIMA = (0x0000, 0x0001, 0x0080, 0x0100, 0x017F, 0x0180, 0x3F80, 0x3FC0, 0x3FE0, 0x43E0, 0x43E1, 0x7F60, 0x7F7F)
FP16_MAXIMA = (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3E00, 0x3F00, 0x4700, 0x5EFF, 0x5F00, 0x5F01, 0x7BFF)


def fp8_tensor(codes: NDArray[np.uint8], scales: F32) -> FP8Tensor:
    return FP8Tensor(on_device(codes).view(torch.float8_e4m3fn), on_device(scales))


def assert_mxfp4(actual: MXFP4Tensor, expected: tuple[NDArray[Any], ...], what: str = "") -> None:
    assert_same_bits(actual.scales, expected[1], f"{what} scales")
    assert_same_bits(actual.packed, expected[0], f"{what} packed")


def assert_fp8(actual: FP8Tensor, expected: tuple[NDArray[Any], ...], what: str = "") -> None:
    assert_same_bits(actual.scales, expected[1], f"{what} scales")
    assert_same_bits(actual.data, expected[0], f"{what} data")


@cache
def each_pattern_alone(width: int) -> NDArray[np.uint16]:
    """Every 16-bit pattern in a group of its own, at a changing place among zeros of changing sign."""
    bits = all_16_bits()
    x = np.zeros((len(bits), width), np.uint16)
    x[1::2] = 0x8000
    x[np.arange(len(bits)), np.arange(len(bits)) % width] = bits
    return x


@cache
def patterns_under_maxima(maxima: tuple[int, ...], width: int) -> NDArray[np.uint16]:
    """For every given magnitude, all patterns up to it in groups that have it as maximum: [rows, width]."""
    bits = all_16_bits()
    rows = []
    for amax in maxima:
        below = bits[(bits & 0x7FFF) <= amax]
        padded = np.concatenate([below, np.zeros(-len(below) % (width - 1), np.uint16)]).reshape(-1, width - 1)
        rows.append(np.insert(padded, 5, amax, axis=1))
    return np.concatenate(rows)


@cache
def expected_mxfp4(case: str, scale_mode: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return oracle.encode_mxfp4(FLOAT_CASES[case](), scale_mode)


def ties_at_all_exponents() -> F32:
    """Every tie of the E2M1 grid and its neighbours times every power of two, in blocks whose scale puts them there."""
    ties = np.resize(e2m1_ties(), (1, 24))
    rows = np.ldexp(np.concatenate([ties, -ties[:, :7]], axis=1), np.arange(-149, 126)[:, None])
    blocks: F32 = np.insert(rows, 11, np.ldexp(6.0, np.arange(-149, 126)), axis=1).astype(np.float32)
    return blocks


def thresholds_with_ties() -> F32:
    """Block maxima around all scale thresholds, beside elements at ties relative to the maximum."""
    amax = scale_thresholds()[:, None]
    fractions = np.resize(np.array([1, 2, 3, 5, 7, 10, 12, 14, 20]) / 32, (1, 31))
    with np.errstate(under="ignore"):
        below = (amax * fractions).astype(np.float32)
    return np.concatenate([below[:, :16], -amax, below[:, 16:]], axis=1)


FLOAT_CASES = {
    "each bf16 as maximum": lambda: oracle.widen_bf16(each_pattern_alone(32)),
    "each bf16 as element": lambda: oracle.widen_bf16(patterns_under_maxima(BF16_MAXIMA, 32)),
    "each fp16 as maximum": lambda: oracle.widen_fp16(each_pattern_alone(32)),
    "each fp16 as element": lambda: oracle.widen_fp16(patterns_under_maxima(FP16_MAXIMA, 32)),
    "ties": ties_at_all_exponents,
    "thresholds": thresholds_with_ties,
}


class TestFloatToMXFP4:
    @modes
    @pytest.mark.parametrize("case", ["each bf16 as maximum", "each bf16 as element"])
    def test_every_bf16(self, case: str, scale_mode: str) -> None:
        bits = each_pattern_alone(32) if "maximum" in case else patterns_under_maxima(BF16_MAXIMA, 32)
        actual = quantize_mxfp4(bf16_tensor(bits), scale_mode=scale_mode)
        assert_mxfp4(actual, expected_mxfp4(case, scale_mode), case)

    @modes
    @pytest.mark.parametrize("case", ["each fp16 as maximum", "each fp16 as element"])
    def test_every_fp16(self, case: str, scale_mode: str) -> None:
        bits = each_pattern_alone(32) if "maximum" in case else patterns_under_maxima(FP16_MAXIMA, 32)
        actual = quantize_mxfp4(fp16_tensor(bits), scale_mode=scale_mode)
        assert_mxfp4(actual, expected_mxfp4(case, scale_mode), case)

    @modes
    @pytest.mark.parametrize("case", FLOAT_CASES)
    def test_float32(self, case: str, scale_mode: str) -> None:
        x = on_device(FLOAT_CASES[case]())
        assert_mxfp4(quantize_mxfp4(x, scale_mode=scale_mode), expected_mxfp4(case, scale_mode), case)

    @modes
    @pytest.mark.parametrize("hidden", [32, 64, 96, 160, 288])
    def test_hard_numbers(self, hidden: int, scale_mode: str) -> None:
        x = hard_floats(RNG(hidden), 700, hidden)
        assert_mxfp4(quantize_mxfp4(on_device(x), scale_mode=scale_mode), oracle.encode_mxfp4(x, scale_mode))
        for to_bits, widen, tensor in (
            (oracle.round_bf16, oracle.widen_bf16, bf16_tensor),
            (oracle.round_fp16, oracle.widen_fp16, fp16_tensor),
        ):
            bits = to_bits(x)
            actual = quantize_mxfp4(tensor(bits), scale_mode=scale_mode)
            assert_mxfp4(actual, oracle.encode_mxfp4(widen(bits), scale_mode), to_bits.__name__)

    @pytest.mark.parametrize("special", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
    def test_nan_and_inf_poison_their_block_alone(self, special: int) -> None:
        x = np.tile(hard_floats(RNG(0), 1, 32) * 0 + 1, (32, 3)).astype(np.float32)
        x[np.arange(32), 32 + np.arange(32)] = from_bits([special])[0]
        for tensor in (on_device(x), on_device(x).bfloat16(), on_device(x).half()):
            y = quantize_mxfp4(tensor)
            assert (y.scales == y.scales.new_tensor([125, 255, 125])).all()
            assert not y.packed[:, 16:32].any()
            assert torch.isnan(y.dequantize()[:, 32:64]).all()
            assert (y.dequantize()[:, :32] == 1).all()


class TestFP8ToMXFP4:
    @modes
    def test_every_code_and_power_of_two(self, scale_mode: str) -> None:
        codes, scales = every_code_as_maximum()
        actual = quantize_mxfp4(fp8_tensor(codes, scales), scale_mode=scale_mode)
        assert_mxfp4(actual, expected_of_every_code(scale_mode))

    @modes
    @pytest.mark.parametrize("hidden", [32, 96, 128, 160, 288])
    @pytest.mark.parametrize("power_of_two", [True, False])
    def test_hard_scales(self, hidden: int, power_of_two: bool, scale_mode: str) -> None:
        codes, scales = hard_fp8(RNG(hidden), 900, hidden, power_of_two=power_of_two)
        actual = quantize_mxfp4(fp8_tensor(codes, scales), scale_mode=scale_mode)
        assert_mxfp4(actual, oracle.encode_mxfp4(oracle.decode_fp8(codes, scales), scale_mode))

    @modes
    def test_scales_from_amax(self, scale_mode: str) -> None:
        """Scales amax / 448 bring the block maximum back near a tie, where one rounding more or less shows."""
        rng = RNG(1)
        x = rng.standard_normal((2000, 128)).astype(np.float32)
        scales = (np.abs(x).max(axis=1, keepdims=True) / np.float32(448)).astype(np.float32)
        codes = oracle.nearest_code(np.abs(x / scales).astype(np.float64), oracle.E4M3_MAGNITUDES)
        codes |= np.signbit(x).astype(np.uint8) << np.uint8(7)
        actual = quantize_mxfp4(fp8_tensor(codes, scales), scale_mode=scale_mode)
        assert_mxfp4(actual, oracle.encode_mxfp4(oracle.decode_fp8(codes, scales), scale_mode))

    @pytest.mark.parametrize(
        "bits", [0, 1, 0x007FFFFF, 0x80000000, 0xBFC00000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F7FFFFF]
    )
    def test_odd_scales(self, bits: int) -> None:
        """Zero, subnormal, negative, Inf, NaN and huge scales mean what their product with the code means."""
        codes = np.stack([RNG(2).permutation(256).astype(np.uint8) for _ in range(20)])
        codes[::2] = np.minimum(codes[::2] & 0x7F, 0x70) | codes[::2] & 0x80
        scales = np.full((20, 2), from_bits([bits])[0], np.float32)
        actual = quantize_mxfp4(fp8_tensor(codes, scales))
        assert_mxfp4(actual, oracle.encode_mxfp4(oracle.decode_fp8(codes, scales)))

    def test_equals_the_bf16_detour_for_power_of_two_scales(self) -> None:
        codes, _ = hard_fp8(RNG(3), 500, 256, power_of_two=True)
        scales = np.ldexp(1.0, RNG(4).integers(-117, 119, (500, 2))).astype(np.float32)  # BF16 holds every product
        x = fp8_tensor(codes, scales)
        direct, detour = quantize_mxfp4(x), quantize_mxfp4(x.dequantize(torch.bfloat16))
        assert_same_bits(direct.packed, detour.packed)
        assert_same_bits(direct.scales, detour.scales)


@cache
def every_code_as_maximum() -> tuple[NDArray[np.uint8], F32]:
    """Every E4M3 code as the largest of a block of 32, under every power-of-two scale, 2**-149 to 2**127."""
    exponents = np.arange(-149, 128)
    blocks = np.zeros((256, 32), np.uint8)
    smaller = RNG(5).integers(0, 1 << 16, blocks.shape) % (np.arange(256)[:, None] % 128 + 1)
    blocks[:] = smaller | RNG(6).integers(0, 2, blocks.shape) << 7
    blocks[np.arange(256), np.arange(256) % 32] = np.arange(256)
    codes = np.tile(blocks.reshape(1, 64, 128), (len(exponents), 1, 1)).reshape(-1, 128)
    return codes, np.repeat(np.ldexp(1.0, exponents), 64)[:, None].astype(np.float32)


@cache
def expected_of_every_code(scale_mode: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return oracle.encode_mxfp4(oracle.decode_fp8(*every_code_as_maximum()), scale_mode)


class TestFloatToFP8:
    @pytest.mark.parametrize("kind", ["bf16", "fp16"])
    def test_every_pattern(self, kind: str) -> None:
        for bits, expected in expected_fp8(kind):
            actual = quantize_fp8(bf16_tensor(bits) if kind == "bf16" else fp16_tensor(bits))
            assert_fp8(actual, expected, kind)

    def test_thresholds(self) -> None:
        """Maxima around every scale threshold, and elements around every tie of the E4M3 grid."""
        x = np.tile(thresholds_with_ties(), (1, 4))
        assert_fp8(quantize_fp8(on_device(x)), oracle.encode_fp8(x))
        ties = e4m3_ties()
        rows = np.resize(np.concatenate([ties, -ties]), (6, 127))
        x = np.concatenate([np.full((6, 1), 448), rows], axis=1).astype(np.float32)
        x = np.concatenate([np.ldexp(x, e).astype(np.float32) for e in (-140, -126, -20, 0, 60, 119)])
        assert_fp8(quantize_fp8(on_device(x)), oracle.encode_fp8(x))

    @pytest.mark.parametrize("hidden", [32, 64, 96, 128, 160, 288])
    def test_hard_numbers(self, hidden: int) -> None:
        x = hard_floats(RNG(hidden), 700, hidden)
        assert_fp8(quantize_fp8(on_device(x)), oracle.encode_fp8(x))
        bits = oracle.round_bf16(x)
        assert_fp8(quantize_fp8(bf16_tensor(bits)), oracle.encode_fp8(oracle.widen_bf16(bits)), "bf16")
        bits = oracle.round_fp16(x)
        assert_fp8(quantize_fp8(fp16_tensor(bits)), oracle.encode_fp8(oracle.widen_fp16(bits)), "fp16")


@cache
def expected_fp8(kind: str) -> list[tuple[NDArray[np.uint16], tuple[NDArray[np.uint8], F32]]]:
    """Every pattern as the maximum of a group, and as an element of one; with what it becomes."""
    maxima, widen = (BF16_MAXIMA, oracle.widen_bf16) if kind == "bf16" else (FP16_MAXIMA, oracle.widen_fp16)
    patterns = each_pattern_alone(32), patterns_under_maxima(maxima, 128)
    return [(bits, oracle.encode_fp8(widen(bits))) for bits in patterns]
