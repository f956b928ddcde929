"""What the ranks of test_megatron.py do: models and layers with fp4comm's dispatcher and with Megatron-Core's own.

`PYTHONPATH=tests torchrun --nproc-per-node 2 -m adapters.megatron_models` prints the table of docs/megatron.md.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from adapters.megatron_host import (
    HIDDEN,
    LENGTH,
    VOCABULARY,
    adapter,
    configure,
    exchanged,
    first_expert,
    gpt_model,
    host,
    moe_layer,
    moe_spec,
    start,
    submodules,
    watched_router,
)
from torch import Tensor, nn

GATED: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "moe_ffn_hidden_size": 64,
}
LEGS = ("dispatch", "combine", "grad_dispatch", "grad_combine")
Differences = dict[str, float]
Losses = list[float]


def texts(num_sequences: int, seed: int) -> Tensor:
    """`[num_sequences, LENGTH + 1]` sequences that can be learned: each counts on by a step of its own."""
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (num_sequences, 1), generator=random)
    step = torch.randint(1, 4, (num_sequences, 1), generator=random)
    return (first + step * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The mean over all tokens."""
    positions = torch.arange(LENGTH, device=ids.device).expand(len(ids), -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=ids.device).triu(1)
    losses: Tensor = model(ids[:, :-1], positions, mask, labels=ids[:, 1:])
    return losses.mean()


def is_expert(name: str) -> bool:
    return ".experts." in f".{name}"


def global_name(name: str, first_expert: int) -> str:
    """The name of an expert's parameter in a model that has all experts."""
    before, found, after = name.partition("local_experts.")
    number, _, rest = after.partition(".")
    return f"{before}{found}{first_expert + int(number)}.{rest}" if found else name


def copy_weights(model: Any, weights: dict[str, Tensor], config: Any) -> None:
    """Gives a model its part of the weights of one that has all of Megatron's experts."""
    first = first_expert(config)
    names = {name: global_name(name, first) for name in adapter().stock_state_dict(model) if not is_empty(name)}
    found = model.load_state_dict({name: weights[whole] for name, whole in names.items()}, strict=False)
    assert not found.unexpected_keys
    assert all(map(is_empty, found.missing_keys))


def is_empty(name: str) -> bool:
    """An entry of a state that has something with Transformer Engine only."""
    return name.endswith("_extra_state")


def gradients_of(model: Any) -> dict[str, Tensor]:
    """By the names that parameters have with Megatron's experts."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        before, _, last = name.rpartition(".")
        linear = {"gate_up": "linear_fc1", "down": "linear_fc2"}.get(last)
        if linear is not None and parameter.grad is not None:
            named = enumerate(parameter.grad)
            gradients |= {f"{before}.local_experts.{local}.{linear}.weight": grad for local, grad in named}
        elif parameter.grad is not None:
            gradients[name] = parameter.grad
    return gradients


def average_gradients(model: Any) -> None:
    """What Megatron's data parallelism does: the mean over all ranks, each with a batch of its own."""
    state, size = host("parallel_state"), dist.get_world_size()
    for name, parameter in model.named_parameters():
        group = state.get_expert_data_parallel_group() if is_expert(name) else dist.group.WORLD
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= size  # experts of other ranks have added their tokens already


class Run:
    """What a few steps of AdamW leave: losses, and the gradients of the first step by their names in a whole model.

    The eps is that of test_transformers.py, so that rounding of a gradient near zero doesn't decide on a whole step.
    """

    def __init__(self, model: Any, config: Any, batches: list[Tensor], own: slice, is_alone: bool = False) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
        self.losses: Losses = []
        self.gradients: dict[str, Tensor] = {}
        first = 0 if is_alone else first_expert(config)
        for ids in batches:
            loss = loss_of(model, ids[own])
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            if not is_alone:
                average_gradients(model)
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            if not self.gradients:
                self.gradients = {global_name(n, first): grad.clone() for n, grad in gradients_of(model).items()}
            optimizer.step()
            self.losses.append(float(mean))


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative distance of two tensors of the same name, in the Euclidean norm."""
    assert found.keys() <= expected.keys()
    distances = [
        float((one - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)) for name, one in found.items()
    ]
    assert distances
    return max(distances)


def distance(run: Run, other: Run) -> Differences:
    pairs = zip(run.losses, other.losses, strict=True)
    return {
        "losses": max(abs(one - two) / two for one, two in pairs),
        "gradients": difference(run.gradients, other.gradients),
    }


def own_share() -> slice:
    """The sequences of a batch that are this rank's."""
    return slice(dist.get_rank(), None, dist.get_world_size())


def compare_models(
    expert_parallel: int, chosen: dict[str, Any], num_steps: int = 3, **settings: Any
) -> dict[str, Differences]:
    """The distances of a model with fp4comm from one process with all experts, and from the stock dispatcher."""
    batches = [texts(8, seed) for seed in range(num_steps)]
    start(1)
    config = configure(**settings)
    alone_model = gpt_model(config, None)
    weights = {name: parameter.detach().clone() for name, parameter in alone_model.named_parameters()}
    alone = Run(alone_model, config, batches, slice(None), is_alone=True)
    start(expert_parallel)
    runs = {}
    for name, options in {"stock": None, "fp4comm": chosen}.items():
        config = configure(**settings)
        model = gpt_model(config, options)
        copy_weights(model, weights, config)
        runs[name] = Run(model, config, batches, own_share())
    return {
        "one process": distance(runs["fp4comm"], alone),
        "stock": distance(runs["fp4comm"], runs["stock"]),
        "stock from one process": distance(runs["stock"], alone),
    }


def run_layer(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """The output of a layer and its gradients, for a sum of its numbers with fixed weights."""
    x = x.clone().requires_grad_()
    output, _ = layer(x)
    random = torch.Generator().manual_seed(3)
    upstream = torch.randn(output.shape, generator=random, dtype=torch.float32)
    (output.float() * upstream).sum().backward()
    return {"output": output.detach(), "input": x.grad, **gradients_of(layer)}


def compare_layers(
    options: dict[str, Any],
    *,
    tokens: Tensor | None = None,
    prepare: Callable[[Any], object] | None = None,
    tensor_parallel: int = 1,
    expert_parallel: int | None = None,
    quantizes: bool = False,
    **settings: Any,
) -> float:
    """The largest relative distance of the results of an MoE layer with fp4comm and with the stock dispatcher."""
    start(expert_parallel or dist.get_world_size(), tensor_parallel)
    x = own_tokens() if tokens is None else tokens
    runs = []
    for chosen in (options, None):
        config = configure(**settings)
        if quantizes:  # now, since TransformerConfig asks for Transformer Engine; its layers compute as before
            config.fp8 = "hybrid"
        layer = moe_layer(config, chosen).to(x.dtype)
        tell_experts_apart(layer)
        if prepare is not None:
            prepare(layer)
        runs.append(run_layer(layer, x))
    return difference(*runs)


@torch.no_grad()
def tell_experts_apart(model: Any) -> None:
    """Those of two ranks start alike on a CPU."""
    state = host("parallel_state")
    for name, parameter in model.named_parameters():
        if is_expert(name):
            parameter.mul_(1 + state.get_expert_model_parallel_rank() / 4)


def own_tokens(length: int = LENGTH) -> Tensor:
    """`[length, 2, HIDDEN]`, other numbers on each rank."""
    return torch.randn(length, 2, HIDDEN, generator=torch.Generator().manual_seed(1 + dist.get_rank()))


def set_router(**attributes: Any) -> Callable[[Any], None]:
    """For `compare_layers`: sets attributes of `WatchedRouter`."""

    def prepare(layer: Any) -> None:
        for name, value in attributes.items():
            setattr(layer.router, name, value)

    return prepare


def need_aligned_rows(layer: Any) -> None:
    """For `compare_layers`: experts that quantize must get rows which they needn't pad, if they come from fp4comm."""

    def look(module: Any, inputs: tuple[Tensor, ...]) -> None:
        rows, counts, weights = inputs
        assert counts.sum() == len(rows) == len(weights)
        if isinstance(layer.token_dispatcher, adapter().TokenDispatcher):
            assert not (counts % 16).any()

    layer.experts.register_forward_pre_hook(look)


def layer_cases() -> dict[str, float]:
    """A layer with fp4comm beside the stock dispatcher, in all sorts of situations."""
    exact, is_first = {"precision": "fp32"}, dist.get_rank() == 0
    fixed = {**exact, "num_max_tokens_per_rank": 2 * LENGTH}
    num_ranks = dist.get_world_size()
    bf16 = {"tokens": own_tokens().bfloat16(), "params_dtype": torch.bfloat16, "bf16": True}
    glu = {"gated_linear_unit": True, "activation_func": nn.functional.silu}
    return {
        "all experts chosen": compare_layers(exact, moe_router_topk=8),
        "bf16": compare_layers({"precision": "bf16"}, **bf16),
        "biases": compare_layers(exact, add_bias_linear=True),
        "dropped tokens": compare_layers(exact, moe_expert_capacity_factor=0.5),
        "few experts": compare_layers(exact, moe_expert_capacity_factor=100.0, prepare=set_router(leaves_out=3)),
        "fixed": compare_layers(fixed),
        "fixed, one expert each": compare_layers(fixed, num_moe_experts=num_ranks, moe_router_topk=1),
        "gated": compare_layers(exact, **glu),
        "no rows": compare_layers(exact, prepare=set_router(favourites=4)),
        "no tokens": compare_layers(exact, tokens=own_tokens(LENGTH if is_first else 0)),
        "one expert each": compare_layers(exact, num_moe_experts=num_ranks, moe_router_topk=num_ranks),
        "quantizing experts": compare_layers(exact, quantizes=True, prepare=need_aligned_rows),
        "recomputed": compare_layers(exact, recompute_granularity="selective", recompute_modules=["moe"]),
        "shared experts": compare_layers(exact, moe_shared_expert_intermediate_size=48),
        "tensor parallel": compare_layers(exact, tensor_parallel=2),
        "weights on input": compare_layers(exact, moe_router_topk=1, moe_apply_probs_on_input=True),
    }


def with_partial() -> float:
    """A spec as 0.19 writes it, and one that had fp4comm with other numbers before."""
    start(dist.get_world_size())
    config = configure()
    layer_module = host("transformer.moe.moe_layer").MoELayer
    parts = submodules(moe_spec(config))
    spec = exchanged(functools.partial(layer_module, submodules=parts), {"precision": "fp4"})
    torch.manual_seed(0)
    layer = exchanged(spec, {"precision": "fp32"})(config=config, layer_number=1)
    return difference(run_layer(layer, own_tokens()), run_layer(moe_layer(config, None), own_tokens()))


def errors() -> dict[str, str]:
    """What is said to mistakes for which the ranks are needed."""
    said = {}

    def attempt(name: str, use: Callable[[], object]) -> None:
        try:
            use()
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"

    def build(config: Any, **arguments: Any) -> Any:
        return moe_layer(config, {"precision": "fp32"}, **arguments)

    def after(**settings: Any) -> Any:
        """A configuration with settings that it would want other packages for."""
        config = configure()
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    num_ranks = dist.get_world_size()
    start(num_ranks)
    attempt("hidden", lambda: build(configure(hidden_size=80)))
    attempt("flex", lambda: build(configure(moe_token_dispatcher_type="flex")))
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    attempt("padded", lambda: build(configure(**padded)))
    overlap = {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True}
    attempt("shared overlap", lambda: build(configure(**overlap)))
    attempt("overlap", lambda: build(after(overlap_moe_expert_parallel_comm=True)))
    graphs = "cuda_graph_modules" if hasattr(configure(), "cuda_graph_modules") else "cuda_graph_scope"
    attempt("graphs", lambda: build(after(cuda_graph_impl="local", **{graphs: []})))
    groups = host("transformer.moe.moe_utils").get_default_pg_collection()
    own = groups.ep
    groups.ep = dist.new_group([0])
    attempt("group", lambda: build(configure(), pg_collection=groups))
    groups.ep, groups.expt_tp = own, own
    attempt("expert tensor parallel", lambda: build(configure(), pg_collection=groups))
    greedy = build(configure())
    greedy.router.routing = lambda logits, padding_mask: (torch.ones(LENGTH, 8), torch.ones(LENGTH, 8) > 0)
    attempt("too many experts", lambda: greedy(own_tokens()[:, :1]))
    return said


@dataclass
class Training:
    """Losses, bytes that all ranks sent for each leg, and what a leg in BF16 with a row per choice would have sent."""

    losses: Losses
    sent: Counter[str]
    per_choice: int
    num_communicators: int

    def distance(self, other: Training) -> float:
        """Between two curves: the mean of their distances, as a part of the mean loss."""
        pairs = zip(self.losses, other.losses, strict=True)
        return sum(abs(one - two) for one, two in pairs) / sum(other.losses)

    def share(self, *legs: str) -> float:
        """Bytes of these legs, or all four, as a part of those in BF16 with a row per choice."""
        return sum(self.sent[leg] for leg in legs or LEGS) / (len(legs or LEGS) * self.per_choice)


def train(
    options: dict[str, Any] | None,
    num_steps: int = 8,
    *,
    nudge: float = 0.0,
    expert_parallel: int | None = None,
    **settings: Any,
) -> Training:
    """Trains a model that knows nothing, and whose weights are larger by a part `nudge`."""
    adapter().close()
    settings = {"hidden_size": 256, "init_method_std": 0.05, **settings}
    start(1)
    whole = dict(gpt_model(configure(**settings), None).named_parameters())
    start(expert_parallel or dist.get_world_size())
    config = configure(**settings)
    model = gpt_model(config, options)
    copy_weights(model, whole, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge)
    batches = [texts(16, seed) for seed in range(num_steps)]
    losses = Run(model, config, batches, own_share()).losses
    comms = adapter().communicators()
    num_sent = sum(module.num_sent for module in model.modules() if isinstance(module, watched_router()))
    own = sum((comm.traffic for comm in comms), Counter[str]()), num_sent * config.hidden_size * 2
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own)
    sent = sum((part for part, _ in of_all), Counter[str]())
    return Training(losses, sent, sum(part for _, part in of_all), len(comms))


def on_two_ranks(group: Any) -> dict[str, Any]:
    """All that test_megatron.py looks at with two ranks, since starting them takes longest."""
    exact = {"precision": "fp32"}
    results: dict[str, Any] = {
        "model": compare_models(2, exact),
        "recomputed model": compare_models(2, exact, 1, **RECOMPUTED),
        "layers": layer_cases(),
        "partial": with_partial(),
        "errors": errors(),
        "trained": {name: train(options) for name, options in (("stock", None), ("fp4", {"precision": "fp4"}))},
    }
    adapter().close()
    return results


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def on_four_ranks(group: Any) -> dict[str, Any]:
    """The same with four ranks, and groups that are not the world."""
    exact = {"precision": "fp32"}
    results = {
        "groups of two": compare_models(2, exact, 2),
        "groups of two, with a recipe": compare_models(2, {"recipe": "fp32"}, 2, **GATED),
        "layers": {
            "no rows": compare_layers(exact, prepare=set_router(favourites=4)),
            "plain": compare_layers(exact),
            "tensor parallel": compare_layers(exact, tensor_parallel=2),
            "tensor parallel, groups of two": compare_layers(exact, tensor_parallel=2, expert_parallel=2),
        },
    }
    adapter().close()
    return results


def table(num_steps: int = 32) -> str:
    """The table of docs/megatron.md."""
    rows = ["| top-k | dispatcher | loss | curve from stock | dispatch bytes | all bytes |"]
    rows += ["|---|---|---:|---:|---:|---:|"]
    for num_topk, num_experts in ((2, 8), (4, 8), (8, 16)):
        settings = {"moe_router_topk": num_topk, "num_moe_experts": num_experts}
        stock = train(None, num_steps, **settings)
        runs = {"alltoall": stock, "its twin": train(None, num_steps, nudge=1e-6, **settings)}
        for recipe in ("fp4", "fp8", "mxfp4"):
            runs[f"fp4comm {recipe}"] = train({"precision": recipe}, num_steps, **settings)
        for name, run in runs.items():
            bytes_sent = f"{run.share('dispatch'):.3f} | {run.share():.3f}" if run.sent else " | "
            loss, curve = sum(run.losses[-8:]) / 8, run.distance(stock)
            rows += [f"| {num_topk} of {num_experts} | {name} | {loss:.4f} | {curve:.2%} | {bytes_sent} |"]
    adapter().close()
    return "\n".join(rows)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    text = table()
    if dist.get_rank() == 0:
        print(text)
    dist.barrier()
    dist.destroy_process_group()
