"""What must hold for any input, whatever the oracle says: stability, symmetry, independence, error bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from numerics import SCALE_MODES, assert_same_bits, hard_floats, hard_fp8, hard_mxfp4
from torch import Tensor

from fp4comm.codec import FP8Tensor, MXFP4Tensor, quantize_fp8, quantize_mxfp4
from fp4comm.reference import codec as oracle

pytestmark = pytest.mark.usefixtures("isa")
modes = pytest.mark.parametrize("scale_mode", SCALE_MODES)
RNG = np.random.default_rng


@cache
def floats(seed: int, num_rows: int = 500, hidden: int = 96, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(hard_floats(RNG(seed), num_rows, hidden)).to(dtype)


@cache
def gauss(seed: int, num_rows: int = 500, hidden: int = 256) -> Tensor:
    return torch.from_numpy(RNG(seed).standard_normal((num_rows, hidden)).astype(np.float32))


@cache
def mxfp4_tensor(seed: int, num_rows: int, hidden: int) -> MXFP4Tensor:
    return MXFP4Tensor(*map(torch.from_numpy, hard_mxfp4(RNG(seed), num_rows, hidden)))


@cache
def fp8_tensor(seed: int, num_rows: int, hidden: int, *, power_of_two: bool = True) -> FP8Tensor:
    codes, scales = hard_fp8(RNG(seed), num_rows, hidden, power_of_two=power_of_two)
    return FP8Tensor(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales))


def block_scales(x: MXFP4Tensor) -> Tensor:
    return torch.exp2(x.scales.double() - 127).repeat_interleave(32, dim=1)


def sqnr_db(x: Tensor, y: Tensor) -> float:
    noise = (x.double() - y.double()).square().sum()
    return float(10 * torch.log10(x.double().square().sum() / noise))


class TestStability:
    @modes
    def test_encoding_again_changes_nothing(self, scale_mode: str) -> None:
        first = quantize_mxfp4(floats(1, 3000), scale_mode=scale_mode)
        in_range = (first.scales < 253) | (first.scales == 255)  # above, 4 * 2**126 is an Inf in float32
        decoded = first.dequantize(torch.float32)
        again = quantize_mxfp4(decoded, scale_mode=scale_mode)
        wide = in_range.repeat_interleave(32, dim=1)
        assert_same_bits(again.dequantize(torch.float32)[wide], decoded[wide])
        # Only rceil can emit a block whose largest code is 3; it comes back as 6 under half the scale.
        largest = torch.from_numpy(oracle.unpack(first.packed.numpy()) & 7).view(-1, 3, 32).amax(-1)
        same = in_range & ~((largest == 5) & (first.scales > 0)) if scale_mode == "rceil" else in_range
        assert in_range.float().mean() > 0.9
        assert_same_bits(again.scales[same], first.scales[same])
        assert_same_bits(again.packed.view(-1, 3, 16)[same], first.packed.view(-1, 3, 16)[same])

    def test_fp8_encoding_again_changes_nothing(self) -> None:
        first = quantize_fp8(floats(2, 3000, 128))
        decoded = first.dequantize(torch.float32)
        in_range = ~decoded.isinf().any(dim=1)  # the largest floats round to 2**128
        assert 0.9 < in_range.float().mean() < 1
        again = quantize_fp8(decoded)  # perhaps with half the scale, where the maximum was rounded down to fit it
        assert_same_bits(again.dequantize(torch.float32)[in_range], decoded[in_range])

    def test_fp8_transposed_twice(self) -> None:
        """From the tile scale on nothing is lost any more."""
        columns = fp8_tensor(3, 200, 256).to_columns((72, 128))
        for i in range(2):
            data, scales = columns.expert(i)
            assert scales.shape == (1, 256)
            width = data.shape[1] // 32 * 32
            transposed = FP8Tensor(data[:, :width].contiguous(), scales.t().contiguous())
            back = transposed.to_columns()
            assert_same_bits(back.expert(0)[0].contiguous(), data[:, :width].t().contiguous())


class TestSymmetry:
    @modes
    def test_sign(self, scale_mode: str) -> None:
        x = floats(4)
        plus, minus = quantize_mxfp4(x, scale_mode=scale_mode), quantize_mxfp4(-x, scale_mode=scale_mode)
        assert_same_bits(minus.scales, plus.scales)
        flip = torch.where(plus.scales == 255, 0, 0x88).to(torch.uint8).repeat_interleave(16, dim=1)
        assert_same_bits(minus.packed, plus.packed ^ flip)

    @modes
    @pytest.mark.parametrize("power", [-60, -1, 1, 60])
    def test_power_of_two_moves_only_the_scale(self, power: int, scale_mode: str) -> None:
        x = gauss(5)
        one, other = quantize_mxfp4(x, scale_mode=scale_mode), quantize_mxfp4(x * 2.0**power, scale_mode=scale_mode)
        assert_same_bits(other.packed, one.packed)
        assert_same_bits(other.scales.int(), one.scales.int() + power)
        fp8, other_fp8 = quantize_fp8(x), quantize_fp8(x * 2.0**power)
        assert_same_bits(other_fp8.data, fp8.data)
        assert_same_bits(other_fp8.scales, fp8.scales * 2.0**power)

    def test_blocks_are_independent(self) -> None:
        x = floats(6, 200, 288)
        order = torch.from_numpy(RNG(7).permutation(9))
        shuffled = x.view(200, 9, 32)[:, order].reshape(200, 288)
        one, other = quantize_mxfp4(x), quantize_mxfp4(shuffled)
        assert_same_bits(other.scales, one.scales[:, order].contiguous())
        assert_same_bits(other.packed.view(200, 9, 16), one.packed.view(200, 9, 16)[:, order].contiguous())


OPERATIONS: dict[str, Callable[[int], list[Tensor]]] = {}  # by name: number of rows -> results, rows first


def operation(function: Callable[[int], list[Tensor]]) -> Callable[[int], list[Tensor]]:
    OPERATIONS[function.__name__] = function
    return function


@operation
def float_to_mxfp4(n: int) -> list[Tensor]:
    y = quantize_mxfp4(floats(8)[:n])
    return [y.packed, y.scales]


@operation
def bf16_to_mxfp4_hadamard(n: int) -> list[Tensor]:
    y = quantize_mxfp4(floats(9, dtype=torch.bfloat16)[:n], hadamard=True, stochastic=True, seed=3)
    return [y.packed, y.scales, y.dequantize(torch.float32, hadamard=True, seed=3)]


@operation
def fp8_to_mxfp4(n: int) -> list[Tensor]:
    y = fp8_tensor(10, 500, 288, power_of_two=False)
    z = quantize_mxfp4(FP8Tensor(y.data[:n], y.scales[:n]))
    return [z.packed, z.scales]


@operation
def float_to_fp8(n: int) -> list[Tensor]:
    y = quantize_fp8(floats(11, hidden=160)[:n])
    return [y.data, y.scales, y.dequantize(torch.float32), y.dequantize(torch.float16)]


@operation
def mxfp4_to_everything(n: int) -> list[Tensor]:
    x = mxfp4_tensor(12, 500, 160)
    x = MXFP4Tensor(x.packed[:n], x.scales[:n])
    y = x.to_fp8()
    return [y.data, y.scales, x.dequantize(torch.float32), x.dequantize(torch.bfloat16), x.dequantize(torch.float16)]


@operation
def mxfp4_to_fp8_columns(n: int) -> list[Tensor]:
    x = mxfp4_tensor(13, 500, 96)
    y = MXFP4Tensor(x.packed[:n], x.scales[:n]).to_fp8_columns()
    return [y.expert(0)[0].t(), y.scales.repeat_interleave(128, dim=0)[:n]]


@operation
def mxfp4_to_mxfp4_columns(n: int) -> list[Tensor]:
    x = mxfp4_tensor(14, 500, 96)
    y = MXFP4Tensor(x.packed[:n], x.scales[:n]).to_mxfp4_columns()
    packed, scales = y.expert(0)
    return [packed.t().repeat_interleave(2, dim=0)[:n], scales.t().repeat_interleave(32, dim=0)[:n]]


@operation
def fp8_to_columns(n: int) -> list[Tensor]:
    x = fp8_tensor(15, 500, 160)
    y = FP8Tensor(x.data[:n], x.scales[:n]).to_columns()
    return [y.expert(0)[0].t(), y.scales.repeat_interleave(128, dim=0)[:n]]


@pytest.mark.parametrize("name", OPERATIONS)
def test_first_rows_equal_the_whole(name: str) -> None:
    """Any number of rows gives the first rows of more (of whole tiles, for the column-wise), none at all included."""
    whole = OPERATIONS[name](384)
    for n in (0, 128, 256) if "columns" in name else (0, 1, 2, 17, 128, 383):
        for part, full in zip(OPERATIONS[name](n), whole, strict=True):
            assert_same_bits(part, full[:n], f"{name} of {n} rows")


@contextmanager
def subnormals_flushed() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        assert (torch.tensor([1e-39]) * 1).item() == 0, "the mode must be on for the test to mean anything"
        yield
        assert (torch.tensor([1e-39]) * 1).item() == 0, "the caller's mode must survive"
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", OPERATIONS)
def test_flushed_subnormals_change_nothing(name: str) -> None:
    """The first call also makes the (cached) inputs, so that the operation alone meets the mode."""
    expected = OPERATIONS[name](500)
    with subnormals_flushed():
        actual = OPERATIONS[name](500)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b, name)


class TestErrors:
    @modes
    def test_bound_in_units_of_the_scale(self, scale_mode: str) -> None:
        """At most the scale where nothing saturates (half the largest step); less than twice the scale for floor."""
        x = torch.cat([gauss(16, 2000), gauss(17, 2000).double().exp().float()])
        y = quantize_mxfp4(x, scale_mode=scale_mode)
        error = (x.double() - y.dequantize(torch.float32).double()).abs() / block_scales(y)
        assert error.max() < 2 if scale_mode == "floor" else error.max() <= 1
        assert error.max() > 0.9  # the bound is tight

    @pytest.mark.parametrize("scale_mode, published", [("floor", 18.80), ("even", 19.02), ("rceil", 18.76)])
    def test_sqnr_of_gaussian_data(self, scale_mode: str, published: float) -> None:
        x = gauss(18, 512, 7168)
        assert abs(sqnr_db(x, quantize_mxfp4(x.bfloat16(), scale_mode=scale_mode).dequantize()) - published) < 0.1

    def test_sqnr_of_the_options(self) -> None:
        x = gauss(19, 512, 4096)
        stochastic = quantize_mxfp4(x, scale_mode="rceil", stochastic=True).dequantize()
        assert abs(sqnr_db(x, stochastic) - 15.67) < 0.1
        assert abs(sqnr_db(x, quantize_fp8(x).dequantize(torch.float32)) - 31.49) < 0.1

    def test_hadamard_spreads_outliers(self) -> None:
        """With one large channel the transform wins back what the block lost."""
        x = gauss(20, 512, 1024).clone()
        x[:, 5::32] *= 50
        small = torch.ones(1024, dtype=torch.bool)
        small[5::32] = False
        plain = quantize_mxfp4(x).dequantize(torch.float32)
        rotated = quantize_mxfp4(x, hadamard=True, seed=1).dequantize(torch.float32, hadamard=True, seed=1)
        assert abs(sqnr_db(x, rotated) - 19.0) < 1.5
        assert sqnr_db(x[:, small], plain[:, small]) < 3

    def test_columns_lose_little(self) -> None:
        x = quantize_mxfp4(gauss(21, 512, 256))
        exact = x.dequantize(torch.float32)
        assert torch.equal(x.to_fp8_columns().dequantize(), exact)
        assert 18 < sqnr_db(exact, x.to_mxfp4_columns().dequantize()) < 35


class TestSecondWitness:
    """ml_dtypes, where its conversions mean the same: finite numbers that are exact in float32."""

    @modes
    def test_e2m1(self, scale_mode: str) -> None:
        x = gauss(22)
        y = quantize_mxfp4(x, scale_mode=scale_mode)
        scaled = (x.double() / block_scales(y)).float().numpy()
        codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & np.uint8(15)
        assert_same_bits(y.packed, oracle.pack(codes))
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * block_scales(y).float().numpy()
        assert_same_bits(y.dequantize(torch.float32), values)

    def test_e4m3(self) -> None:
        x = gauss(23)
        y = quantize_fp8(x)
        scaled = (x / y.scales.repeat_interleave(128, dim=1)).numpy()
        assert_same_bits(y.data, scaled.astype(ml_dtypes.float8_e4m3fn))
