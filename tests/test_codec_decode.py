"""Dequantization and lossless steps between formats: the bits of the oracle on every instruction set and on a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numerics import (
    all_16_bits,
    assert_same_bits,
    convert,
    from_bits,
    hard_floats,
    hard_fp8,
    hard_mxfp4,
    hard_rows,
    on_device,
    torch_rows,
)
from numpy.typing import NDArray
from torch import Tensor

from fp4comm.backends import Rows, cpu
from fp4comm.codec import FP8Tensor, MXFP4Tensor
from fp4comm.formats import Kind
from fp4comm.reference import codec as oracle

RNG = np.random.default_rng
FLOATS = {
    torch.float32: lambda x: x,
    torch.bfloat16: oracle.round_bf16,
    torch.float16: oracle.round_fp16,
}
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=["fp32", "bf16", "fp16"])


def mxfp4_tensor(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> MXFP4Tensor:
    return MXFP4Tensor(on_device(packed), on_device(scales))


def fp8_tensor(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> FP8Tensor:
    return FP8Tensor(on_device(codes).view(torch.float8_e4m3fn), on_device(scales))


def every_code_and_scale() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Row b: all pairs of codes, 256 bytes, under scale byte b."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    return packed, np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)


def embed(kind: Kind, arrays: tuple[NDArray[Any], ...]) -> tuple[Tensor, Rows]:
    """Rows as [3 bytes | data | 1 byte | scales | 2 bytes] of one buffer, filled up with 0xA5."""
    parts = [part.view(np.uint8) for part in arrays]
    width = 6 + sum(part.shape[1] for part in parts)
    message = torch.full((len(parts[0]), width), 0xA5, dtype=torch.uint8)
    views, start = [], 3
    for part in parts:
        views.append(message[:, start : start + part.shape[1]])
        views[-1].copy_(torch.from_numpy(part))
        start += part.shape[1] + 1
    return message, Rows(kind, *views)


@pytest.mark.usefixtures("everywhere")
class TestMXFP4:
    @dtypes
    def test_every_code_and_scale(self, dtype: torch.dtype) -> None:
        payload = every_code_and_scale()
        expected = FLOATS[dtype](oracle.decode_mxfp4(*payload))
        assert_same_bits(mxfp4_tensor(*payload).dequantize(dtype), expected)

    def test_every_code_and_scale_to_fp8(self) -> None:
        """All four blocks of a group under one scale: the scale byte follows, the elements never change."""
        payload = every_code_and_scale()
        y = mxfp4_tensor(*payload).to_fp8()
        codes, scales = oracle.mxfp4_to_fp8(*payload)
        assert_same_bits(y.scales, scales)
        assert_same_bits(y.data, codes)
        np.testing.assert_array_equal(oracle.decode_fp8(codes, scales), oracle.decode_mxfp4(*payload))

    @dtypes
    @pytest.mark.parametrize("hidden", [32, 64, 96, 160, 288])
    def test_hard_payload(self, hidden: int, dtype: torch.dtype) -> None:
        payload = hard_mxfp4(RNG(hidden), 500, hidden)
        assert_same_bits(mxfp4_tensor(*payload).dequantize(dtype), FLOATS[dtype](oracle.decode_mxfp4(*payload)))


@pytest.mark.usefixtures("everywhere")
class TestFP8:
    @dtypes
    def test_every_code_and_power_of_two(self, dtype: torch.dtype) -> None:
        codes = np.tile(np.arange(256, dtype=np.uint8), (277, 1))
        scales = np.repeat(np.ldexp(1.0, np.arange(-149, 128))[:, None], 2, axis=1).astype(np.float32)
        expected = FLOATS[dtype](oracle.decode_fp8(codes, scales))
        assert_same_bits(fp8_tensor(codes, scales).dequantize(dtype), expected)

    @dtypes
    def test_every_code_and_any_scale(self, dtype: torch.dtype) -> None:
        scales = from_bits(RNG(0).integers(0, 1 << 32, (2000, 2)))  # NaN, Inf, subnormal and negative ones too
        special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 1, 0x7F7FFFFF]
        scales[: len(special)] = from_bits(special)[:, None]
        codes = np.tile(np.arange(256, dtype=np.uint8), (2000, 1))
        expected = FLOATS[dtype](oracle.decode_fp8(codes, scales))
        assert_same_bits(fp8_tensor(codes, scales).dequantize(dtype), expected)

    @dtypes
    @pytest.mark.parametrize("hidden", [32, 96, 128, 160, 288])
    def test_hard_rows(self, hidden: int, dtype: torch.dtype) -> None:
        codes, scales = hard_fp8(RNG(hidden), 500, hidden, power_of_two=False)
        expected = FLOATS[dtype](oracle.decode_fp8(codes, scales))
        assert_same_bits(fp8_tensor(codes, scales).dequantize(dtype), expected)


@pytest.mark.usefixtures("isa")
class TestEveryPairOfKinds:
    """`convert_rows` of the backend, on which everything else stands."""

    @pytest.mark.parametrize("src, dst", list(product(Kind, Kind)), ids=lambda kind: kind.name)
    def test_rows(self, src: Kind, dst: Kind) -> None:
        for hidden in (32, 128, 160, 288):
            arrays = hard_rows(RNG(10 * src + dst), src, 300, hidden)
            expected = convert(src, dst, *arrays)
            actual = [np.full_like(part, 1) for part in expected]
            cpu.convert_rows(torch_rows(src, *arrays), torch_rows(dst, *actual))
            for what, a, b in zip(("data", "scales"), actual, expected, strict=False):
                assert_same_bits(a, b, f"{what} of hidden {hidden}")

    @pytest.mark.parametrize("src, dst", list(product(Kind, Kind)), ids=lambda kind: kind.name)
    def test_row_maps(self, src: Kind, dst: Kind) -> None:
        """Rows gathered, repeated, left zero and scattered; rows of the target that no map names stay as they were."""
        rng = RNG(100 + 10 * src + dst)
        arrays = hard_rows(rng, src, 20, 160)
        src_row = np.sort(rng.integers(-1, 20, 30))  # sorted: equal neighbours are copied instead of converted again
        src_row[20:] = rng.permutation(src_row[20:])
        dst_row = rng.permutation(40)[:30]
        converted = convert(src, dst, *arrays)
        zero = convert(Kind.F32, dst, np.zeros((1, 160), np.float32))
        expected = [np.full_like(part, 1, shape=(40, part.shape[1])) for part in converted]
        actual = [part.copy() for part in expected]
        for part, rows, zero_row in zip(expected, converted, zero, strict=True):
            part[dst_row] = np.where((src_row >= 0)[:, None], rows[src_row], zero_row)
        maps = torch.from_numpy(src_row), torch.from_numpy(dst_row)
        cpu.convert_rows(torch_rows(src, *arrays), torch_rows(dst, *actual), src_row=maps[0], dst_row=maps[1])
        for what, a, b in zip(("data", "scales"), actual, expected, strict=False):
            assert_same_bits(a, b, what)

    @pytest.mark.parametrize("src, dst", list(product(Kind, Kind)), ids=lambda kind: kind.name)
    def test_rows_inside_messages(self, src: Kind, dst: Kind) -> None:
        """Source and target lie at odd addresses between other bytes, which stay as they were."""
        for hidden in (32, 160, 224):
            arrays = hard_rows(RNG(200 + 10 * src + dst), src, 50, hidden)
            expected = convert(src, dst, *arrays)
            message, source = embed(src, arrays)
            target_message, target = embed(dst, tuple(np.full_like(part, 0) for part in expected))
            before = message.clone()
            cpu.convert_rows(source, target)
            assert_same_bits(message, before, "source")
            assert_same_bits(target_message, embed(dst, expected)[0], f"hidden {hidden}")

    @pytest.mark.parametrize("dst", [Kind.BF16, Kind.F16, Kind.F32], ids=lambda kind: kind.name)
    def test_every_16_bit_pattern(self, dst: Kind) -> None:
        bits = all_16_bits().reshape(-1, 64)
        for src in (Kind.BF16, Kind.F16):
            (expected,) = convert(src, dst, bits)
            actual = np.zeros_like(expected)
            cpu.convert_rows(torch_rows(src, bits), torch_rows(dst, actual))
            assert_same_bits(actual, expected, src.name)

    @pytest.mark.parametrize("dst", [Kind.BF16, Kind.F16], ids=lambda kind: kind.name)
    def test_rounding_thresholds(self, dst: Kind) -> None:
        """Every bit pattern that is kept, with discarded bits below, at and above one half."""
        kept = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
        low = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xF001, 0xFFFF], np.uint32)
        x = from_bits(kept | low).reshape(-1, 96)
        x = np.concatenate([x, hard_floats(RNG(1), 100, 96)])
        (expected,) = convert(Kind.F32, dst, x)
        actual = np.zeros_like(expected)
        cpu.convert_rows(torch_rows(Kind.F32, x), torch_rows(dst, actual))
        assert_same_bits(actual, expected)
