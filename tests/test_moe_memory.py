"""What the experts of a layer keep between forward and backward, and how often they convert numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_cases import RECIPES, make_experts, problem_of
from moe_problem import communicator
from torch import Tensor

from fp4comm import quantize_mxfp4
from fp4comm.backends import cpu
from fp4comm.errors import InvalidArgument
from fp4comm.formats import GemmKind, Kind
from fp4comm.moe import GroupedExperts, Recipe, activation_bytes, activation_bytes_per_token
from fp4comm.moe.gemm import BlockGemms, Groups, RowGemms

DEEPSEEK_V3: dict[str, int] = {"hidden": 7168, "ffn_hidden": 2048, "num_experts": 256, "num_topk": 8, "num_ranks": 2}
FLOATS = (Kind.F32, Kind.BF16, Kind.F16)


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """Of the memory behind all tensors that autograd saves while `run` runs; views count once, and as a whole."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert run().requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_those_of_the_saved_tensors(name: str, dtype: torch.dtype) -> None:
    recipe, problem = RECIPES[name], problem_of(1)
    with communicator(None, problem, recipe.precision, expert_alignment=16) as comm:
        experts = make_experts(comm, problem, recipe)
        x, idx, weights = problem.mine(0, dtype)
        received, _ = comm.dispatch(x, idx, weights)
        measured = saved_bytes(lambda: experts(x, idx, weights, comm))
        expected = activation_bytes(
            recipe,
            num_rows=received.x.shape[0],
            num_recv_tokens=len(received.topk_idx),
            num_topk=problem.num_topk,
            hidden=problem.hidden,
            ffn_hidden=experts.ffn_hidden,
            dtype=dtype,
        )
    assert measured == expected.total


def test_bytes_per_token_are_the_mean_over_random_routes() -> None:
    sizes = {"hidden": 128, "ffn_hidden": 128, "num_experts": 8, "num_topk": 3}
    num_tokens = 2000
    idx = torch.rand(num_tokens, 8, generator=torch.Generator().manual_seed(1)).argsort(dim=1)[:, :3]
    is_there = torch.stack([(idx // 2 == rank).any(dim=1) for rank in range(4)])
    measured = activation_bytes(
        "fp4",
        num_rows=3 * num_tokens,
        num_recv_tokens=float(is_there.sum()),
        **{size: sizes[size] for size in ("hidden", "ffn_hidden", "num_topk")},
    )
    expected = activation_bytes_per_token("fp4", num_ranks=4, **sizes)
    assert measured.total / num_tokens == pytest.approx(expected.total, rel=0.01)


def test_fp4_keeps_little_at_the_shape_of_deepseek_v3() -> None:
    kept = {
        name: activation_bytes_per_token(name, **DEEPSEEK_V3).total for name in ("bf16", "fp8_flow", "fp4", "fp4_all")
    }
    assert kept["fp4"] == kept["fp4_all"]
    assert kept["fp4"] <= 0.60 * kept["fp8_flow"]
    assert kept["fp4"] <= 0.40 * kept["bf16"]


def test_sizes_that_no_layer_has_are_refused() -> None:
    for wrong in ({"num_ranks": 3}, {"num_ranks": 0}, {"num_topk": 257}, {"hidden": 100}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            activation_bytes_per_token("fp4", **{**DEEPSEEK_V3, **wrong})


def test_nothing_is_kept_without_gradients() -> None:
    problem = problem_of(1)
    with communicator(None, problem, "fp4") as comm, torch.no_grad():
        experts = make_experts(comm, problem, RECIPES["fp4"])
        out = experts(*problem.mine(0), comm)
    assert not out.requires_grad


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts conversions between floats and small numbers: "quantized" and "expanded", with "swiglu" if fused there.

    What emulated GEMMs do inside is left out, since real ones read FP8.
    """
    counts: Counter[str] = Counter()
    inside: list[str] = []

    def within(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inside.append(where)
            try:
                return function(*args, **kwargs)
            finally:
                inside.pop()

        return run

    def count(src: Kind | GemmKind, dst: Kind | GemmKind) -> None:
        if "gemm" in inside or "loop" in inside or (src in FLOATS) == (dst in FLOATS):
            return
        counts[("swiglu " if "swiglu" in inside else "") + ("quantized" if src in FLOATS else "expanded")] += 1

    def counted(name: str, kinds: Callable[..., tuple[Kind | GemmKind, Kind | GemmKind]]) -> None:
        function = within("loop", getattr(cpu, name))  # which may call the others

        def run(*args: Any, **kwargs: Any) -> Any:
            count(*kinds(*args))
            return function(*args, **kwargs)

        monkeypatch.setattr(cpu, name, run)

    for name in ("convert_rows", "expand_rows", "sum_rows"):
        counted(name, lambda src, dst, *_: (src.kind, dst.kind))
    counted("pack_tokens", lambda x, send, *_: (x.kind, send.kind))
    counted("gemm_columns", lambda src, *_: (src.kind, GemmKind.FP8_ROW))
    counted("quantize_gemm_rows", lambda _: (Kind.F32, GemmKind.FP8_ROW))
    for gemms in (BlockGemms, RowGemms):
        for name in ("weights", "multiply", "weight_gradient"):
            monkeypatch.setattr(gemms, name, within("gemm", getattr(gemms, name)))
        monkeypatch.setattr(gemms, "rows", within("swiglu", gemms.rows))
    return counts


@pytest.mark.parametrize(
    "name, expected",
    [
        ("fp8_flow, blocks", {"quantized": 2, "swiglu quantized": 2}),
        ("fp8_flow", {"quantized": 2, "swiglu quantized": 2}),  # as published: tokens, and gradients of the result
        ("fp4", {"quantized": 2, "swiglu quantized": 3}),  # act is made twice
        ("bf16", {}),
        # gradients are rotated back and, as what SwiGLU gives, made FP8; both combines send small numbers, and sum them
        ("fp4_all", {"quantized": 4, "expanded": 3, "swiglu quantized": 4}),
    ],
)
def test_conversions(casts: Counter[str], name: str, expected: dict[str, int]) -> None:
    """In forward and backward; weights are converted once per step, before."""
    recipe, problem = RECIPES[name] if name in RECIPES else Recipe.of(name), problem_of(1)
    with communicator(None, problem, recipe.precision) as comm:
        experts = make_experts(comm, problem, recipe, torch.bfloat16)
        x, idx, weights = problem.mine(0, torch.bfloat16)
        out = experts(x.requires_grad_(), idx, weights.requires_grad_(), comm)
        out.backward(torch.ones_like(out))
    assert dict(casts) == expected


@pytest.mark.parametrize("gemms", [BlockGemms(), RowGemms()], ids=["block", "row"])
def test_weight_gradient_of_the_payload_is_that_of_the_fp8_rows(gemms: Any) -> None:
    """The same numbers, however they lie, so that not even the order of sums is another."""
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randn(50, 160, generator=rng) * torch.randn(50, 1, generator=rng).exp()
    payload = quantize_mxfp4(tokens)
    sizes = (32, 0, 144, 16)
    rows = torch.randint(-1, 50, (sum(sizes),), generator=rng)
    groups = Groups.of_sizes(sizes)
    forward = gemms.empty_rows(len(rows), 160, torch.device("cpu"), torch.float32)
    cpu.expand_rows(payload._rows, forward._rows, rows)
    x = forward.dequantize(torch.float32)  # what the forward GEMM read
    dy = gemms.columns(gemms.rows(torch.randn(len(rows), 96, generator=rng), torch.float32), groups)
    row_scales = forward.scales if isinstance(gemms, RowGemms) else None
    columns = gemms.payload_columns(payload, rows, row_scales, groups, torch.float32)
    got = gemms.weight_gradient(dy, columns, groups, torch.float32)
    want = [a.t() @ b for a, b in zip(dy.dequantize().split(sizes), x.split(sizes), strict=True)]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(columns.dequantize(), x, rtol=0, atol=0)


def test_columns_of_gradients_are_those_of_the_codec() -> None:
    rows = BlockGemms().rows(torch.randn(40, 160) * 1e-30, torch.float32)
    groups = Groups.of_sizes((16, 0, 24))
    got, want = BlockGemms().columns(rows, groups), rows.to_columns((16, 0, 24))
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)


def made_of(experts: GroupedExperts, name: str) -> Any:
    """What GEMMs read of the module's weights, for float32 tokens."""
    return experts._operands_of(name, getattr(experts, name), torch.float32).straight


def test_operands_are_made_once_per_step() -> None:
    problem = problem_of(1)
    with communicator(None, problem, "fp4") as comm:
        experts: GroupedExperts = make_experts(comm, problem, RECIPES["fp4"])
        first = made_of(experts, "gate_up")
        assert made_of(experts, "gate_up") is first
        x, idx, weights = problem.mine(0)
        experts(x, idx, weights, comm).sum().backward()
        for kind, is_fused in itertools.product((torch.optim.AdamW, torch.optim.SGD), (False, True)):
            kind(experts.parameters(), lr=0.1, fused=is_fused).step()
            second = made_of(experts, "gate_up")
            assert second is not first
            torch.testing.assert_close(second.dequantize(), experts.gate_up.detach(), rtol=0.07, atol=1e-3)
            first = second
        experts.gate_up.data.zero_()  # which torch doesn't notice
        experts.forget_operands()
        assert not made_of(experts, "gate_up").dequantize().any()


def test_weights_that_change_before_backward_are_noticed() -> None:
    problem = problem_of(1)
    with communicator(None, problem, "fp4") as comm:
        experts = make_experts(comm, problem, RECIPES["fp4"])
        out = experts(*problem.mine(0), comm)
        with torch.no_grad():
            experts.down.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            out.sum().backward()
