"""What the ranks of test_torchtitan.py do: MoE layers of torchtitan with its own dispatcher and with fp4comm's."""

from __future__ import annotations

import importlib
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, LENGTH = 256, 64, 8, 4, 48
TOKENS_SHAPE = (2, LENGTH, HIDDEN)
ADAPTER = "fp4comm.adapters.torchtitan"
Results = dict[str, Tensor]


def host(module: str) -> Any:
    return importlib.import_module(f"torchtitan.{module}")


def adapter() -> Any:
    return importlib.import_module(ADAPTER)


def layer_config(hidden: int = HIDDEN, /, *, pad_multiple: int | None = None, **options: Any) -> Any:
    """A MoE layer with a dispatcher of torchtitan, replaced as a program does it if there are options."""
    parts, moe = host("models.common.config_utils"), host("models.common.moe")
    normal = {"param_init": {"weight": partial(torch.nn.init.normal_, std=0.05)}}
    experts = {f"w{i}": partial(torch.nn.init.normal_, std=0.05) for i in ("1_EFD", "2_EDF", "3_EFD")}
    routed = parts.make_routed_experts_config(
        dim=hidden,
        hidden_dim=WIDTH,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        param_init=experts,
        comm_backend="standard",
    )
    gate = host("models.common.linear").Linear.Config(
        in_features=hidden, out_features=NUM_EXPERTS, bias=False, **normal
    )
    router = moe.TokenChoiceTopKRouter.Config(
        num_experts=NUM_EXPERTS, gate=gate, top_k=TOP_K, score_func="softmax", route_norm=True
    )
    config = moe.MoE.Config(num_experts=NUM_EXPERTS, routed_experts=routed, router=router, load_balance_coeff=None)
    if pad_multiple is not None:
        padded = host("models.common.token_dispatcher").TorchAOTokenDispatcher.Config
        routed.token_dispatcher = padded(num_experts=NUM_EXPERTS, top_k=TOP_K, pad_multiple=pad_multiple)
    if options:
        apply(config, **options)
    return config


def apply(config: Any, **options: Any) -> None:
    """The override, as a program applies it."""
    overrides = host("config.override")
    chosen = overrides.OverrideConfig(imports=[(f"{ADAPTER}.token_dispatcher", options)])
    overrides.apply_overrides(chosen, config)


def layer(config: Any, mesh: Any = None) -> Any:
    """The layer; the same parameters for everyone, of which a rank of the mesh keeps its experts'."""
    torch.manual_seed(0)
    moe = config.build()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.05)
        if mesh is not None:
            experts = moe.routed_experts.inner_experts
            for name, whole in list(experts.named_parameters()):
                part = whole.chunk(mesh.size())[mesh.get_local_rank()]
                setattr(experts, name, torch.nn.Parameter(part.clone()))
            moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return moe


def tokens(rank: int) -> Tensor:
    return torch.randn(TOKENS_SHAPE, generator=torch.Generator().manual_seed(rank))


def step(moe: Any, x: Tensor, call: Any = None) -> Results:
    """The result of a layer and all gradients."""
    x = x.clone().requires_grad_()
    y = (moe if call is None else call)(x)
    y.square().mean().backward()
    found = {name: parameter.grad for name, parameter in moe.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **found}


def distance(found: Results, expected: Results) -> float:
    """The largest relative distance of two tensors of the same name, in the Euclidean norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def distance_from_one_rank(group: Any, results: Results) -> float:
    """How far the results of all ranks are from those of one process with all experts and tokens."""
    size = dist.get_world_size(group)
    whole = step(layer(layer_config()), torch.cat([tokens(rank) for rank in range(size)]))
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, results, group)
    joined = {}
    for name, expected in whole.items():
        parts = [part[name] for part in gathered]
        if name in ("y", "x"):
            joined[name] = torch.cat(parts) * (1 if name == "y" else 1 / size)  # their loss is a mean over fewer tokens
        else:
            joined[name] = (torch.cat(parts) if "experts" in name else torch.stack(parts).sum(0)) / size
        assert joined[name].shape == expected.shape
    return distance(joined, whole)


def traffic() -> Counter[str]:
    """Bytes sent by this rank since the communicators were made."""
    total: Counter[str] = sum((comm.traffic for comm in adapter().communicators()), Counter())
    return total


def checkpointed(mesh: Any, x: Tensor, config: Any) -> tuple[Results, int]:
    """A step with torchtitan's selective activation checkpointing, and how many dispatches it took."""
    moe = layer(layer_config(precision="fp32"), mesh)
    contexts = partial(create_selective_checkpoint_contexts, list(config.build().get_save_ops()))
    adapter().close()
    results = step(moe, x, lambda x: checkpoint(moe, x, use_reentrant=False, context_fn=contexts))
    sent = traffic()["dispatch"]
    with torch.no_grad():
        moe(x)
    return results, sent // (traffic()["dispatch"] - sent)


def typechecked(mesh: Any, x: Tensor) -> float:
    """How far experts' results with torchtitan's checks of layouts are from those without."""
    spmd: Any = importlib.import_module("spmd_types")
    checker: Any = importlib.import_module("spmd_types.checker")
    layouts = host("distributed.spmd_types")
    moe = layer(layer_config(precision="fp32"), mesh)
    scores, chosen, _ = moe.router(x)
    arguments = (x, scores.detach(), chosen, torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS))
    expected = moe.routed_experts(*arguments)
    adapter().close()  # to be made once more, under the checks
    host("distributed.utils").set_spmd_backend("spmd_types")
    with layouts.set_current_spmd_mesh(mesh), checker.typecheck(local=True):
        for varying in (*arguments, *moe.routed_experts.parameters()):
            spmd.assert_type(varying, {"ep": spmd.V})
        found = moe.routed_experts(*arguments)
        assert spmd.get_local_type(found) == spmd.get_local_type(x)
    host("distributed.utils").set_spmd_backend("partial_dtensor")
    return distance({"y": found}, {"y": expected})


def errors(mesh: Any) -> dict[str, str]:
    """What is said to mistakes."""
    said = {}
    wanted: dict[str, tuple[int, dict[str, Any]]] = {
        "precision": (HIDDEN, {"precision": "fp5"}),
        "option": (HIDDEN, {"precision": "fp4", "hidden": 7}),
        "tokens": (HIDDEN, {"precision": "fp4", "num_max_tokens_per_rank": 8}),
        "hidden": (80, {"precision": "fp4"}),
        "type": (HIDDEN, {"seed": "1"}),
        "list": (HIDDEN, {"seed": [1]}),
    }
    for name, (hidden, options) in wanted.items():
        try:
            layer(layer_config(hidden, **options), mesh)(tokens(0)[..., :hidden])
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def choices_elsewhere(mesh: Any, x: Tensor) -> int:
    """Choices of experts on other ranks."""
    moe = layer(layer_config(), mesh)
    _, chosen, _ = moe.router(x)
    return int((chosen // (NUM_EXPERTS // mesh.size()) != mesh.get_local_rank()).sum())


def on_ranks(group: Any) -> dict[str, Any]:
    """All that test_torchtitan.py looks at, since starting ranks takes longest."""
    host("distributed.utils").set_spmd_backend("partial_dtensor")
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),), mesh_dim_names=("ep",))
    x = tokens(dist.get_rank(group))
    stock = step(layer(layer_config(), mesh), x)
    exact = step(layer(layer_config(precision="fp32"), mesh), x)
    results: dict[str, Any] = {"stock": distance(exact, stock), "one rank": distance_from_one_rank(group, exact)}
    ways: dict[str, dict[str, Any]] = {"fixed": {"num_max_tokens_per_rank": 2 * LENGTH}, "padded": {"pad_multiple": 16}}
    for name, options in ways.items():
        results[name] = distance(step(layer(layer_config(precision="fp32", **options), mesh), x), stock)
    moe = layer(layer_config(precision="fp32"), mesh)
    results["compiled"] = distance(step(moe, x, torch.compile(moe, fullgraph=True, backend="aot_eager")), stock)
    selective = host("distributed.activation_checkpoint").SelectiveAC.Config()
    for name, config in (("checkpointed", selective), ("saved", adapter().save_exchanges(selective))):
        found, results[f"dispatches {name}"] = checkpointed(mesh, x, config)
        results[name] = distance(found, stock)
    results["typechecked"] = typechecked(mesh, x)
    results["errors"] = errors(mesh)
    adapter().close()
    fp4 = step(layer(layer_config(precision="fp4"), mesh), x)
    results["fp4"] = {name: distance({name: fp4[name]}, {name: stock[name]}) for name in stock}
    results["share of dispatch"] = traffic()["dispatch"] / (choices_elsewhere(mesh, x) * HIDDEN * 2)
    results["num_communicators"] = len(adapter().communicators())
    adapter().close()
    return results
