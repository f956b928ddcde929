"""The codec's edge: shapes that work, and errors that say what was received and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_same_bits, hard_floats, hard_fp8, hard_mxfp4, on_device
from torch import Tensor

from fp4comm.codec import FP8Columns, FP8Tensor, MXFP4Columns, MXFP4Tensor, quantize_fp8, quantize_mxfp4
from fp4comm.errors import InvalidArgument, NotAvailable

RNG = np.random.default_rng
E4M3 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def u8(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, **options)


def f32(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, dtype=torch.float32, **options)


def e4m3(*shape: int, **options: Any) -> Tensor:
    return u8(*shape, **options).view(E4M3)


MXFP4 = MXFP4Tensor(u8(4, 48), u8(4, 3))
FP8 = FP8Tensor(e4m3(4, 160), f32(4, 2))


@pytest.mark.usefixtures("device")
class TestEmpty:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_no_rows(self, dtype: torch.dtype) -> None:
        x = on_device(np.zeros((0, 160), np.float32)).to(dtype)
        y, z = quantize_mxfp4(x, stochastic=True, hadamard=True), quantize_fp8(x)
        assert (y.packed.shape, y.scales.shape) == ((0, 80), (0, 5))
        assert (z.data.shape, z.scales.shape) == ((0, 160), (0, 2))
        for result in (y.dequantize(dtype), z.dequantize(dtype), y.to_fp8().data, quantize_mxfp4(z).dequantize()):
            assert result.shape == (0, 160)

    @pytest.mark.parametrize("groups", [None, (), (0,), (0, 0, 0)])
    def test_no_rows_in_any_group(self, groups: tuple[int, ...] | None) -> None:
        x = MXFP4Tensor(*(on_device(np.zeros((0, n), np.uint8)) for n in (80, 5)))
        for columns in (x.to_fp8_columns(groups), x.to_fp8().to_columns(groups)):
            assert columns.scales.shape == (0, 160)
            assert columns.data.shape == (0,)
            assert columns.dequantize().shape == (0, 160)
            for i in range(len(columns.num_rows_per_expert)):
                assert columns.expert(i)[0].shape == (160, 0)
        mxfp4_columns = x.to_mxfp4_columns(groups)
        assert mxfp4_columns.dequantize().shape == (0, 160)
        assert mxfp4_columns.nbytes == 0


@pytest.mark.usefixtures("device")
class TestStrides:
    def test_rows_of_a_wider_buffer(self) -> None:
        """Data and scales as views of message rows, at odd byte offsets, give the results of packed ones."""
        plain = MXFP4Tensor(*map(on_device, hard_mxfp4(RNG(0), 200, 160)))
        buffer = on_device(np.zeros((200, 111), np.uint8))
        packed, scales = buffer[:, 3:83], buffer[:, 83:88]
        packed.copy_(plain.packed)
        scales.copy_(plain.scales)
        x = MXFP4Tensor(packed, scales)
        assert_same_bits(x.dequantize(torch.float32), plain.dequantize(torch.float32))
        assert_same_bits(x.to_fp8().data, plain.to_fp8().data)
        assert_same_bits(x.to_fp8_columns((7, 193)).data, plain.to_fp8_columns((7, 193)).data)
        assert_same_bits(x.to_mxfp4_columns((7, 193)).packed, plain.to_mxfp4_columns((7, 193)).packed)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_float_rows(self, dtype: torch.dtype) -> None:
        wide = on_device(hard_floats(RNG(1), 60, 288)).to(dtype)
        for view in (wide[:, 96:192], wide[:, 5:133], wide[::3, :96], wide.t()[:96, :32], wide[:1].expand(7, 288)):
            one, other = quantize_mxfp4(view), quantize_mxfp4(view.contiguous())
            assert_same_bits(one.packed, other.packed)
            assert_same_bits(one.scales, other.scales)
            assert_same_bits(quantize_fp8(view).data, quantize_fp8(view.contiguous()).data)

    def test_fp8_rows(self) -> None:
        codes, scales = hard_fp8(RNG(2), 90, 288, power_of_two=True)
        data, fp8_scales = on_device(codes).view(E4M3), on_device(scales)
        view = FP8Tensor(data[::2, 128:256], fp8_scales[::2, 1:2])
        packed = FP8Tensor(data[::2, 128:256].contiguous(), fp8_scales[::2, 1:2].contiguous())
        assert_same_bits(quantize_mxfp4(view).packed, quantize_mxfp4(packed).packed)
        assert_same_bits(view.dequantize(torch.float32), packed.dequantize(torch.float32))
        assert_same_bits(view.to_columns().data, packed.to_columns().data)


@pytest.mark.gpu
def test_results_lie_where_the_input_does() -> None:
    x = torch.ones((40, 160), device="cuda")
    y, z = quantize_mxfp4(x), quantize_fp8(x)
    results = [y.packed, y.scales, z.data, z.scales, y.dequantize(), z.dequantize(), y.to_fp8().scales]
    for columns in (y.to_fp8_columns((3, 37)), z.to_columns((3, 37))):
        results += [columns.data, columns.scales, columns.dequantize(), *columns.expert(1)]
    mxfp4_columns = y.to_mxfp4_columns((3, 37))
    results += [mxfp4_columns.packed, mxfp4_columns.scales, mxfp4_columns.dequantize()]
    assert {result.device for result in results} == {x.device}


def test_sizes() -> None:
    assert (MXFP4.hidden, MXFP4.num_rows, MXFP4.nbytes) == (96, 4, 4 * 51)
    assert (FP8.hidden, FP8.num_rows, FP8.nbytes) == (160, 4, 4 * 168)
    fp8_columns, mxfp4_columns = MXFP4.to_fp8_columns((1, 3)), MXFP4.to_mxfp4_columns((1, 3))
    assert (fp8_columns.hidden, fp8_columns.num_rows, fp8_columns.nbytes) == (96, 4, 4 * 96 + 4 * 2 * 96)
    assert (mxfp4_columns.hidden, mxfp4_columns.num_rows, mxfp4_columns.nbytes) == (96, 4, 17 * 2 * 96)
    assert FP8Tensor.empty(3, 96).scales.shape == (3, 1)


@pytest.mark.usefixtures("device")
def test_inputs_stay_as_they_were() -> None:
    x = on_device(hard_floats(RNG(3), 20, 96))
    before = x.clone()
    quantize_mxfp4(x, hadamard=True, stochastic=True)
    quantize_fp8(x)
    assert_same_bits(x, before)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    # x of the two quantizers
    "list": (lambda: quantize_mxfp4([[1.0] * 32]), r"x is a list; accepted: a torch\.Tensor"),
    "float64": (lambda: quantize_mxfp4(torch.zeros(1, 32, dtype=torch.float64)), r"x is of dtype torch\.float64; acc"),
    "int": (lambda: quantize_fp8(torch.zeros(1, 32, dtype=torch.int32)), r"x is of dtype torch\.int32; accepted"),
    "1-D": (lambda: quantize_mxfp4(torch.zeros(32)), r"x is of shape \[32\]; accepted: two dim"),
    "3-D": (lambda: quantize_fp8(torch.zeros(2, 2, 32)), r"x is of shape \[2, 2, 32\]; accepted"),
    "hidden 48": (lambda: quantize_mxfp4(torch.zeros(2, 48)), r"hidden of x is 48; accepted: a multiple of 32"),
    "hidden 0": (lambda: quantize_fp8(torch.zeros(2, 0)), r"hidden of x is 0; accepted: a multiple of 32"),
    "fp8 to fp8": (lambda: quantize_fp8(FP8), r"x is an FP8Tensor; accepted"),
    "scale mode": (lambda: quantize_mxfp4(f32(1, 32), scale_mode="ceil"), r"scale_mode is 'ceil'; accepted: 'floor'"),
    "seed -1": (lambda: quantize_mxfp4(f32(1, 32), seed=-1), r"seed is -1; accepted: an integer from 0"),
    "seed 2**64": (lambda: quantize_mxfp4(f32(1, 32), seed=2**64), r"seed is 18446744073709551616; accepted"),
    "seed True": (lambda: quantize_mxfp4(f32(1, 32), seed=True), r"seed is True; accepted"),
    "seed 1.0": (lambda: quantize_mxfp4(f32(1, 32), seed=1.0), r"seed is 1\.0; accepted"),
    "dequantize dtype": (lambda: MXFP4.dequantize(torch.float64), r"dtype is torch\.float64; accepted: torch\.float32"),
    "fp8 dequantize dtype": (lambda: FP8.dequantize(torch.int8), r"dtype is torch\.int8; accepted"),
    "dequantize seed": (lambda: MXFP4.dequantize(hadamard=True, seed=-5), r"seed is -5; accepted"),
    # MXFP4Tensor
    "packed dtype": (
        lambda: MXFP4Tensor(f32(4, 48), u8(4, 3)),
        r"packed is of dtype torch\.float32; accepted: torch\.uint8",
    ),
    "packed hidden": (lambda: MXFP4Tensor(u8(4, 40), u8(4, 3)), r"hidden of packed is 80; accepted"),
    "packed 1-D": (lambda: MXFP4Tensor(u8(48), u8(3)), r"packed is of shape \[48\]; accepted"),
    "packed strides": (lambda: MXFP4Tensor(u8(48, 4).t(), u8(4, 3)), r"packed is .*strid.*\(1, 4\).*; accepted"),
    "scales dtype": (lambda: MXFP4Tensor(u8(4, 48), f32(4, 3)), r"scales is of dtype torch\.float32; accepted"),
    "scales width": (lambda: MXFP4Tensor(u8(4, 48), u8(4, 4)), r"scales is of shape \[4, 4\]; accepted: \[4, 3\]"),
    "scales rows": (lambda: MXFP4Tensor(u8(4, 48), u8(3, 3)), r"scales is of shape \[3, 3\]; accepted: \[4, 3\]"),
    "scales strides": (lambda: MXFP4Tensor(u8(4, 48), u8(3, 4).t()), r"scales is .*strid.*; accepted"),
    "scales device": (lambda: MXFP4Tensor(u8(4, 48), u8(4, 3, device="meta")), r"scales is on meta; accepted: cpu"),
    # FP8Tensor
    "data dtype": (
        lambda: FP8Tensor(u8(4, 160), f32(4, 2)),
        r"data is of dtype torch\.uint8; accepted: torch\.float8_e4m3fn",
    ),
    "data e5m2": (
        lambda: FP8Tensor(u8(4, 32).view(torch.float8_e5m2), f32(4, 1)),
        r"data is of dtype torch\.float8_e5m2",
    ),
    "data hidden": (lambda: FP8Tensor(e4m3(4, 100), f32(4, 1)), r"hidden of data is 100; accepted"),
    "fp8 scales width": (
        lambda: FP8Tensor(e4m3(4, 160), f32(4, 1)),
        r"scales is of shape \[4, 1\]; accepted: \[4, 2\]",
    ),
    "fp8 scales dtype": (lambda: FP8Tensor(e4m3(4, 160), u8(4, 2)), r"scales is of dtype torch\.uint8; accepted"),
    "fp8 scales device": (
        lambda: FP8Tensor(e4m3(4, 32), f32(4, 1, device="meta")),
        r"scales is on meta; accepted: cpu",
    ),
    # groups
    "groups too few": (lambda: MXFP4.to_fp8_columns((1, 2)), r"num_rows_per_expert is \[1, 2\]; accepted: .* rows, 4"),
    "groups too many": (lambda: FP8.to_columns((4, 1)), r"num_rows_per_expert is \[4, 1\]; accepted: .* rows, 4"),
    "groups negative": (
        lambda: MXFP4.to_mxfp4_columns((5, -1)),
        r"num_rows_per_expert is \[5, -1\]; accepted: non-neg",
    ),
    "groups none": (lambda: MXFP4.to_fp8_columns(()), r"num_rows_per_expert is \[\]; accepted: .* rows, 4"),
    "groups no integers": (
        lambda: MXFP4.to_fp8_columns((1.7, 2.3)),
        r"num_rows_per_expert is \[1\.7, 2\.3\]; accepted: non-negative integers",
    ),
    "groups no sequence": (lambda: FP8.to_columns(1.7), r"num_rows_per_expert is 1\.7; accepted: non-neg"),
    "groups text": (lambda: MXFP4.to_mxfp4_columns("13"), r"num_rows_per_expert is '13'; accepted: non-neg"),
    "groups float tensor": (
        lambda: MXFP4.to_fp8_columns(torch.tensor([1.0, 3.0]), torch.arange(4)),
        r"num_rows_per_expert is \[1\.0, 3\.0\]; accepted: non-neg",
    ),
    "groups scalar tensor": (lambda: MXFP4.to_fp8_columns(torch.tensor(4)), r"num_rows_per_expert is 4; accepted"),
    "columns scale mode": (lambda: MXFP4.to_mxfp4_columns(scale_mode="best"), r"scale_mode is 'best'; accepted"),
    "expert": (lambda: MXFP4.to_fp8_columns((1, 3)).expert(2), r"expert is 2; accepted: 0 to 1"),
    "expert of mxfp4": (lambda: MXFP4.to_mxfp4_columns((1, 3)).expert(-1), r"expert is -1; accepted: 0 to 1"),
    # column types
    "columns data": (lambda: FP8Columns(e4m3(64), f32(1, 32), (3,)), r"data is of shape \[64\]; accepted: \[96\]"),
    "columns dtype": (lambda: FP8Columns(u8(96), f32(1, 32), (3,)), r"data is of dtype torch\.uint8; accepted"),
    "columns scales": (lambda: FP8Columns(e4m3(96), f32(2, 32), (3,)), r"scales is of 2 rows; accepted: 1 row"),
    "columns device": (
        lambda: FP8Columns(e4m3(96, device="meta"), f32(1, 32), (3,)),
        r"data is on meta; accepted: cpu",
    ),
    "mxfp4 columns": (lambda: MXFP4Columns(u8(512), u8(64), (3,), 32), r"scales is of shape \[64\]; accepted: \[32\]"),
    "mxfp4 columns packed": (lambda: MXFP4Columns(u8(51), u8(32), (3,), 32), r"packed is of shape \[51\]; accepted"),
}


@pytest.mark.parametrize("sizes", [[1, 2], np.array([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 2]).int()])
def test_row_counts_of_every_kind(device: torch.device, sizes: Any) -> None:
    x = MXFP4Tensor(u8(4, 48, device=device), u8(4, 3, device=device))
    rows = torch.tensor([3, -1, 0, 2], device=device)  # the last one beyond the groups
    sizes = sizes.to(device) if isinstance(sizes, Tensor) else sizes
    assert x.to_fp8_columns(sizes, rows).num_rows_per_expert == (1, 2)
    assert x.to_fp8_rows_and_columns(sizes, rows)[1].num_rows_per_expert == (1, 2)
    assert x.to_fp8_columns(sizes[:0], rows).num_rows == 0
    assert FP8Tensor(x.to_fp8().data[:3], x.to_fp8().scales[:3]).to_columns(sizes).num_rows_per_expert == (1, 2)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32])
def test_seeds_of_numpy(kind: Callable[[int], Any]) -> None:
    x = torch.linspace(-3, 3, 320).reshape(10, 32)
    one, other = (quantize_mxfp4(x, stochastic=True, hadamard=True, seed=seed) for seed in (3, kind(3)))
    assert_same_bits(one.packed, other.packed)
    assert_same_bits(one.dequantize(hadamard=True, seed=3), other.dequantize(hadamard=True, seed=kind(3)))


@pytest.mark.parametrize("call, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.5, 2.0**-127, float("inf"), float("nan"), 2.0**127 * 1.5])
def test_columns_need_power_of_two_scales(device: torch.device, scale: float) -> None:
    scales = f32(4, 2, device=device)
    scales[2, 1] = scale
    x = FP8Tensor(e4m3(4, 160, device=device), scales)
    on_cpu, on_gpu = r"scales\[2, 1\] is .*; accepted: positive normal powers of two", "1 FP8 scales are not positive"
    with pytest.raises(InvalidArgument, match=on_cpu if device.type == "cpu" else on_gpu):
        x.to_columns((1, 3))
    quantize_mxfp4(x)  # takes any scale


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize_mxfp4(f32(2, 32, device="meta")),
        lambda: quantize_fp8(f32(2, 32, device="meta")),
        lambda: MXFP4Tensor(u8(4, 48, device="meta"), u8(4, 3, device="meta")).to_fp8_columns(),
        lambda: FP8Tensor(e4m3(4, 32, device="meta"), f32(4, 1, device="meta")).dequantize(),
    ],
)
def test_other_devices(call: Callable[[], object]) -> None:
    with pytest.raises(NotAvailable, match="meta"):
        call()
