"""The GEMMs of Hopper on operands of the CPU: what torch's functions would be given, by the rules of their source."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4comm import quantize_mxfp4
from fp4comm.backends import Rows, cpu
from fp4comm.moe import FP8Rows, gemm
from fp4comm.moe.gemm import BlockGemms, FloatGemms, FP8Turned, Groups, RowGemms, ScaledGemms

SIZES = (32, 0, 144, 16)
NUM_ROWS = sum(SIZES)


class ScaledMM:
    """Takes the place of `torch._scaled_mm`: refuses layouts that torch does, and multiplies in float32.

    Scales of 128x128 are read as cuBLAS does, each row at a multiple of four numbers, whatever their strides say.

    Args:
        padding: torch demands strides of a multiple of so many numbers for them.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(
        self, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, *, out_dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert out.dtype == out_dtype
        return out.copy_(self.numbers(a, a_scales) @ self.numbers(b.t(), b_scales.t()).t())

    def numbers(self, data: Tensor, scales: Tensor) -> Tensor:
        n, k = data.shape
        blocks = -(-k // 128)
        by_rows = scales.shape == (n, blocks)
        if not by_rows:
            assert scales.shape == (-(-n // 128), blocks)
        strides = (1, n) if by_rows else (-(-blocks // self.padding) * self.padding, 1)
        for size, stride, wanted in zip(scales.shape, scales.stride(), strides, strict=True):
            assert size == 1 or stride == wanted
        if not by_rows:
            read = scales.as_strided(scales.shape, (-(-blocks // 4) * 4, 1))
            scales = read.repeat_interleave(128, 0)[:n]
        return data.float() * scales.repeat_interleave(128, 1)[:, :k]


def results(gemms: Any, num_rows: int = NUM_ROWS) -> list[Tensor]:
    """Rows, gradients of rows, and gradients of weights from rows and from a payload."""
    rng = torch.Generator().manual_seed(1)
    x, dy = torch.randn(num_rows, 384, generator=rng), torch.randn(num_rows, 256, generator=rng)
    weights = gemms.weights(torch.randn(len(SIZES), 256, 384, generator=rng), torch.float32)
    groups = Groups.of_sizes(SIZES, num_rows)
    rows = gemms.rows(x, torch.float32), gemms.rows(dy, torch.float32)
    columns = [gemms.columns(part, groups) for part in rows]
    payload, order = quantize_mxfp4(x), torch.arange(num_rows)
    arrived = gemms.empty_rows(num_rows, 384, torch.device("cpu"), torch.float32)
    cpu.expand_rows(payload._rows, Rows.of(arrived) if isinstance(arrived, Tensor) else arrived._rows, order)
    row_scales = arrived.scales if isinstance(gemms, RowGemms) else None
    of_payload = gemms.payload_columns(payload, order, row_scales, groups, torch.float32)
    return [
        gemms.multiply(rows[0], weights, groups, torch.float32)[:NUM_ROWS],
        gemms.multiply(rows[1], gemms.transposed(weights), groups, torch.float32)[:NUM_ROWS],
        gemms.weight_gradient(columns[1], columns[0], groups, torch.float32),
        gemms.weight_gradient(columns[1], of_payload, groups, torch.float32),
    ]


@pytest.mark.parametrize("num_rows", [NUM_ROWS, NUM_ROWS + 64])
@pytest.mark.parametrize("padding", [1, 4])
def test_what_hopper_is_given(padding: int, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", ScaledMM(padding))
    monkeypatch.setattr(gemm, "_wants_padded_scales", lambda: padding > 1)
    for got, want in zip(results(ScaledGemms(), num_rows), results(BlockGemms(), num_rows), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """Takes the place of `torch._scaled_grouped_mm`: refuses what torch does, and multiplies in float32."""
    assert offs[-1] <= (a.shape[0] if b.ndim == 3 else a.shape[1])
    assert (a.dtype, b.dtype) == (torch.float8_e4m3fn,) * 2
    assert (offs.dtype, a_scales.dtype, b_scales.dtype) == (torch.int32, torch.float32, torch.float32)
    assert out_dtype == torch.bfloat16
    assert a.is_contiguous()
    assert b.transpose(-2, -1).is_contiguous()
    assert a.shape[-1] % 16 == b.shape[-1] % 16 == 0
    ends = [0, *offs.tolist()]
    if b.ndim == 3:
        assert a_scales.shape == a.shape[:1]
        assert b_scales.shape == (b.shape[0], b.shape[2])
        y = torch.full((a.shape[0], b.shape[2]), torch.nan)
        for e, (start, end) in enumerate(itertools.pairwise(ends)):
            y[start:end] = (a[start:end].float() @ b[e].float()) * a_scales[start:end, None] * b_scales[e]
        return y
    assert a_scales.shape == (len(offs) * a.shape[0],)
    assert b_scales.shape == (len(offs) * b.shape[1],)
    assert all(end % 16 == 0 for end in ends)
    parts = [a[:, start:end].float() @ b[start:end].float() for start, end in itertools.pairwise(ends)]
    return torch.stack(parts) * a_scales.view(len(offs), -1, 1) * b_scales.view(len(offs), 1, -1)


@pytest.mark.parametrize("num_rows", [NUM_ROWS, NUM_ROWS + 64])
def test_what_grouped_gemms_are_given(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    on_tensor_cores = results(RowGemms(on_tensor_cores=True), num_rows)
    for got, want in zip(on_tensor_cores, results(RowGemms(), num_rows), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_long_sums_are_made_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    quick: list[bool] = []

    def record(a: Tensor, b: Tensor, *_: Tensor, use_fast_accum: bool, **__: Any) -> Tensor:
        quick.append(use_fast_accum)
        return torch.empty(a.shape[0], b.shape[-1])

    monkeypatch.setattr(torch, "_scaled_grouped_mm", record)
    gemms = RowGemms(on_tensor_cores=True)
    for num_rows, n, k in ((512, 16, 2048), (512, 16, 2064), (512, 2048, 2048), (496, 2048, 2048), (496, 2032, 2048)):
        x, weights = FP8Rows.empty(num_rows, k), FP8Rows(torch.empty(1, n, k), torch.ones(1, n))
        gemms.multiply(x, weights, Groups.of_sizes((num_rows,)), torch.bfloat16)
    assert quick == [True, False, True, False, True]
    quick.clear()
    for sizes, capacity, num_sources in (
        ((2048, 16), None, 1),
        ((2064, 0), None, 1),
        ((2064, 16), 4096, 1),  # of sizes that the host doesn't know, the mean counts
        ((2048, 16), 4112, 1),
        ((2048, 16), 4 * 4096, 4),  # a capacity for all that four ranks may send
        ((2048, 16), 4 * 4112, 4),
    ):
        groups, num_rows = Groups.of_sizes(sizes), capacity or sum(sizes)
        groups = groups if capacity is None else Groups(groups.ends, num_rows, None, num_sources)
        turned = FP8Turned(torch.empty(32, num_rows), torch.ones(2), torch.ones(num_rows))
        gemms.weight_gradient(turned, turned, groups, torch.bfloat16)
    assert quick == [True, False, True, False, True, False]


@pytest.mark.parametrize("gemms", [BlockGemms(), RowGemms()], ids=["block", "row"])
def test_emulation_is_close_to_floats(gemms: Any) -> None:
    for got, want in zip(results(gemms), results(FloatGemms()), strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() < 0.06 * want.norm()


def test_rows_of_very_different_sizes() -> None:
    """All rows of an expert under one scale: small ones lose what is small beside the largest, but only that."""
    gemms, rng = RowGemms(), torch.Generator().manual_seed(3)
    x = torch.randn(64, 128, generator=rng)
    x[1], x[2], x[3] = x[1] * 2**-6, x[2] * 2**-30, 0
    rows = gemms.rows(x, torch.float32)
    assert rows.scales[3] == 2.0**-126
    assert float((rows.dequantize() - x).norm(dim=1)[:3].div(x.norm(dim=1)[:3]).max()) < 0.04
    columns = gemms.columns(rows, Groups.of_sizes((32, 32)))
    assert columns.scales.tolist() == [float(rows.scales[:32].max()), float(rows.scales[32:].max())]
    got = columns.dequantize()
    torch.testing.assert_close(got[[0, 1]], rows.dequantize()[[0, 1]], rtol=0, atol=2.0**-10 * float(columns.scales[0]))
    assert not got[2:4].any()
    assert torch.equal(got[32:].abs().amax(1) > 0, torch.ones(32, dtype=torch.bool))


def test_groups_of_fixed_shapes_need_no_sizes() -> None:
    """Where groups are multiples of 128 rows, columns of all rows at once hold the same tiles."""
    gemms, rng = BlockGemms(), torch.Generator().manual_seed(2)
    known = Groups.of_sizes((128, 0, 256), 512)
    unknown = Groups(known.ends, 512)
    assert unknown.column_sizes == (512,)
    assert unknown.sizes == known.sizes
    rows = gemms.rows(torch.randn(512, 128, generator=rng), torch.float32)
    together, apart = gemms.columns(rows, unknown).dequantize(), gemms.columns(rows, known).dequantize()
    assert torch.equal(together[:384], apart)
