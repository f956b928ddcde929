"""What the ranks of test_megatron_recipes.py do: fp4comm's experts beside those of Megatron-Core.

`PYTHONPATH=tests torchrun --nproc-per-node 2 -m adapters.megatron_recipes` prints the tables of docs/megatron.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapters.megatron_host import HIDDEN, LENGTH, adapter, configure, gpt_model, host, moe_layer, start
from adapters.megatron_models import (
    GATED,
    RECOMPUTED,
    Training,
    average_gradients,
    compare_layers,
    compare_models,
    difference,
    gradients_of,
    is_empty,
    loss_of,
    own_share,
    own_tokens,
    set_router,
    tell_experts_apart,
    texts,
    train,
)
from torch import Tensor, nn

EXACT = {"recipe": "fp32"}
KINDS: dict[str, dict[str, Any] | None] = {"stock": None, "fp4comm": EXACT}
RECIPES = ("bf16", "fp8_flow", "fp4", "fp4_all")


def layer_cases() -> dict[str, float]:
    """The largest relative distance of a layer's results from those of Megatron's own, in all sorts of situations."""
    fixed = {**EXACT, "num_max_tokens_per_rank": 2 * LENGTH}
    length = LENGTH if dist.get_rank() == 0 else 0
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": (EXACT, {}),
        "alone": (EXACT, {"expert_parallel": 1}),
        "all experts chosen": (EXACT, {"moe_router_topk": 8}),
        "dropped tokens": (EXACT, {"moe_expert_capacity_factor": 0.5}),
        "few experts": (EXACT, {"prepare": set_router(leaves_out=3)}),
        "fixed": (fixed, {}),
        "no rows": (EXACT, {"prepare": set_router(favourites=4)}),
        "no tokens": (EXACT, {"tokens": own_tokens(length)}),
        "one expert each": (EXACT, {"num_moe_experts": 2, "moe_router_topk": 2}),
        "recomputed": (EXACT, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
        "shared experts": (EXACT, {"moe_shared_expert_intermediate_size": 48}),
        "tensor parallel": (EXACT, {"tensor_parallel": 2}),
    }
    bf16 = {"tokens": own_tokens().bfloat16(), "params_dtype": torch.bfloat16, "bf16": True}
    cases |= {recipe: ({"recipe": recipe}, bf16) for recipe in RECIPES}
    return {name: compare_layers(options, **{**GATED, **settings}) for name, (options, settings) in cases.items()}


def first_weights_are_stock() -> bool:
    """Whether a model starts from the weights that it has with Megatron's experts."""
    start(dist.get_world_size())
    stock, ours = (gpt_model(configure(**GATED), options) for options in (None, EXACT))
    return states_are_equal(stock.state_dict(), adapter().stock_state_dict(ours))


def states_are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = [name for name in one if not is_empty(name)]
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in tensors)


def layouts() -> dict[str, bool]:
    """Whether the states of Megatron's experts bring their weights, which then multiply as Megatron's would."""
    start(dist.get_world_size())
    torch.manual_seed(5)
    ours, other = (moe_layer(configure(**GATED), EXACT) for _ in range(2))
    kept = {}
    for layout in ("SequentialMLP", "TEGroupedMLP", "GroupedMLP"):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(adapter().stock_state_dict(ours, layout))
        kept[layout] = states_are_equal(ours.state_dict(), other.state_dict())
    stock = moe_layer(configure(**GATED), None)
    stock.load_state_dict(adapter().stock_state_dict(ours))
    kept["back"] = states_are_equal(stock.state_dict(), adapter().stock_state_dict(ours))
    # GroupedMLP multiplies rows by a matrix of this view.
    first = (
        adapter().stock_state_dict(ours, "GroupedMLP")["experts.weight1"].view(len(ours.experts.gate_up), HIDDEN, -1)
    )
    kept["view"] = torch.equal(first, ours.experts.gate_up.transpose(1, 2))
    return kept


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder for all ranks of a host, removed afterwards by rank 0, which made it."""
    with contextlib.ExitStack() as stack:
        is_first = dist.get_rank() == 0
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) if is_first else None]
        dist.broadcast_object_list(folders)
        yield Path(str(folders[0]))
        dist.barrier()


def checkpoints() -> dict[str, bool]:
    """Whether either kind of experts reads Megatron's distributed checkpoints of the other, also on fewer ranks."""
    checkpointing = host("dist_checkpointing")
    stand_in_for_synchronize()
    start(dist.get_world_size())
    expected, read = {}, {}
    with shared_folder() as folder:
        for saver, options in KINDS.items():
            model = gpt_model(configure(**GATED), options)
            tell_experts_apart(model)
            Path(folder, saver).mkdir(exist_ok=True)
            checkpointing.save(model.sharded_state_dict(), str(folder / saver))
            expected[saver] = own_loss(model)
        for expert_parallel, saver, reader in (
            (2, "stock", "fp4comm"),
            (2, "fp4comm", "stock"),
            (1, "stock", "fp4comm"),
            (1, "fp4comm", "fp4comm"),
        ):
            start(expert_parallel)
            other = gpt_model(configure(**GATED, init_method_std=0.1), KINDS[reader])
            other.load_state_dict(checkpointing.load(other.sharded_state_dict(), str(folder / saver)))
            is_close = abs(own_loss(other) / expected[saver] - 1) < 1e-6
            read[f"{saver} to {reader} on {expert_parallel}"] = is_close
    return read


def optimizer_states() -> dict[str, float]:
    """How far a step from a checkpoint of the other kind's leads from the saver's own: part of the change of its loss.

    The checkpoint has weights and state of Megatron's FP32 optimizer.
    """
    checkpointing = host("dist_checkpointing")
    stand_in_for_synchronize()
    start(dist.get_world_size())
    distances = {}
    for saver, reader in (("stock", "fp4comm"), ("fp4comm", "stock")):
        model = gpt_model(configure(**GATED), KINDS[saver])
        tell_experts_apart(model)
        optimizer = fp32_optimizer(model)
        for seed in range(2):
            take_step(model, optimizer, seed)
        with shared_folder() as folder:
            weights = model.sharded_state_dict()
            state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}
            checkpointing.save(state, str(folder))
            other = gpt_model(configure(**GATED, init_method_std=0.1), KINDS[reader])
            other_optimizer = fp32_optimizer(other)
            weights = other.sharded_state_dict()
            wanted = {"model": weights, "optimizer": other_optimizer.sharded_state_dict(weights, is_loading=True)}
            state = checkpointing.load(wanted, str(folder))
        other.load_state_dict(state["model"])
        other_optimizer.load_state_dict(state["optimizer"])
        before = own_loss(model)
        take_step(model, optimizer, 2)
        take_step(other, other_optimizer, 2)
        distances[reader] = abs((own_loss(other) - own_loss(model)) / (own_loss(model) - before))
    return distances


def fp32_optimizer(model: Any) -> Any:
    """Megatron's, with AdamW of torch."""
    kind = host("optimizer.optimizer").FP32Optimizer
    keys = host("optimizer.optimizer").param_group_identifier_keys  # by which groups of a checkpoint are found
    parameters = list(model.parameters())

    def begin(optimizer: torch.optim.Optimizer, config: Any) -> None:
        for parameter in parameters:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][name] = torch.zeros_like(parameter)

    adam = torch.optim.AdamW([{"params": parameters, **dict.fromkeys(keys, 1.0)}], lr=2e-3, eps=1e-5)
    optimizer = kind.__new__(kind)  # its own constructor only adds a number on a CUDA device
    super(kind, optimizer).__init__(adam, None, begin)
    optimizer.is_stub_optimizer = False
    return optimizer


def take_step(model: Any, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, texts(8, seed)[own_share()]).backward()
    average_gradients(model)
    optimizer.optimizer.step()


def own_loss(model: Any) -> float:
    with torch.no_grad():
        return float(loss_of(model, texts(8, 0)[own_share()]))


def stand_in_for_synchronize() -> None:
    if not torch.cuda.is_available():
        patch: Any = setattr
        patch(torch.cuda, "synchronize", lambda *_: None)  # before tensors are written


def data_parallel(expert_parallel: int) -> float:
    """The largest distance of gradients after Megatron's data parallelism from the means that it is to make."""
    start(expert_parallel)
    distributed = host("distributed")
    config = configure(**GATED)
    model = gpt_model(config, EXACT)
    loss_of(model, texts(8, 0)[own_share()]).backward()
    average_gradients(model)
    expected = {name: grad.clone() for name, grad in gradients_of(model).items()}
    model.zero_grad()
    options = distributed.DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=10_000)
    wrapped = distributed.DistributedDataParallel(config, options, model)
    loss_of(wrapped, texts(8, 0)[own_share()]).backward()
    wrapped.finish_grad_sync()
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    return difference(gradients_of(model), expected)


def follows_weights() -> dict[str, bool]:
    """Whether experts that quantize their weights see what optimizers wrote unnoticed, and when."""
    start(dist.get_world_size())
    layer = moe_layer(configure(**GATED), {"recipe": "fp8_flow"})
    tokens = own_tokens().requires_grad_()
    before, _ = layer(tokens)
    operands = layer.experts._operands_of("gate_up", layer.experts.gate_up, torch.float32)
    again, _ = layer(tokens)
    is_kept = layer.experts._operands_of("gate_up", layer.experts.gate_up, torch.float32) is operands
    again.sum().backward()
    layer.experts.down.data.mul_(2)
    after, _ = layer(tokens)
    after.sum().backward()
    with torch.no_grad():
        evaluated, _ = layer(tokens)
        layer.experts.down.data.mul_(2)
        evaluated_later, _ = layer(tokens)
    last, _ = layer(tokens)
    return {
        "kept": is_kept,
        "same": torch.equal(before, again),
        "twice": torch.equal(after, 2 * before),
        "evaluated before a step": torch.equal(evaluated, after),
        "evaluated after it": torch.equal(evaluated_later, 2 * evaluated),
        "twice after an evaluation": torch.equal(last, 2 * evaluated),
    }


def kept_bytes(options: dict[str, Any] | None, **settings: Any) -> int:
    """What the graph of a BF16 layer's forward pass keeps on all ranks, but for weights and what is made of them."""
    start(dist.get_world_size())
    bf16: dict[str, Any] = {"params_dtype": torch.bfloat16, "bf16": True}
    layer = moe_layer(configure(**{**GATED, **bf16, **settings}), options).bfloat16()
    x = torch.randn(64, 2, layer.config.hidden_size, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = x.bfloat16().requires_grad_()
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = layer(x)
    for node in nodes_behind(output.grad_fn):
        for tensor in tensors_in(getattr(node, "__dict__", {})):
            pack(tensor)
    total = torch.tensor(sum(storages.values()))
    dist.all_reduce(total)
    return int(total)


def nodes_behind(node: Any) -> set[Any]:
    """All of the graph from which this one gets there, with itself."""
    found, ahead = set(), [node]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [before for before, _ in node.next_functions]
    return found


def tensors_in(kept: Any) -> Iterator[Tensor]:
    """Those that an attribute of an autograd function holds, but not those of modules or communicators."""
    if isinstance(kept, Tensor):
        yield kept
    elif dataclasses.is_dataclass(kept):
        yield from tensors_in(vars(kept))
    elif isinstance(kept, dict | list | tuple):
        for part in kept.values() if isinstance(kept, dict) else kept:
            yield from tensors_in(part)


def errors() -> dict[str, str]:
    """What is said to configurations that fp4comm's experts can't have."""
    said = {}
    start(dist.get_world_size())

    def attempt(name: str, build: Callable[[], object]) -> None:
        try:
            build()
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"

    refused: dict[str, dict[str, Any]] = {
        "activation": {"activation_func": nn.functional.gelu},
        "bias": {"add_bias_linear": True},
        "clamp": {"activation_func_clamp_value": 7.0},
        "dtype": {"params_dtype": torch.float16},
        "fp8": {"fp8": "hybrid"},
        "latent": {"moe_latent_size": 32},
        "no gate": {"gated_linear_unit": False},
        "offset": {"glu_linear_offset": 1.0},
        "on input": {"moe_apply_probs_on_input": True, "moe_router_topk": 1},
        "recomputed": {"recompute_modules": ["moe_act"]},
        "wgrad": {"delay_wgrad_compute": True},
        "width": {"moe_ffn_hidden_size": 48},
    }
    for name, settings in refused.items():
        config = configure(**GATED)
        for setting, value in settings.items():  # now, since TransformerConfig wants other packages for some
            setattr(config, setting, value)
        attempt(name, lambda config=config: moe_layer(config, EXACT))  # type: ignore[misc]  # a default binds it
    layer = moe_layer(configure(**GATED), EXACT)
    attempt("singletons", lambda: layer.experts.sharded_state_dict(metadata={"singleton_local_shards": True}))
    return said


def trained() -> dict[str, Training]:
    """Megatron's experts and fp4comm's on both ranks, and the latter with all experts on each."""
    recipes = {recipe: train({"recipe": recipe}, **GATED) for recipe in ("fp8_flow", "fp4")}
    return {"stock": train(None, **GATED), **recipes, "fp4 alone": train({"recipe": "fp4"}, expert_parallel=1, **GATED)}


def on_two_ranks(group: Any) -> dict[str, Any]:
    """All that test_megatron_recipes.py looks at with two ranks, since starting them takes longest."""
    results: dict[str, Any] = {
        "model": compare_models(2, EXACT, 2, **GATED),
        "model alone": compare_models(1, EXACT, 1, **GATED),
        "recomputed model": compare_models(2, EXACT, 1, **GATED, **RECOMPUTED),
        "layers": layer_cases(),
        "first weights": first_weights_are_stock(),
        "layouts": layouts(),
        "checkpoints": checkpoints(),
        "optimizer states": optimizer_states(),
        "data parallel": {size: data_parallel(size) for size in (1, 2)},
        "follows weights": follows_weights(),
        "kept": {name: kept_bytes(options, **settings) for name, (options, settings) in KEPT.items()},
        "errors": errors(),
        "trained": trained(),
    }
    adapter().close()
    return results


# `bias_activation_fusion` is on where Megatron's training scripts don't say otherwise.
KEPT: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "SequentialMLP, fused SwiGLU": (None, {"bias_activation_fusion": True}),
    "SequentialMLP": (None, {}),
    **{f"fp4comm {recipe}": ({"recipe": recipe}, {}) for recipe in RECIPES},
}


def training_table(num_steps: int = 32) -> str:
    """What recipes do to a training, for docs/megatron.md."""
    rows = ["| top-k | experts | loss | curve from stock | dispatch bytes | all bytes |"]
    rows += ["|---|---|---:|---:|---:|---:|"]
    for num_topk, num_experts in ((2, 8), (4, 8)):
        settings = {**GATED, "moe_router_topk": num_topk, "num_moe_experts": num_experts}
        stock = train(None, num_steps, **settings)
        runs = {"Megatron's": stock, "their twin": train(None, num_steps, nudge=1e-6, **settings)}
        runs |= {f"fp4comm {recipe}": train({"recipe": recipe}, num_steps, **settings) for recipe in RECIPES}
        for name, run in runs.items():
            bytes_sent = f"{run.share('dispatch'):.3f} | {run.share():.3f}" if run.sent else " | "
            loss, curve = sum(run.losses[-8:]) / 8, run.distance(stock)
            rows += [f"| {num_topk} of {num_experts} | {name} | {loss:.4f} | {curve:.2%} | {bytes_sent} |"]
    return "\n".join(rows)


def kept_table() -> str:
    """What a layer keeps for backward, for docs/megatron.md."""
    sizes = {"hidden_size": 1024, "moe_ffn_hidden_size": 512, "num_moe_experts": 16, "moe_router_topk": 4}
    kept = {name: kept_bytes(options, **sizes, **settings) for name, (options, settings) in KEPT.items()}
    rows = ["| experts | kept per token | of fused |", "|---|---:|---:|"]
    num_tokens, fused = 128 * dist.get_world_size(), next(iter(kept.values()))
    rows += [f"| {name} | {size / num_tokens:,.0f} | {size / fused:.3f} |" for name, size in kept.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    text = f"{training_table()}\n\n{kept_table()}"
    adapter().close()
    if dist.get_rank() == 0:
        print(text)
    dist.barrier()
    dist.destroy_process_group()
