"""Weights that are others in every call, that change behind torch's back, or that one rank alone has wrong."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import run_ranks
from test_moe_layer import SIZES, make_layer, tokens
from test_moe_memory import made_of
from thread_ranks import run_thread_ranks
from torch import Tensor

import fp4comm
from fp4comm import ops
from fp4comm.errors import InvalidArgument
from fp4comm.moe import MoELayer
from fp4comm.moe.experts import _Operands

RECIPES = ["fp32", "fp8_flow", "fp4"]


def with_weights(layer: MoELayer, factor: float, x: Tensor) -> Tensor:
    """The layer as if the down projections were that many times as large, in memory of their own."""
    down = layer.experts.down * factor
    out: Tensor = torch.func.functional_call(layer, {"experts.down": down}, (x,))
    return out


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_of_a_single_call(recipe: str) -> None:
    """They are gone after it, and the next ones lie where they lay."""
    layer, x = make_layer(recipe=recipe), tokens()
    with torch.no_grad():
        plain = layer(x)
        for factor in (1, 2, 4, 8, 1):  # powers of two change no rounding
            torch.testing.assert_close(with_weights(layer, factor, x), factor * plain, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_has_the_weights_of_its_forward(recipe: str) -> None:
    """Not those that the module has by then."""
    layer, x = make_layer(recipe=recipe), tokens().requires_grad_()
    scaled = make_layer(recipe=recipe)
    with torch.no_grad():
        scaled.experts.down.mul_(2)
    upstream = torch.linspace(-1, 1, x.numel()).view_as(x)
    want = torch.autograd.grad(scaled(x), (x, scaled.experts.gate_up), upstream)
    out = with_weights(layer, 2, x)
    layer(x)  # makes the operands of its own weights meanwhile
    got = torch.autograd.grad(out, (x, layer.experts.gate_up), upstream)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_weights_that_are_replaced() -> None:
    """As offloading does, where new memory may begin where the old did."""
    layer, x = make_layer(recipe="fp4"), tokens()
    master = layer.experts.down.detach().clone()
    with torch.no_grad():
        plain = layer(x)
        for factor in (2, 4, 1):
            layer.experts.down.data = torch.empty(0)
            layer.experts.down.data = master * factor
            torch.testing.assert_close(layer(x), factor * plain, rtol=0, atol=0)


def test_steps_of_other_models_do_no_harm() -> None:
    layer, x = make_layer(recipe="fp4"), tokens()
    other = torch.nn.Linear(4, 4)
    other(torch.ones(4)).sum().backward()
    want = torch.autograd.grad(layer(x).sum(), layer.experts.down)
    out = layer(x)
    torch.optim.AdamW(other.parameters(), fused=True).step()
    layer(x)  # makes its operands anew, since that might have been its own
    assert torch.equal(*want, *torch.autograd.grad(out.sum(), layer.experts.down))


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_own_fused_step_before_backward_is_an_error(recipe: str) -> None:
    """As a change in place is, though torch has no new version then."""
    layer, x = make_layer(recipe=recipe), tokens()
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(x).sum().backward()
    out = layer(x)
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


def test_a_loss_that_is_kept_holds_no_operands() -> None:
    """Else each layer would have those of two steps."""

    def alive() -> int:
        return sum(type(each) is _Operands for each in gc.get_objects())

    gc.collect()
    before = alive()
    layer, x, most, losses = make_layer(recipe="fp4"), tokens(), [], []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(4):
        losses.append(layer(x).sum())
        most.append(alive() - before)
        losses[-1].backward()
        optimizer.step()
    assert most == [2, 2, 2, 2]


def test_frozen_weights_are_not_made_anew() -> None:
    layer, other = make_layer(recipe="fp4"), torch.nn.Linear(4, 4)
    layer.requires_grad_(False)
    other(torch.ones(4)).sum().backward()
    first = made_of(layer.experts, "down")
    torch.optim.SGD(other.parameters()).step()
    assert made_of(layer.experts, "down") is first
    layer.load_state_dict(layer.state_dict())
    assert made_of(layer.experts, "down") is not first


def test_saved_and_loaded_as_a_whole() -> None:
    layer, x = make_layer(recipe="fp4"), tokens()
    want, file = layer(x), io.BytesIO()
    torch.save(layer.experts, file)
    file.seek(0)
    layer.experts = torch.load(file, weights_only=False)
    assert torch.equal(layer(x), want)


def test_weights_made_in_inference_mode() -> None:
    x = tokens()
    with torch.inference_mode():
        layer = make_layer(recipe="fp4")
        first = layer(x)
        layer.experts.down.mul_(2)
        torch.testing.assert_close(layer(x), 2 * first, rtol=0, atol=0)


def test_another_default_dtype() -> None:
    layer, x = make_layer(recipe="fp4"), tokens()
    want = layer(x)
    torch.set_default_dtype(torch.float64)
    try:
        layer.experts.forget_operands()
        assert torch.equal(layer(x), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_changes_nothing(recipe: str) -> None:
    """Formats are those of the recipe, in forward, in backward and in the loss that balances."""

    def run(is_cast: bool) -> list[Tensor]:
        layer, x = make_layer(recipe=recipe), tokens().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            out = layer(x)
            (out.float().square().sum() + layer.balance).backward()
        assert layer.balance.dtype == torch.float32
        gradients = [parameter.grad for parameter in (x, *layer.parameters())]
        assert all(gradient is not None for gradient in gradients)
        return [out, layer.balance, *(gradient for gradient in gradients if gradient is not None)]

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize("convert", [torch.nn.Module.bfloat16, functools.partial(torch.nn.Module.to, dtype=torch.half)])
def test_the_bias_of_a_router_stays_float32(convert: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    router = make_layer(router={"score": "sigmoid", "has_bias": True}).router
    assert router.bias is not None
    router.bias.fill_(1 + 2**-20)
    convert(router)
    assert router.bias.dtype == torch.float32
    assert float(router.bias[0]) == 1 + 2**-20
    assert router.weight.dtype != torch.float32
    moved = copy.deepcopy(router).to("meta").bias
    assert moved is not None
    assert (moved.device.type, moved.dtype) == ("meta", torch.float32)


def test_operators_sum_with_the_weights_that_they_are_given() -> None:
    with fp4comm.EPCommunicator(None, num_experts=4, hidden=64, precision="fp32") as comm:
        x, idx = tokens(), torch.arange(2 * len(tokens())).view(-1, 2) % 4
        received, handle = ops.dispatch(comm, x, idx, torch.full(idx.shape, 0.25))
        plain = ops.combine(comm, received.x, received.topk_weights, handle)
        mask = (torch.arange(len(received.topk_weights)) % 3 > 0).float()
        masked = ops.combine(comm, received.x * mask[:, None], received.topk_weights * 2, handle)
        again = ops.combine(comm, received.x, received.topk_weights * 2 * mask, handle)
        for wrong in (received.topk_weights.bfloat16(), received.topk_weights[1:], received.topk_weights[:, None]):
            with pytest.raises(InvalidArgument, match=r"recv_topk_weights is \[.*accepted: \[40\] of torch.float32"):
                ops.combine(comm, received.x, wrong, handle)
    torch.testing.assert_close(plain, x / 2)
    torch.testing.assert_close(again, masked, rtol=0, atol=0)


# ---- weights that other ranks update ----


def losses(group: Any, how: str) -> list[float]:
    """Of six steps of a layer that is whole on every rank; the same tokens on all of them."""
    layer: Any = make_layer(recipe="fp4")
    if how == "FSDP2":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(layer.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    parameters = list(layer.parameters())
    if how == "ZeRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=group, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    found = []
    for step in range(6):
        x = torch.randn(16, SIZES["hidden"], generator=torch.Generator().manual_seed(step))
        loss = (layer(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def all_losses(group: Any) -> dict[str, list[float]]:
    return {how: losses(group, how) for how in ("plain", "FSDP2", "ZeRO")}


@pytest.mark.mpi
def test_sharded_weights_and_optimizers() -> None:
    """Both write to parameters without a new version of them; what GEMMs read is made anew after each step."""
    for found in run_ranks(all_losses, 2, launcher="torchrun", timeout=60):
        assert len(set(found["plain"])) == 6
        assert found["FSDP2"] == pytest.approx(found["plain"], rel=1e-6)
        assert found["ZeRO"] == pytest.approx(found["plain"], rel=1e-6)


# ---- on one of two ranks ----


def refused_everywhere(message: str, use: Callable[[Any, int], object]) -> None:
    """`use(group, rank)` raises on all ranks alike."""

    def run(group: Any) -> str:
        with pytest.raises(InvalidArgument) as caught:
            use(group, group.rank)
        return str(caught.value)

    found = run_thread_ranks(run, 2, timeout_secs=20)
    assert all(message in each for each in found), found


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x: x.half(), "x is [9, 64] of torch.float16"),
        (lambda x: x[:, :32], "x is [9, 32] of torch.float32"),
        (lambda x: None, "x is NoneType"),
    ],
)
def test_tokens_of_one_rank_are_wrong(wrong: Callable[[Tensor], Any], message: str, checks: bool) -> None:
    x = torch.randn(9, SIZES["hidden"])

    def run(group: Any, rank: int) -> None:
        layer = make_layer(group, check_inputs=checks)
        try:
            layer(x if rank else wrong(x))
        finally:
            for _ in range(2):  # nothing stays behind
                received, handle = layer.comm.dispatch(x, torch.zeros(9, 1, dtype=torch.int64))
                layer.comm.combine(received.x, handle)

    refused_everywhere(message, run)


def test_arguments_of_one_rank_are_wrong() -> None:
    refused_everywhere("ffn_hidden is 33", lambda group, rank: make_layer(group, ffn_hidden=32 if rank else 33))
    refused_everywhere("ffn_hidden is 32 on rank 0", lambda group, rank: make_layer(group, ffn_hidden=32 * (rank + 1)))
    with pytest.raises(InvalidArgument, match="num_shared_experts is -1"):
        make_layer(num_shared_experts=-1)
    for wrong in ({"num_max_tokens_per_rank": 4}, {"expert_alignment": 128}):
        with pytest.raises(InvalidArgument, match=f"{next(iter(wrong))} is .*that of the communicator"):
            make_layer(make_layer().comm, **wrong)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    "wrong", [{"recipe": "fp44"}, {"ffn_hidden": 33}, {"precision": "fp4"}, {"chekc_inputs": True}]
)
def test_arguments_of_one_rank_are_wrong_with_either_communicator(wrong: dict[str, Any], is_shared: bool) -> None:
    def make(group: Any, rank: int) -> object:
        return make_layer(make_layer(group).comm if is_shared else group, **({} if rank else wrong))

    (name, value), *_ = wrong.items()
    messages = {"precision": "precision is given; accepted: recipe", "chekc_inputs": "argument is 'chekc_inputs'"}
    refused_everywhere(messages.get(name, f"{name} is {value!r}"), make)


@pytest.mark.parametrize("what", ["tokens", "weights"])
def test_gradients_that_one_rank_wants_alone(what: str) -> None:
    """Backward is collective: one rank would wait for the other."""

    def run(group: Any, rank: int) -> None:
        layer, x = make_layer(group), torch.randn(9, SIZES["hidden"])
        layer.requires_grad_(what == "tokens" or rank == 1)
        layer.router.requires_grad_(what == "weights" and rank == 1)
        x.requires_grad_(what == "tokens" and rank == 1)
        layer(x)

    refused_everywhere("the ranks disagree", run)
