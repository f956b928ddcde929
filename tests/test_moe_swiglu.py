"""SwiGLU of `fp4comm.moe`: its numbers, and the bits of the kernels, on a GPU and in the emulator."""

from __future__ import annotations

import functools

import pytest
import torch
from cuda_emulator.emulator import emulated
from cuda_targets import Target, assert_all_same
from nvrtc_log import compiler_log, missing
from torch import Tensor

from fp4comm.codec import FP8Tensor, quantize_fp8
from fp4comm.moe import MoELayer, swiglu

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


def test_logistic() -> None:
    x = torch.cat([torch.linspace(-86, 86, 200_001), torch.tensor([0.0, -0.0, 1e-40, 200.0, -200.0])])
    value, complement = swiglu._logistic(x)
    exact = torch.sigmoid(x.double())
    inside = x.abs() <= 86
    assert ((value - exact) / exact)[inside].abs().max() < 1e-6
    assert ((complement - torch.sigmoid(-x.double())) / torch.sigmoid(-x.double()))[inside].abs().max() < 1e-6
    assert (value[-2:] - exact[-2:]).abs().max() < 1e-37
    assert swiglu._logistic(torch.tensor([torch.nan]))[0].isnan()


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


def parts(written: Tensor | FP8Tensor, is_fp8: bool, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of one dtype, with one bit pattern for NaN, as FP8 or rounded."""
    if isinstance(written, FP8Tensor):
        return [written.data, written.scales]
    if is_fp8:
        return parts(quantize_fp8(written), True, dtype)
    rounded = written.to(dtype)
    return [torch.where(rounded.isnan(), torch.full_like(rounded, torch.nan), rounded)]


def run(target: Target, num_rows: int, width: int, dtype: torch.dtype, is_fp8: bool, makes_act: bool) -> list[Tensor]:
    gate_up, weights, grad = (value.to(target.device) for value in inputs(num_rows, width, dtype, wild=num_rows > 5))
    if target.backend.__name__.endswith("cpu"):
        act = swiglu.forward(gate_up, weights)
        grad_gate_up, grad_weights = swiglu.backward(gate_up, weights, grad)
        return [
            *parts(act, is_fp8, dtype),
            *parts(grad_gate_up, is_fp8, dtype),
            *parts(grad_weights, False, torch.float32),
            *(parts(act, is_fp8, dtype) if makes_act else []),
        ]
    from fp4comm.moe import cuda_swiglu

    assert cuda_swiglu.fits(gate_up, weights)
    first = cuda_swiglu.forward(gate_up, weights, is_fp8)
    *gradients, again = cuda_swiglu.backward(gate_up, weights, grad, is_fp8, makes_act)
    results = [first, *gradients, *([again] if makes_act else [])]
    return [
        part
        for result in results
        for part in parts(result, False, result.dtype if isinstance(result, Tensor) else dtype)
    ]


def test_kernels_give_the_bits_of_torch(target: Target) -> None:
    sizes = target.pick([(11, 128), (9, 384)], [(11, 128), (9, 384), (4097, 2048), (300, 1408)])
    runs = {
        f"{num_rows} x {width} {name} {'fp8' if is_fp8 else 'float'}": functools.partial(
            run, num_rows=num_rows, width=width, dtype=dtype, is_fp8=is_fp8, makes_act=width != 384
        )
        for num_rows, width in sizes
        for name, dtype in DTYPES.items()
        for is_fp8 in (True, False)
    }
    runs["no rows"] = functools.partial(run, num_rows=0, width=128, dtype=torch.bfloat16, is_fp8=True, makes_act=True)
    assert_all_same(target, runs)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_compile_without_a_warning(architecture: str) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with emulated():
        from fp4comm.backends import cuda_compile
    for source in (0, 1):
        for destination in (source, 3):
            constants = {"FFN": 2048, "SRC_KIND": source, "DST_KIND": destination, "WITH_ACT": source}
            options = cuda_compile.options(tuple(constants.items()))
            added = ("-ftz=true", f"-arch={architecture}", "--device-as-default-execution-space")
            assert not compiler_log('#include "swiglu.cu"\n', options + added)


@pytest.mark.parametrize("name", ["bf16", "fp8_flow", "fp4"])
def test_experts_with_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a layer have the same bits with and without."""
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
        assert torch.equal(got, want)


def test_what_the_kernels_do_not_take() -> None:
    with emulated():
        from fp4comm.moe import cuda_swiglu
    rows, weights = torch.zeros(4, 512), torch.zeros(4)
    assert cuda_swiglu.fits(rows, weights)
    assert not cuda_swiglu.fits(rows[:, :320], weights)
    assert not cuda_swiglu.fits(rows[:, :320].contiguous(), weights)
    assert not cuda_swiglu.fits(rows.half(), weights)
    assert not cuda_swiglu.fits(rows, torch.zeros(8)[::2])
