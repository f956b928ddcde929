"""SwiGLU of `fp4comm.moe`: its numbers, and those of the kernels, on a GPU and in the emulator."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cuda_emulator.emulator import emulated
from cuda_targets import CPU, Target
from torch import Tensor

from fp4comm.backends import cpu
from fp4comm.moe import FP8Rows, MoELayer, swiglu
from fp4comm.moe.gemm import BlockGemms, FloatGemms, RowGemms

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def inputs(num_rows: int, width: int, dtype: torch.dtype, wild: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """gate_up, routing weights and gradients of act; `wild`: of all magnitudes, Inf and NaN."""
    rng = torch.Generator().manual_seed(width + num_rows)
    gate_up = torch.randn(num_rows, 2 * width, generator=rng) * 3
    weights, grad = torch.rand(num_rows, generator=rng), torch.randn(num_rows, width, generator=rng)
    if wild:
        gate_up *= torch.logspace(-30, 2, num_rows)[:, None]
        gate_up[-1] = torch.linspace(-100, 100, 2 * width)
        gate_up[0, 0], gate_up[1, width], gate_up[2, 3] = torch.nan, torch.inf, -torch.inf
        gate_up[3], weights[4], grad[5, 1] = 0, 0, torch.nan
    return gate_up.to(dtype), weights, grad.to(dtype)


def test_gradients() -> None:
    """As autograd finds them in float64."""
    gate_up, weights, grad = inputs(20, 96, torch.float32)
    exact, exact_weights = gate_up.double().requires_grad_(), weights.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) * up * exact_weights[:, None]
    act.backward(grad.double())
    torch.testing.assert_close(swiglu.forward(gate_up, weights), act.float(), rtol=1e-5, atol=1e-6)
    got, got_weights = swiglu.backward(gate_up, weights, grad)
    torch.testing.assert_close(got, exact.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_weights, exact_weights.grad.float(), rtol=1e-4, atol=1e-4)


def values(written: Any) -> Tensor:
    """As float32."""
    return written.float() if isinstance(written, Tensor) else written.dequantize(torch.float32)


def run(target: Target, gemms: Any, num_rows: int, width: int, dtype: torch.dtype, makes_act: bool) -> list[Any]:
    """Results of the kernels, and on the CPU of torch's operations."""
    gate_up, weights, grad = (value.to(target.device) for value in inputs(num_rows, width, dtype, wild=num_rows > 5))
    if target.backend is cpu:
        act = swiglu.forward_rows(gate_up, weights, gemms)
        grad_gate_up, grad_weights, again = swiglu.backward_rows(gate_up, weights, grad, gemms, makes_act)
    else:
        from fp4comm.moe import cuda_swiglu

        assert cuda_swiglu.fits(gate_up, weights)
        act = cuda_swiglu.forward(gate_up, weights, gemms)
        grad_gate_up, grad_weights, again = cuda_swiglu.backward(gate_up, weights, grad, gemms, makes_act)
    assert (again is not None) == makes_act
    gate, up = gate_up.float().chunk(2, dim=1)
    sizes = (torch.nn.functional.silu(gate) * up * grad).abs().sum(dim=1)  # of what the gradient of a weight adds up
    return [act, grad_gate_up, grad_weights / sizes.clamp(min=LEAST), *([again] if makes_act else [])]


STEPS = {torch.float8_e4m3fn: 2.0**-3, torch.bfloat16: 2.0**-7, torch.float32: 2e-5}
LEAST = 1e-33  # exp(-x) is 0 from x = 88 on, and is multiplied by numbers up to 100


def assert_same_but_for_last_bits(got: Any, want: Any) -> None:
    """The exponential of a device has its own last bits, so that a few numbers are rounded to the next one."""
    data = want if isinstance(want, Tensor) else want.data
    a, b = values(got).cpu(), values(want)
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(), b.nan_to_num()
    if isinstance(want, Tensor):  # the slope of SiLU has a zero, and sums cancel
        step = 1e-5 * (b.abs().amax(dim=1, keepdim=True) if b.ndim > 1 and b.numel() else torch.ones(()))
    else:
        step = 2.0**-9 * values_of_scales(want)
    assert bool(((a - b).abs() <= STEPS[data.dtype] * b.abs() + step + LEAST).all())
    if data.dtype != torch.float32 and a.numel():
        assert float(((a != b) & (b.abs() > LEAST)).float().mean()) < 1e-3


def values_of_scales(written: Any) -> Tensor:
    """The scale of each number."""
    if isinstance(written, FP8Rows):
        return written.scales[:, None]
    return written.scales.repeat_interleave(128, dim=1)[:, : written.data.shape[1]]


GEMMS = {"floats": FloatGemms(), "blocks": BlockGemms(), "rows": RowGemms()}


def test_kernels_give_the_numbers_of_torch(target: Target) -> None:
    sizes = target.pick([(11, 128), (9, 384)], [(11, 128), (9, 384), (4097, 2048), (300, 1408), (20, 8192)])
    runs = [
        functools.partial(run, gemms=gemms, num_rows=num_rows, width=width, dtype=dtype, makes_act=width != 384)
        for num_rows, width in [*sizes, (0, 128)]
        for dtype in DTYPES.values()
        for gemms in GEMMS.values()
    ]
    if target.machine is not None:
        target.machine.prepare([functools.partial(run, target) for run in runs])
    for run_on in runs:
        for got, want in zip(run_on(target), run_on(CPU), strict=True):
            assert_same_but_for_last_bits(got, want)


def test_rows_after_the_end_stay(target: Target) -> None:
    """Their numbers are not looked at, and their memory is not written to."""
    from fp4comm.moe import cuda_swiglu

    gate_up, weights, grad = (value.to(target.device) for value in inputs(9, 384, torch.bfloat16))
    end = torch.tensor([5], dtype=torch.int32, device=target.device)

    class Filled(FloatGemms):
        def empty_rows(self, num_rows: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows, hidden), 7, device=device, dtype=dtype)

    def run_to(end: Tensor | None) -> list[Tensor]:
        act = cuda_swiglu.forward(gate_up, weights, Filled(), end)
        return [act, *cuda_swiglu.backward(gate_up, weights, grad, Filled(), True, end)]

    if target.machine is not None:
        target.machine.prepare([functools.partial(run_to, end)])
    want = run_to(None)
    gate_up[5:], weights[5:], grad[5:] = torch.nan, torch.nan, torch.nan
    for got, expected in zip(run_to(end), want, strict=True):
        assert torch.equal(got[:5], expected[:5])
        if got.ndim > 1:
            assert bool((got[5:] == 7).all())


def test_the_same_in_every_run(target: Target) -> None:
    for gemms in GEMMS.values():
        first, again = (run(target, gemms, 9, 384, torch.bfloat16, True) for _ in range(2))
        for one, other in zip(first, again, strict=True):
            assert torch.equal(values(one).nan_to_num(), values(other).nan_to_num())


@pytest.mark.parametrize("name", ["bf16", "fp8_flow", "fp4"])
def test_experts_with_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a layer give the same with and without, but for those last bits."""
    results = []
    with emulated() as machine:
        from fp4comm.moe import cuda_swiglu

        for kernels in (None, cuda_swiglu):
            monkeypatch.setattr(swiglu, "_kernels", lambda *_, kernels=kernels: kernels)
            layer = MoELayer(hidden=64, ffn_hidden=128, num_experts=4, num_topk=2, recipe=name)
            x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
            layer.experts.reset_parameters(seed=2)
            topk_idx = torch.arange(24).view(12, 2) % 4
            weights = torch.linspace(0, 1, 24).view(12, 2).requires_grad_()
            out = layer.experts(x, topk_idx, weights, layer.comm)
            out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).bfloat16())
            results.append([out, x.grad, weights.grad, *(parameter.grad for parameter in layer.experts.parameters())])
    assert {launch.name for launch in machine.launches} == {"swiglu_forward", "swiglu_backward"}
    for got, want in zip(*results, strict=True):
        got, want = got.detach().float(), want.detach().float()
        assert (got - want).norm() < 2e-3 * want.norm()


def test_what_the_kernels_do_not_take() -> None:
    with emulated():
        from fp4comm.moe import cuda_swiglu
    rows, weights = torch.zeros(4, 512), torch.zeros(4)
    assert cuda_swiglu.fits(rows, weights)
    assert not cuda_swiglu.fits(rows[:, :320], weights)
    assert not cuda_swiglu.fits(rows[:, :320].contiguous(), weights)
    assert not cuda_swiglu.fits(rows.half(), weights)
    assert not cuda_swiglu.fits(rows, torch.zeros(8)[::2])
