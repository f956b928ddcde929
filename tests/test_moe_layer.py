"""`MoELayer`: the parts together, as a module."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_problem import TIMEOUT_SECS
from thread_ranks import run_thread_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp4comm
from fp4comm.errors import InvalidArgument, NotAvailable
from fp4comm.moe import MoELayer, Recipe
from fp4comm.moe.gemm import BlockGemms, FloatGemms, RowGemms, gemms_for
from fp4comm.moe.shared import Lane, SharedExperts, can_start
from fp4comm.moe.weights import quantize_fp8_blocks

SIZES: dict[str, Any] = {"hidden": 64, "ffn_hidden": 32, "num_experts": 6, "num_topk": 2}
NUM_TOKENS = (20, 0, 7)  # by rank


@torch.no_grad()
def make_layer(group: Any = None, **options: Any) -> MoELayer:
    """A layer whose weights depend on nothing else: ranks that are threads share torch's random numbers."""
    communicator = {} if isinstance(group, fp4comm.EPCommunicator) else {"timeout_secs": TIMEOUT_SECS}
    layer = MoELayer(group, **{**SIZES, "dtype": torch.float32, **communicator, **options})
    generator = torch.Generator().manual_seed(9)
    for name, parameter in layer.named_parameters():
        if not name.startswith("experts."):
            parameter.uniform_(-0.125, 0.125, generator=generator)
    layer.experts.reset_parameters(seed=9)
    return layer


def tokens(rank: int = 0) -> Tensor:
    return torch.randn(NUM_TOKENS[rank], SIZES["hidden"], generator=torch.Generator().manual_seed(10 + rank))


def dense(layers: list[MoELayer], x: Tensor) -> Tensor:
    """The layer as a sum over all experts, by autograd in the dtype of x."""
    routes = layers[0].router(x.float())
    logits = x @ layers[0].router.weight.to(x.dtype).t()
    weights = logits.softmax(dim=1).gather(1, routes.topk_idx)
    weights = weights / weights.sum(dim=1, keepdim=True)
    gates = torch.zeros_like(logits).scatter(1, routes.topk_idx, weights)
    out = torch.zeros_like(x)
    experts = [pair for layer in layers for pair in zip(layer.experts.gate_up, layer.experts.down, strict=True)]
    for expert, (gate_up, down) in enumerate(experts):
        gate, up = (x @ gate_up.to(x.dtype).t()).chunk(2, dim=1)
        out = out + gates[:, expert, None] * ((torch.nn.functional.silu(gate) * up) @ down.to(x.dtype).t())
    shared = layers[0].shared
    if shared is not None:
        gate, up = (x @ shared.gate_up.weight.to(x.dtype).t()).chunk(2, dim=1)
        out = out + (torch.nn.functional.silu(gate) * up) @ shared.down.weight.to(x.dtype).t()
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_fp32_is_the_sum_over_all_experts(num_ranks: int) -> None:
    """Forward and all gradients, as autograd finds them in float64; a rank has no tokens."""

    def run(group: Any) -> tuple[MoELayer, Tensor, Tensor]:
        layer = make_layer(group, recipe="fp32", num_shared_experts=1)
        x = tokens(group.rank).requires_grad_()
        out = layer(x)
        out.square().sum().backward()
        layer.close()
        return layer, x, out

    results = run_thread_ranks(run, num_ranks)
    layers = [layer for layer, _, _ in results]
    grads = [[parameter.grad for parameter in layer.parameters()] for layer in layers]
    for layer in layers:
        layer.zero_grad()
    x = torch.cat([x.detach() for _, x, _ in results]).double().requires_grad_()
    want = dense(layers, x)
    want.square().sum().backward()
    torch.testing.assert_close(torch.cat([out for *_, out in results]), want.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([x.grad for _, x, _ in results]), x.grad.float(), rtol=1e-3, atol=1e-4)
    names = [name for name, _ in layers[0].named_parameters()]
    for at, name in enumerate(names):
        of_ranks = [parts[at] for parts in grads]
        parameters = [dict(layer.named_parameters())[name] for layer in layers]
        if name.startswith("experts."):  # each rank has its own, complete
            for got, parameter in zip(of_ranks, parameters, strict=True):
                torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-4, msg=name)
        else:  # replicated: parts of a sum
            torch.testing.assert_close(sum(of_ranks), parameters[0].grad, rtol=1e-3, atol=1e-4, msg=name)


def test_finite_differences() -> None:
    """Along random directions of the tokens and of every weight; with all experts, so that choices do not jump."""
    layer, x = make_layer(recipe="fp32", num_shared_experts=1, num_topk=SIZES["num_experts"]), tokens()
    generator = torch.Generator().manual_seed(11)
    upstream = torch.randn(x.shape, generator=generator).double()

    def loss(tokens: Tensor) -> Tensor:
        return (layer(tokens).double() * upstream).sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    step = 2e-3
    for value in (leaf, *layer.parameters()):
        direction = torch.randn(value.shape, generator=generator) * value.detach().std()
        with torch.no_grad():
            around = []
            for sign in (1, -1):
                value += sign * step * direction
                around.append(loss(leaf).item())
                value -= sign * step * direction
        slope = (value.grad.double() * direction).sum().item()
        assert (around[0] - around[1]) / (2 * step) == pytest.approx(slope, rel=2e-2, abs=0.05)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow", "fp4", "fp4_all"])
@pytest.mark.parametrize("capacity", [None, 32])
def test_every_recipe_learns(recipe: str, capacity: int | None) -> None:
    """A few steps of all ranks bring the loss down; ranks without tokens take part."""

    def run(group: Any) -> list[float]:
        layer = make_layer(group, recipe=recipe, num_max_tokens_per_rank=capacity, num_shared_experts=1)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
        x, losses = tokens(group.rank).bfloat16(), []
        target = tokens(group.rank).flip(1)
        for _ in range(25):
            out = layer(x)
            assert out.dtype == torch.bfloat16
            loss = (out.float() - target).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        layer.close()
        return losses

    losses = [sum(of_step) for of_step in zip(*run_thread_ranks(run, 2), strict=True)]
    assert losses[-1] < 0.7 * losses[0], losses


def test_no_tokens_on_any_rank() -> None:
    def run(group: Any) -> None:
        layer = make_layer(group, recipe="fp4")
        x = torch.zeros(0, SIZES["hidden"], requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert all(not parameter.grad.any() for parameter in layer.parameters())
        layer.close()

    run_thread_ranks(run, 2)


def test_frozen_parts_get_no_gradient() -> None:
    """Whatever subset needs a gradient gets what it gets with all others."""
    names = ["x", "router.weight", "experts.gate_up", "experts.down"]

    def gradients(wanted: tuple[str, ...]) -> dict[str, Tensor | None]:
        layer = make_layer(recipe="fp4")
        values = {"x": tokens().requires_grad_(), **dict(layer.named_parameters())}
        for name, value in values.items():
            value.requires_grad_(name in wanted)
        layer(values["x"]).sum().backward()
        return {name: value.grad for name, value in values.items()}

    everything = gradients(tuple(names))
    for count in (1, 2, 3):
        for wanted in itertools.combinations(names, count):
            for name, grad in gradients(wanted).items():
                if name not in wanted:
                    assert grad is None
                elif name == "x" and "router.weight" not in wanted:
                    assert grad is not None  # still through the router
                else:
                    torch.testing.assert_close(grad, everything[name], rtol=0, atol=0)


def test_shapes_backward_twice_and_checkpoints() -> None:
    layer = make_layer(recipe="fp4", num_shared_experts=2)
    x = tokens().view(4, 5, -1).requires_grad_()
    out = layer(x)
    assert out.shape == x.shape
    out.sum().backward(retain_graph=True)
    first = [value.grad.clone() for value in (x, *layer.parameters())]
    out.sum().backward()
    again = [value.grad.sub(grad) for value, grad in zip((x, *layer.parameters()), first, strict=True)]
    layer.zero_grad()
    x.grad = None
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    for grad, other, value in zip(first, again, (x, *layer.parameters()), strict=True):
        torch.testing.assert_close(other, grad)
        torch.testing.assert_close(value.grad, grad, rtol=0, atol=0)
    assert layer.num_tokens_per_expert.sum() == 2 * 20
    assert layer.balance.item() > 0.5


def test_state_dict() -> None:
    layer = make_layer(recipe="fp4", num_shared_experts=1, router={"score": "sigmoid", "has_bias": True})
    state = layer.state_dict()
    assert set(state) == {
        "router.weight",
        "router.bias",
        "experts.gate_up",
        "experts.down",
        "shared.gate_up.weight",
        "shared.down.weight",
    }
    other = make_layer(recipe="fp4", num_shared_experts=1, router={"score": "sigmoid", "has_bias": True})
    other.experts.reset_parameters(seed=1)
    x = tokens()
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))


def results(run: Callable[[Tensor], Tensor], layer: MoELayer, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Result and all gradients."""
    x = tokens().to(dtype).requires_grad_()
    layer.zero_grad()
    out = run(x)
    out.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def both_at_once(layer: MoELayer) -> Callable[[Tensor], Tensor]:
    """The layer's forward where shared experts start before the routed ones, as on GPUs."""
    return lambda x: layer._both_at_once(x, layer.router(x))


def test_shared_experts_that_start_first_give_the_same_bits() -> None:
    layer = make_layer(recipe="bf16", num_shared_experts=2)
    for dtype in (torch.float32, torch.bfloat16):
        expected, found = results(layer, layer, dtype), results(both_at_once(layer), layer, dtype)
        assert len(found) == 7
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("is_cast", [False, True])
def test_gradients_of_shared_experts_that_start_first(is_cast: bool) -> None:
    """Whatever subset needs one, of tokens and weights in different dtypes, under autocast or without."""
    shared = SharedExperts(64, 96, dtype=torch.float32)

    def run(forward: Callable[[Tensor], Tensor], wanted: tuple[bool, ...]) -> list[Tensor | None]:
        values = (tokens() if is_cast else tokens().bfloat16(), *shared.parameters())
        for value, is_wanted in zip(values, wanted, strict=True):
            value.grad = None
            value.requires_grad_(is_wanted)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
            out = forward(values[0])
        assert out.dtype == torch.bfloat16
        out.backward(torch.linspace(-1, 1, 64).to(out).expand(out.shape))
        return [out.detach(), *(value.grad for value in values)]

    for wanted in itertools.product([False, True], repeat=3):
        if any(wanted):
            expected, found = run(shared, wanted), run(lambda x: shared.start(x).result(), wanted)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_shared_experts_are_enqueued_first_and_waited_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, also of a checkpoint, which goes forward once more."""
    done: list[str] = []

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **options: Any) -> Any:
            if done[-1:] != [name]:
                done.append(name)
            return call(*args, **options)

        return record

    for owner, name in ((Lane, "fork"), (Lane, "join"), (RowGemms, "multiply")):
        monkeypatch.setattr(owner, name, recorded(name, getattr(owner, name)))
    layer = make_layer(recipe="fp4", num_shared_experts=1)
    once = ["fork", "multiply", "join"]
    results(both_at_once(layer), layer)
    assert done == 2 * once
    done.clear()
    results(lambda x: checkpoint(both_at_once(layer), x, use_reentrant=False), layer)
    assert done == 3 * once


def test_shared_experts_with_hooks_or_replaced_are_called() -> None:
    layer: Any = make_layer(num_shared_experts=1)
    assert can_start(layer.shared)
    hook = layer.shared.register_forward_hook(lambda *args: None)
    assert not can_start(layer.shared)
    hook.remove()
    assert can_start(layer.shared)
    layer.shared.forward = layer.shared.forward  # as libraries attach hooks of theirs
    assert not can_start(layer.shared)
    layer.shared = torch.nn.Identity()
    assert not can_start(layer.shared)
    assert layer(tokens()).shape == tokens().shape
    assert not can_start(make_layer().shared)


def test_copies_share_the_communicator() -> None:
    """Also after forward, whose balance is no leaf; operands of the weights are the copy's own."""
    layer = make_layer(recipe="fp4", num_shared_experts=1)
    expected = results(layer, layer)
    copied: Any = copy.deepcopy(torch.nn.Sequential(layer))[0]
    assert copied.comm is layer.comm
    assert torch.equal(copied.balance, layer.balance)
    assert all(map(torch.equal, results(copied, copied), expected))
    with torch.no_grad():
        copied.experts.down.zero_()
        copied.shared.down.weight.zero_()
    assert not copied(tokens()).any()
    assert all(map(torch.equal, results(layer, layer), expected))
    copied.close()
    layer(tokens())
    layer.close()
    with pytest.raises(fp4comm.Fp4CommError, match="closed"):
        copied(tokens())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does that
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # and reads this
def test_compiled_layers_give_the_same_bits() -> None:
    """Exchange and experts are a break in the graph. Nothing looks into them: torch would warn of what it finds."""
    layer = make_layer(recipe="fp4", num_shared_experts=1)
    expected = results(layer, layer)
    compiled = torch.compile(layer, backend="eager")
    for _ in range(2):
        assert all(map(torch.equal, results(compiled, layer), expected))


def test_weights_do_not_depend_on_the_number_of_ranks() -> None:
    def run(group: Any) -> Tensor:
        layer = make_layer(group)
        layer.experts.reset_parameters(seed=3)
        layer.close()
        return layer.experts.gate_up.detach()

    whole, parts = run_thread_ranks(run, 1)[0], run_thread_ranks(run, 3)
    assert torch.equal(torch.cat(parts), whole)
    assert len({float(expert.sum()) for expert in whole}) == SIZES["num_experts"]


def test_layers_share_a_communicator() -> None:
    first = make_layer(recipe="fp4")
    second = make_layer(first.comm, recipe="fp4")
    second.close()
    assert second.comm is first.comm
    second(first(tokens())).sum().backward()
    for wrong in ({"recipe": "bf16"}, {"hidden": 96}, {"num_experts": 12}, {"seed": 3}):
        with pytest.raises(InvalidArgument):
            make_layer(first.comm, **wrong)
    first.close()
    with pytest.raises(fp4comm.Fp4CommError, match="closed"):
        second(tokens())


def test_what_is_of_the_last_forward() -> None:
    layer = MoELayer(**SIZES, recipe="bf16")
    for name in ("balance", "num_tokens_per_expert"):
        with pytest.raises(AttributeError, match=f"{name} is that of the last forward; call the layer first"):
            getattr(layer, name)
    with pytest.raises(AttributeError, match="no attribute 'weights'"):
        _ = layer.weights


def test_wrong_arguments_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "fp2"}, "recipe is 'fp2'"),
        ({"ffn_hidden": 40}, "ffn_hidden is 40"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"gemms": "fast"}, "gemms is 'fast'"),
        ({"num_topk": 7}, "num_topk is 7"),
    ]
    for options, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            make_layer(**options)
    with pytest.raises(NotAvailable, match=r"compute capability 9\.0"):
        make_layer(gemms="tensor_cores")
    with pytest.raises(InvalidArgument, match=r"x is \[\d+, 64\] of torch.float16"):
        make_layer()(tokens().half())
    for wrong, message in [
        ({"experts": "int8"}, "experts is 'int8'"),
        ({"keeps": "nothing"}, "keeps is 'nothing'"),
        ({"scaling": "tensor"}, "scaling is 'tensor'"),
        ({"precision": "bf16"}, "keeps is 'payload'"),
        ({"precision": fp4comm.Precision(fp4comm.Leg("mxfp4", hadamard=True))}, "rotated"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            Recipe(**wrong)


def test_gemms_are_chosen_by_what_there_is() -> None:
    cpu = torch.device("cpu")
    kinds = {"bf16": FloatGemms, "fp4": RowGemms, Recipe(scaling="block"): BlockGemms}
    for recipe, kind in kinds.items():
        assert isinstance(gemms_for(Recipe.of(recipe), "auto", cpu, (64, 32), 1, False), kind)


def test_blocks_of_weights() -> None:
    """The smallest scale without saturation; zeros, broken blocks and ragged edges."""
    weights = torch.randn(2, 200, 160) * torch.logspace(-30, 30, 200)[:, None]
    weights[0, :128, :128] = 0
    weights[0, 0, 0], weights[0, 1, 1] = 448.0, -448.0
    weights[1, 150, 150] = float("inf")
    blocks = quantize_fp8_blocks(weights)
    assert blocks.scales.shape == (2, 2, 2)
    assert blocks.scales[0, 0, 0] == 1
    values = blocks.dequantize()
    assert torch.equal(values[0, :128, :128], weights[0, :128, :128])
    assert values[1, 150, 150].isnan()
    largest = weights[1, :128, :128].abs().max()
    assert largest / 448 <= blocks.scales[1, 0, 0] < 2 * largest / 448
    assert torch.equal(blocks.transposed().dequantize().nan_to_num(), values.transpose(1, 2).nan_to_num())
    for wrong in (weights[0], weights.int()):
        with pytest.raises(InvalidArgument, match="weights"):
            quantize_fp8_blocks(wrong)
