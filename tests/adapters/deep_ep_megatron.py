"""What two ranks do to test DeepEP's interface: all cases, then Megatron-Core's own flex dispatcher over it.

On the CPU Megatron's router needs a stand-in, since it moves its weights to a CUDA device.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import torch
import torch.distributed as dist
from adapters import deep_ep_cases
from torch import Tensor, nn

from fp4comm.adapters import deep_ep

HIDDEN, NUM_EXPERTS, NUM_TOPK, NUM_STEPS = 64, 4, 2, 20
NUM_TOKENS = (24, 10)  # of each rank
HAVE_MEGATRON = importlib.util.find_spec("megatron") is not None
Differences = dict[str, float]


def host(name: str) -> Any:
    """A module of megatron.core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages that aren't there
        return importlib.import_module(f"megatron.core.{name}")


def on_two_ranks(group: dist.ProcessGroup) -> tuple[dict[str, str], dict[str, Any]]:
    """What failed of the cases, and what Megatron does, if it is there."""
    failures = deep_ep_cases.run_cases(group)
    return failures, on_megatron(group) if HAVE_MEGATRON and not failures else {}


def on_megatron(group: dist.ProcessGroup) -> dict[str, Any]:
    deep_ep.install(precision="fp32")
    host("parallel_state").initialize_model_parallel(expert_model_parallel_size=group.size())
    results: dict[str, Any] = {"exact": compare(a_layer()), "one-sided": compare(a_layer(favours_first_rank=True))}
    deep_ep.close()
    for precision in ("fp32", "fp4"):
        deep_ep.install(precision=precision)  # for buffers made from now on
        host("transformer.moe.fused_a2a")._buffer = None
        results[f"losses {precision}"], results[f"traffic {precision}"] = train(a_layer())
        deep_ep.close()
    results["late"] = install_late()
    host("parallel_state").destroy_model_parallel()
    return results


def a_layer(favours_first_rank: bool = False) -> Any:
    """A MoE layer of this rank, the same parameters in every run."""
    layers, moe = host("tensor_parallel.layers"), host("transformer.moe.moe_layer")
    config = host("transformer.transformer_config").TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        ffn_hidden_size=48,
        moe_ffn_hidden_size=48,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=NUM_TOPK,
        expert_model_parallel_size=dist.get_world_size(),
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="deepep",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=True,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=False,
        bias_activation_fusion=False,
    )

    class Router(host("transformer.moe.router").TopKRouter):  # type: ignore[misc]  # of the host
        def gating(self, input: Tensor) -> Tensor:
            logits = nn.functional.linear(input, self.weight)
            is_first = torch.arange(NUM_EXPERTS) < NUM_EXPERTS // dist.get_world_size()
            return logits + 100.0 * is_first if favours_first_rank else logits

    mlp = host("transformer.mlp").MLPSubmodules(
        linear_fc1=layers.ColumnParallelLinear, linear_fc2=layers.RowParallelLinear
    )
    sequential = host("transformer.moe.experts").SequentialMLP
    experts = host("transformer.spec_utils").ModuleSpec(sequential, submodules=mlp)
    layer = moe.MoELayer(config, moe.MoESubmodules(experts=experts, router=Router))
    assert type(layer.token_dispatcher).__name__ == "MoEFlexTokenDispatcher"
    with torch.no_grad():
        for i, (name, parameter) in enumerate(layer.named_parameters()):
            generator = torch.Generator().manual_seed(0 if "router" in name else 10 * dist.get_rank() + i)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer


def tokens(rank: int) -> Tensor:
    return torch.randn(NUM_TOKENS[rank], 1, HIDDEN, generator=torch.Generator().manual_seed(rank))


def compare(layer: Any) -> Differences:
    """Output and gradients beside those of a layer that has all experts."""
    rank = dist.get_rank()
    x = tokens(rank).requires_grad_()
    out = layer(x)[0]
    out.backward(torch.cos(tokens(rank)))
    experts = all_experts(layer)
    xs = [tokens(other).requires_grad_() for other in range(dist.get_world_size())]
    router = layer.router.weight.detach().clone().requires_grad_()
    outs = [dense(layer, inputs, router, experts) for inputs in xs]
    own = torch.autograd.grad(outs[rank], [xs[rank], router], torch.cos(tokens(rank)), retain_graph=True)
    first = rank * len(experts) // dist.get_world_size()
    mine = experts[first : first + len(experts) // dist.get_world_size()]
    flat = [weight for pair in mine for weight in pair]
    wanted = torch.autograd.grad(
        outs, flat, [torch.cos(tokens(other)) for other in range(len(outs))], allow_unused=True
    )
    got = [weight.grad for pair in local_experts(layer) for weight in pair]
    pairs = [(a, torch.zeros_like(w) if b is None else b) for a, b, w in zip(got, wanted, flat, strict=True)]
    differences = {
        "output": distance(out, outs[rank]),
        "x": distance(x.grad, own[0]),
        "router": distance(layer.router.weight.grad, own[1]),
        "experts": max(distance(torch.zeros_like(b) if a is None else a, b) for a, b in pairs),
    }
    return differences


def local_experts(layer: Any) -> list[tuple[Tensor, Tensor]]:
    return [(mlp.linear_fc1.weight, mlp.linear_fc2.weight) for mlp in layer.experts.local_experts]


def all_experts(layer: Any) -> list[tuple[Tensor, Tensor]]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [tuple(w.detach() for w in pair) for pair in local_experts(layer)])
    return [tuple(w.requires_grad_() for w in pair) for part in gathered for pair in part]


def dense(layer: Any, x: Tensor, router: Tensor, experts: list[tuple[Tensor, Tensor]]) -> Tensor:
    flat = x.reshape(-1, HIDDEN)
    logits = nn.functional.linear(flat, router) + layer.router.gating(torch.zeros(1, HIDDEN))
    weights, chosen = torch.softmax(logits, dim=-1).topk(NUM_TOPK, dim=-1)
    out = torch.zeros_like(flat)
    for expert, (up, down) in enumerate(experts):
        weight = (weights * (chosen == expert)).sum(1, keepdim=True)
        out = out + weight * nn.functional.linear(nn.functional.gelu(nn.functional.linear(flat, up)), down)
    return out.view(x.shape)


def distance(a: Tensor | None, b: Tensor) -> float:
    assert a is not None
    error, size = (a - b).norm().item(), b.norm().item()
    return error / size if size else error


def train(layer: Any) -> tuple[list[float], dict[str, int]]:
    """Loss of each step, and bytes sent by leg, of this rank. The router's gradients are not added up over ranks."""
    x = tokens(dist.get_rank())
    target = torch.sin(3 * x)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(NUM_STEPS):
        loss = (layer(x)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (comm,) = deep_ep.communicators()
    return losses, dict(comm.traffic)


def install_late() -> str:
    """Megatron was imported without: what installing after it says."""
    deep_ep.uninstall()
    host("transformer.moe.fused_a2a").HAVE_DEEP_EP = False
    try:
        deep_ep.install()
    except ValueError as error:
        return str(error)
    return "no error"
