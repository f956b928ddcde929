"""Stochastic rounding and the random Hadamard transform: reproducible to the bit, unbiased, orthogonal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numerics import SCALE_MODES, assert_same_bits, bf16_tensor, hard_floats, hard_fp8, hard_mxfp4, on_device
from numpy.typing import NDArray

from fp4comm.backends import Rows, backend_for
from fp4comm.codec import FP8Tensor, MXFP4Tensor, quantize_mxfp4
from fp4comm.formats import Kind
from fp4comm.reference import codec as oracle
from fp4comm.reference.random import hadamard_forward

pytestmark = pytest.mark.usefixtures("everywhere")
RNG = np.random.default_rng
SEEDS = (0, 1, 2**32, 2**64 - 1)


def assert_mxfp4(actual: MXFP4Tensor, expected: tuple[NDArray[Any], ...]) -> None:
    assert_same_bits(actual.scales, expected[1], "scales")
    assert_same_bits(actual.packed, expected[0], "packed")


def empty_mxfp4(num_rows: int, hidden: int) -> MXFP4Tensor:
    shapes = (num_rows, hidden // 2), (num_rows, hidden // 32)
    return MXFP4Tensor(*(on_device(np.zeros(shape, np.uint8)) for shape in shapes))


def as_rows(x: MXFP4Tensor) -> Rows:
    return Rows(Kind.MXFP4, x.packed, x.scales)


class TestStochasticRounding:
    @pytest.mark.parametrize("scale_mode", SCALE_MODES)
    @pytest.mark.parametrize("hidden", [32, 96, 288])
    def test_oracle(self, hidden: int, scale_mode: str) -> None:
        x = hard_floats(RNG(hidden), 300, hidden)
        bits = oracle.round_bf16(x)
        for seed in SEEDS:
            options: dict[str, Any] = {"scale_mode": scale_mode, "stochastic": True, "seed": seed}
            assert_mxfp4(quantize_mxfp4(on_device(x), **options), oracle.encode_mxfp4(x, **options))
            expected = oracle.encode_mxfp4(oracle.widen_bf16(bits), **options)
            assert_mxfp4(quantize_mxfp4(bf16_tensor(bits), **options), expected)

    def test_fp8_source(self) -> None:
        for power_of_two in (True, False):
            codes, scales = hard_fp8(RNG(1), 200, 160, power_of_two=power_of_two)
            x = FP8Tensor(on_device(codes).view(torch.float8_e4m3fn), on_device(scales))
            expected = oracle.encode_mxfp4(oracle.decode_fp8(codes, scales), "rceil", stochastic=True, seed=5)
            assert_mxfp4(quantize_mxfp4(x, scale_mode="rceil", stochastic=True, seed=5), expected)

    def test_stream_separates(self) -> None:
        x = hard_floats(RNG(2), 50, 96)
        results = []
        for stream in (0, 1, 2**32 - 1):
            y = empty_mxfp4(50, 96)
            backend = backend_for(y.packed)
            options = backend.options("even", True, False, 7, stream)
            backend.convert_rows(Rows.of(on_device(x)), as_rows(y), options=options)
            assert_mxfp4(y, oracle.encode_mxfp4(x, stochastic=True, seed=7, stream=stream))
            results.append(y.packed)
        assert not torch.equal(results[0], results[1])

    def test_pieces_of_rows_equal_the_whole(self) -> None:
        """The random bits follow the source row, wherever and in whatever piece it is converted."""
        x = on_device(hard_floats(RNG(3), 100, 96))
        whole = quantize_mxfp4(x, stochastic=True, seed=9)
        rows = on_device(RNG(4).permutation(100)[:37])
        y = empty_mxfp4(37, 96)
        backend = backend_for(x)
        backend.convert_rows(Rows.of(x), as_rows(y), src_row=rows, options=backend.options("even", True, False, 9, 0))
        assert_same_bits(y.packed, whole.packed[rows])
        assert_same_bits(quantize_mxfp4(x[:40], stochastic=True, seed=9).packed, whole.packed[:40])

    def test_seeds_differ_and_repeat(self) -> None:
        x = on_device(RNG(5).standard_normal((64, 256)).astype(np.float32))
        first, again, other = (quantize_mxfp4(x, stochastic=True, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first.packed, again.packed)
        differing = (oracle.unpack(first.packed.cpu().numpy()) != oracle.unpack(other.packed.cpu().numpy())).mean()
        assert 0.1 < differing < 0.5

    def test_rounds_to_a_neighbour(self) -> None:
        """Never past the two E2M1 numbers around the value, and never away from one that is exact."""
        x = np.clip(RNG(6).standard_normal((200, 64)), -3, 3).astype(np.float32)
        x[:, ::32] = 6
        y = quantize_mxfp4(on_device(x), stochastic=True).dequantize(torch.float32).cpu().numpy()
        step = np.where(np.abs(x) < 2, 0.5, 1.0)
        assert (np.abs(y - x) < step).all()
        exact = np.resize(oracle.E2M1_VALUES, (200, 64)).astype(np.float32)
        z = quantize_mxfp4(on_device(exact), stochastic=True, seed=3).dequantize(torch.float32)
        assert_same_bits(z, exact)

    def test_unbiased(self) -> None:
        """The mean over N rows lies within 5 standard errors; a step has variance p * (1 - p) * step**2."""
        num_rows, values = 1 << 14, np.linspace(-6, 6, 32).astype(np.float32)
        x = on_device(np.tile(values, (num_rows, 1)))
        mean = quantize_mxfp4(x, scale_mode="rceil", stochastic=True, seed=1).dequantize(torch.float32).double().mean(0)
        magnitude = np.abs(values).astype(np.float64)
        step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1, 2))
        p = magnitude / step % 1
        bound = 5 * step * np.sqrt(p * (1 - p) / num_rows) + step * 2.0**-16
        assert (np.abs(mean.cpu().numpy() - values) <= bound).all()

    def test_saturation_biases_floor_but_not_rceil(self) -> None:
        x = on_device(np.full((1000, 32), 7.5, np.float32))
        for scale_mode, expected in (("floor", 6.0), ("rceil", 7.5)):
            y = quantize_mxfp4(x, scale_mode=scale_mode, stochastic=True).dequantize(torch.float32)
            assert abs(y.mean().item() - expected) < 0.03


class TestHadamard:
    @pytest.mark.parametrize("hidden", [32, 96, 288])
    def test_encode(self, hidden: int) -> None:
        x = hard_floats(RNG(hidden), 300, hidden)
        for seed in SEEDS:
            actual = quantize_mxfp4(on_device(x), hadamard=True, seed=seed)
            assert_mxfp4(actual, oracle.encode_mxfp4(x, hadamard=True, seed=seed))
        bits = oracle.round_fp16(x)
        actual = quantize_mxfp4(on_device(bits).view(torch.float16), hadamard=True, scale_mode="rceil")
        assert_mxfp4(actual, oracle.encode_mxfp4(oracle.widen_fp16(bits), "rceil", hadamard=True))

    def test_with_stochastic_rounding(self) -> None:
        x = hard_floats(RNG(1), 200, 96)
        options: dict[str, Any] = {"scale_mode": "rceil", "hadamard": True, "stochastic": True, "seed": 2**63 + 5}
        assert_mxfp4(quantize_mxfp4(on_device(x), **options), oracle.encode_mxfp4(x, **options))

    def test_fp8_source(self) -> None:
        codes, scales = hard_fp8(RNG(2), 200, 160, power_of_two=False)
        x = FP8Tensor(on_device(codes).view(torch.float8_e4m3fn), on_device(scales))
        expected = oracle.encode_mxfp4(oracle.decode_fp8(codes, scales), hadamard=True, seed=3)
        assert_mxfp4(quantize_mxfp4(x, hadamard=True, seed=3), expected)

    @pytest.mark.parametrize("hidden", [32, 96, 288])
    def test_decode(self, hidden: int) -> None:
        payload = hard_mxfp4(RNG(hidden), 300, hidden)
        y = MXFP4Tensor(*map(on_device, payload))
        for seed in SEEDS:
            expected = oracle.decode_mxfp4(*payload, hadamard=True, seed=seed)
            assert_same_bits(y.dequantize(torch.float32, hadamard=True, seed=seed), expected, "fp32")
            assert_same_bits(y.dequantize(hadamard=True, seed=seed), oracle.round_bf16(expected), "bf16")
        assert_same_bits(
            y.dequantize(torch.float16, hadamard=True), oracle.round_fp16(oracle.decode_mxfp4(*payload, hadamard=True))
        )

    def test_round_trip(self) -> None:
        """Numbers whose transform MXFP4 holds exactly come back exactly, but not with another seed."""
        rng = RNG(3)
        packed = rng.integers(0, 256, (200, 48), dtype=np.uint8)
        packed[:, ::16] = 0x71  # a 6 in every block, so that its scale is the one that the encoder chooses
        payload = MXFP4Tensor(on_device(packed), on_device(rng.integers(90, 160, (200, 3), dtype=np.uint8)))
        x = payload.dequantize(torch.float32, hadamard=True, seed=11)
        again = quantize_mxfp4(x, hadamard=True, seed=11)
        assert_same_bits(again.scales, payload.scales)
        assert torch.equal(again.dequantize(torch.float32), payload.dequantize(torch.float32))
        assert_same_bits(again.dequantize(torch.float32, hadamard=True, seed=11), x)
        assert not torch.equal(quantize_mxfp4(x, hadamard=True, seed=12).packed, payload.packed)

    def test_energy_is_kept(self) -> None:
        """Orthogonal: the squared error after the inverse is that of the quantization, whatever the rotation."""
        x = on_device(RNG(4).standard_normal((500, 256)).astype(np.float32)).double()
        y = quantize_mxfp4(x.float(), hadamard=True, seed=1)
        rotated = hadamard_forward(x.float().cpu().numpy().reshape(500, 8, 32), 1).reshape(500, 256).astype(np.float64)
        decoded = y.dequantize(torch.float32).double().cpu().numpy()
        error_rotated = ((decoded - rotated) ** 2).sum() / 2  # the 1/4 stretches
        error = ((y.dequantize(torch.float32, hadamard=True, seed=1).double() - x) ** 2).sum().item()
        assert abs(error / error_rotated - 1) < 1e-6

    def test_overflow_and_nan(self) -> None:
        """A sum beyond float32, like a NaN or an Inf, makes a NaN block, its neighbours stay."""
        x = np.ones((3, 96), np.float32)
        x[0, 32:64] = 3e38
        x[1, 40] = np.inf
        x[2, 63] = np.nan
        y = quantize_mxfp4(on_device(x), hadamard=True)
        assert (y.scales[:, 1] == 255).all()
        assert not y.packed[:, 16:32].any()
        restored = y.dequantize(torch.float32, hadamard=True)
        assert_same_bits(restored[:, 32:64], np.full((3, 32), oracle.CANONICAL_NAN))
        ones = on_device(np.ones((3, 96), np.float32))
        clean = quantize_mxfp4(ones, hadamard=True).dequantize(torch.float32, hadamard=True)
        for start in (0, 64):
            assert_same_bits(restored[:, start : start + 32], clean[:, start : start + 32])
