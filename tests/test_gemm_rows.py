"""FP8 rows with one scale each: the bits of the kernels are those of torch's operations, and those of the numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from cuda_targets import CPU, Run, Target, assert_all_same
from numerics import hard_fp8, hard_mxfp4
from torch import Tensor

from fp4comm.backends import Rows
from fp4comm.errors import InvalidArgument
from fp4comm.formats import GemmKind, Kind
from fp4comm.fp8_rows import FP8Rows, quantize_fp8_rows
from fp4comm.moe import gemm
from fp4comm.moe.gemm import RowGemms
from fp4comm.reference import codec as oracle

RNG = np.random.default_rng
SIZES = (37, 0, 128, 200)
MOST, NAN = 252, 255  # E8M0: under the first no MXFP4 number is infinite in float32


def floats(num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Of all magnitudes, with rows of zeros, of NaN, and of Inf, and sizes at the threshold of a scale."""
    rng = torch.Generator().manual_seed(hidden)
    x = torch.randn(num_rows, hidden, generator=rng) * torch.logspace(-42, 36, num_rows)[:, None]
    x[1], x[2, 0], x[3, -1], x[4] = 0, torch.nan, -torch.inf, torch.linspace(-448, 448, hidden)
    x[5] = torch.nextafter(x[4], 2 * x[4])
    return x.to(dtype)


def quantized(target: Target, x: Tensor) -> list[Tensor]:
    return list(target.backend.quantize_gemm_rows(x.to(target.device)))


def expanded(
    target: Target, kind: Kind, arrays: Sequence[np.ndarray], index: np.ndarray, slots: np.ndarray
) -> list[Tensor]:
    hidden = arrays[0].shape[1] * (2 if kind == Kind.MXFP4 else 1)
    rows = FP8Rows(
        torch.zeros(len(index), hidden, dtype=torch.uint8, device=target.device).view(torch.float8_e4m3fn),
        torch.zeros(len(index), device=target.device),
    )
    target.backend.expand_rows(target.rows(kind, arrays), rows._rows, target.tensor(index), target.tensor(slots))
    return [rows.data, rows.scales]


def test_floats(target: Target) -> None:
    sizes = target.pick([(40, 8), (40, 264), (11, 2056)], [(40, 8), (40, 264), (4097, 7168), (20, 20000)])
    runs = {
        f"{num_rows} x {hidden} {dtype}": functools.partial(quantized, x=floats(num_rows, hidden, dtype))
        for num_rows, hidden in sizes
        for dtype in (torch.float32, torch.bfloat16)
    }
    runs["three dimensions"] = functools.partial(quantized, x=floats(12, 64, torch.float32).view(3, 4, 64))
    runs["none"] = functools.partial(quantized, x=torch.zeros(0, 64))
    assert_all_same(target, runs)


def routes(rng: np.random.Generator, num_src: int, num_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the source behind each row, -1 = zeros, and the reverse, three slots per row of the source."""
    slots = np.full((num_src, 3), -1)
    places = rng.permutation(num_out)[: num_out * 2 // 3]
    index = np.full(num_out, -1)
    for place, slot in zip(places, rng.permutation(num_src * 3), strict=False):
        slots[slot // 3, slot % 3], index[place] = place, slot // 3
    return index, slots


def hard_rows(kind: Kind, rng: np.random.Generator, num_rows: int, hidden: int) -> Sequence[np.ndarray]:
    if kind == Kind.MXFP4:
        packed, scales = hard_mxfp4(rng, num_rows, hidden, spread=8)
        scales = np.where(scales == NAN, NAN, np.minimum(scales, MOST)).astype(np.uint8)
        packed[(scales == 0).repeat(16, axis=1)] = 0
        packed[3], scales[3] = 0, 0
        return packed, scales
    codes, factors = hard_fp8(rng, num_rows, hidden, power_of_two=True)
    factors = (factors * np.ldexp(1.0, rng.integers(-120, -90))).astype(np.float32)
    codes[codes == 0xFF] = 0x7F  # on the CPU all NaN become the one without a sign
    codes[0, :128], codes[1], codes[2, :128] = 0, 0, 0x7F
    factors[[0, 1, 2], 0] = 1  # as the codec has it for zeros and NaN
    factors[1] = 1
    return oracle.fp8_to_e8m0(codes, np.maximum(factors, 2.0**-126).astype(np.float32))


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.FP8_E8M0], ids=lambda kind: kind.name)
def test_rows_of_messages(target: Target, kind: Kind) -> None:
    runs = {}
    for num_src, num_out, hidden in target.pick([(20, 40, 160), (8, 9, 1024)], [(20, 40, 160), (5000, 12000, 7168)]):
        rng = RNG(hidden + kind)
        index, slots = routes(rng, num_src, num_out)
        arrays = hard_rows(kind, rng, num_src, hidden)
        runs[f"hidden {hidden}"] = functools.partial(expanded, kind=kind, arrays=arrays, index=index, slots=slots)
    assert_all_same(target, runs)


def test_rows_of_other_messages(target: Target) -> None:
    """BF16 and float32 are floats first."""
    rng = RNG(1)
    index, slots = routes(rng, 20, 40)
    x = floats(20, 160, torch.float32)
    bits = {Kind.F32: x.numpy(), Kind.BF16: x.bfloat16().view(torch.int16).numpy()}
    runs = {
        kind.name: functools.partial(expanded, kind=kind, arrays=[array], index=index, slots=slots)
        for kind, array in bits.items()
    }
    assert_all_same(target, runs)


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.FP8_E8M0], ids=lambda kind: kind.name)
def test_numbers_stay_what_they_are(kind: Kind) -> None:
    """Within 14 binades of the row's largest block, or the normal range of E4M3, they do; zeros and NaN have no say."""
    rng = RNG(2)
    if kind == Kind.MXFP4:
        x = rng.standard_normal((30, 256)) * np.exp2(rng.integers(-60, 60, (30, 1)))
        arrays: Sequence[np.ndarray] = oracle.encode_mxfp4(x.astype(np.float32))
        want = oracle.decode_mxfp4(*arrays)
    else:
        x = rng.uniform(0.25, 1, (30, 256)) * np.exp2(rng.integers(-60, 60, (30, 1)))
        x[:, :128] *= rng.integers(0, 2, (30, 1))
        codes, scales = oracle.encode_fp8(x.astype(np.float32))
        want = oracle.decode_fp8(codes, scales)
        arrays = oracle.fp8_to_e8m0(codes, scales)
    index = np.arange(30)
    data, scales_of_rows = expanded(CPU, kind, arrays, index, index[:, None])
    got = FP8Rows(data, scales_of_rows).dequantize()
    np.testing.assert_array_equal(got.numpy(), want)


def turned(target: Target, kind: Kind | GemmKind, arrays: Sequence[np.ndarray], seed: int) -> list[Tensor]:
    """Scales by expert, and columns in one group and in several."""
    rng, num_rows = RNG(seed), sum(SIZES)
    ends = target.tensor(np.cumsum(SIZES).astype(np.int32))
    if kind == GemmKind.FP8_ROW:
        data, scales = (target.tensor(array) for array in arrays)
        rows, index = Rows(kind, data, scales[:, None]), None
    else:
        picked = rng.integers(-1, len(arrays[0]), num_rows)
        rows, index = target.rows(Kind.MXFP4, arrays), target.tensor(picked)
        largest = np.where(arrays[1] == NAN, 0, arrays[1]).max(axis=1).astype(int) - 6
        bytes_ = np.where(picked < 0, 1, np.maximum(largest[picked], 1))
        scales = target.tensor(np.ldexp(np.ones(num_rows), bytes_ - 127).astype(np.float32))
    of_experts, of_rows = target.backend.expert_scales(scales, ends)
    num_fewer = sum(SIZES[:-1])  # and rows after the last expert
    of_fewer, of_their_rows = target.backend.expert_scales(scales, ends[:-1].contiguous())
    all_rows = target.backend.gemm_columns(rows, index, of_rows)
    fewer = target.backend.gemm_columns(rows, index, of_their_rows, end=ends[-2:-1])
    return [
        of_experts,
        of_rows,
        of_fewer,
        of_their_rows[:num_fewer],
        all_rows,
        target.backend.gemm_columns(rows, index, of_rows, SIZES),
        fewer.view(torch.uint8).view(-1, num_rows)[:, :num_fewer],
    ]


def test_what_is_after_the_end_stays(target: Target) -> None:
    """Zeros of rows that nobody reads, and whole tiles of columns."""
    rng, hidden, end = RNG(3), 160, 140
    kinds = {kind: hard_rows(kind, rng, 100, hidden) for kind in (Kind.MXFP4, Kind.FP8_E8M0)}
    index, slots = routes(rng, 100, 300)
    index[end:], slots[slots >= end] = -1, -1
    places = [target.tensor(array) for array in (index, slots, np.array([end], np.int32))]

    def made(memory: torch.Tensor) -> list[Tensor]:
        found, untouched = [], memory.clone()
        for kind, arrays in kinds.items():
            src = target.rows(kind, arrays)
            rows = FP8Rows(memory.view(torch.float8_e4m3fn)[:300], torch.full((300,), 7.0, device=target.device))
            target.backend.expand_rows(src, rows._rows, *places[:2], end=places[2])
            found += [rows.data.view(torch.uint8).clone(), rows.scales.clone()]
        scales = torch.full((300,), 2.0**120, device=target.device)
        for src, index_or_none in ((target.rows(Kind.MXFP4, kinds[Kind.MXFP4]), places[0]), (rows._rows, None)):
            codes = untouched.clone().view(torch.float8_e4m3fn).view(-1)
            with mock.patch("torch.empty", return_value=codes):
                columns = target.backend.gemm_columns(src, index_or_none, scales, end=places[2])
            found.append(columns.view(torch.uint8)[: 300 * hidden].view(hidden, 300).t())
        return found

    fills = [torch.full((384, hidden), fill, dtype=torch.uint8, device=target.device) for fill in (0xA5, 0x5A)]
    if target.machine is not None:
        target.machine.prepare([functools.partial(made, fills[0].clone())])
    for one, other in zip(*(made(fill.clone()) for fill in fills), strict=True):
        assert torch.equal(one[:end], other[:end])
        for result, fill in ((one, fills[0]), (other, fills[1])):
            if result.ndim == 1:
                assert bool((result[end:] == 7).all())
            else:
                assert torch.equal(result[256:], fill[256:300])


def test_columns(target: Target) -> None:
    runs: dict[str, Run] = {}
    for hidden in target.pick((32, 288), (32, 288, 2048, 7168)):
        rng = RNG(hidden)
        codes = rng.integers(0, 256, (sum(SIZES), hidden)).astype(np.uint8)
        codes[7], codes[codes & 0x7F == 0x7F] = 0, 0x7F
        scales = np.ldexp(1.0, rng.integers(-30, 0, sum(SIZES))).astype(np.float32)
        scales[7] = 2.0**-126
        rows = functools.partial(turned, kind=GemmKind.FP8_ROW, arrays=(codes, scales), seed=hidden)
        packed, bytes_ = hard_mxfp4(rng, 100, hidden, spread=8)
        bytes_ = np.where(bytes_ == NAN, NAN, np.minimum(bytes_, MOST)).astype(np.uint8)
        payload = functools.partial(turned, kind=Kind.MXFP4, arrays=(packed, bytes_), seed=hidden)
        runs |= {f"rows, hidden {hidden}": rows, f"payload, hidden {hidden}": payload}
    assert_all_same(target, runs)


def transposed(target: Target, shape: tuple[int, int, int]) -> list[Tensor]:
    """Of matrices whose rows are of different sizes."""
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 0, shape[1])[:, None]
    rows = FP8Rows(*target.backend.quantize_gemm_rows(weights.to(target.device)))
    with mock.patch.object(gemm, "backend_for", return_value=target.backend):
        back = RowGemms().transposed(rows)
    torch.testing.assert_close(back.dequantize(), rows.dequantize().transpose(1, 2), rtol=0, atol=2e-5)
    return [back.data, back.scales]


def test_transposed_weights(target: Target) -> None:
    """Of one expert, too."""
    shapes = ((1, 40, 32), (1, 128, 64), (3, 40, 32), (2, 256, 288))
    assert_all_same(target, {str(shape): functools.partial(transposed, shape=shape) for shape in shapes})


def unaligned(target: Target, dtype: torch.dtype) -> list[Tensor]:
    memory = torch.arange(40 * 72, device=target.device).view(40, 72).to(dtype)
    return list(target.backend.quantize_gemm_rows(memory[:, 4:68]))


def test_rows_at_any_address(target: Target) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert_all_same(target, {str(dtype): functools.partial(unaligned, dtype=dtype)})


def test_wrong_inputs() -> None:
    with pytest.raises(InvalidArgument, match="float64"):
        quantize_fp8_rows(torch.zeros(2, 32, dtype=torch.float64))
    for width in (0, 30):
        with pytest.raises(InvalidArgument, match=rf"\[2, {width}\].*multiple of 8"):
            quantize_fp8_rows(torch.zeros(2, width))


def test_error_is_that_of_three_bits() -> None:
    x = torch.randn(50, 4096, generator=torch.Generator().manual_seed(4))
    rows = quantize_fp8_rows(x)
    assert rows.num_rows == 50
    assert rows.nbytes == 50 * 4100
    assert 0.02 < float((rows.dequantize() - x).norm() / x.norm()) < 0.03
