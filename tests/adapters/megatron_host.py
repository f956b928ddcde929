"""Tiny models and layers of Megatron-Core on machines without GPUs, with its own dispatcher and with fp4comm's."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HIDDEN = 64
VOCABULARY = 64
LENGTH = 16


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Imports Megatron without words about optional packages and without torch's compiler.

    It has small functions compiled; to import the compiler takes longer than all the rest.
    """

    def as_it_is(function: Any = None, **options: Any) -> Any:
        return as_it_is if function is None else function

    compiler: Callable[..., Any] = torch.compile
    patch: Any = setattr
    patch(torch, "compile", as_it_is)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        patch(torch, "compile", compiler)


def host(name: str) -> Any:
    """A module of megatron.core."""
    with quick_import():
        return importlib.import_module(f"megatron.core.{name}")


def adapter() -> Any:
    """The module under test."""
    with quick_import():
        return importlib.import_module("fp4comm.adapters.megatron")


@functools.cache
def stand_in() -> None:
    """Puts something simple in place of what Megatron does with Transformer Engine or on CUDA devices only.

    Nothing of it is for fp4comm's dispatcher.
    """
    patch: Any = setattr
    # Without Transformer Engine the gate of 0.16.1 misses a name, and that of 0.19.2 takes no empty batch.
    patch(host("transformer.moe.router").Router, "gating", plain_gate)
    if not torch.cuda.is_available():
        stand_in_for_cuda(patch)


def plain_gate(router: Any, input: Tensor) -> Tensor:
    return nn.functional.linear(input, router.weight.to(input.dtype), router.bias)


def stand_in_for_cuda(patch: Any) -> None:
    patch(torch.cuda, "current_device", lambda: torch.device("cpu"))  # where results of collectives and routers go
    random = host("tensor_parallel.random")
    patch(random.CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext())  # dropout in attention
    patch(random, "_get_all_rng_states", lambda: (torch.get_rng_state(),))  # of recomputed activations
    patch(random, "_set_all_rng_states", torch.set_rng_state)
    stock = host("transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    patch(stock, "cuda_dtoh_stream", object())  # keeps its constructor from making a CUDA stream

    def to_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        """Its copies to the host, which leave CPU tensors as they are, while all-to-alls want lists."""
        for name in ("input_splits", "output_splits"):
            splits = getattr(self, name)
            if isinstance(splits, Tensor):
                setattr(self, name, splits.tolist())
        return tokens_per_expert

    patch(stock, "_maybe_dtoh_and_synchronize", to_host)


@functools.cache
def watched_router() -> Any:
    """Megatron's router, for tests that want other choices or to count them."""

    class WatchedRouter(host("transformer.moe.router").TopKRouter):  # type: ignore[misc]  # of the host
        favourites = 0
        """So many experts, the first ones, are so dear to it that nobody takes any other. 0 = none."""
        leaves_out = 0
        """Every so manieth of the pairs of token and expert is dropped. 0 = none."""
        num_sent = 0
        """Choices so far of experts on other ranks."""

        def gating(self, input: Tensor) -> Tensor:
            logits: Tensor = super().gating(input)
            dear = torch.arange(self.num_experts, device=input.device) < self.favourites
            return logits + 100 * dear.to(logits.dtype)

        def routing(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            probs, routing_map = super().routing(*args, **kwargs)
            if self.leaves_out:
                pairs = torch.arange(routing_map.numel(), device=probs.device).view_as(routing_map)
                routing_map = routing_map & (pairs % self.leaves_out != 0)
                probs = probs * routing_map
            own = slice(first_expert(self.config), first_expert(self.config, 1))
            self.num_sent += int(routing_map.sum() - routing_map[:, own].sum())
            return probs, routing_map

    return WatchedRouter


def start(expert_parallel: int, tensor_parallel: int = 1) -> None:
    """Megatron's process groups, anew if they are others than before; of those, no communicator may be in use."""
    stand_in()
    state = host("parallel_state")
    sizes = expert_parallel, tensor_parallel
    if state.model_parallel_is_initialized() and sizes == sizes_now():
        return
    adapter().close()
    groups = {id(group): group for group in vars(state).values() if isinstance(group, dist.ProcessGroup)}
    state.destroy_model_parallel()
    for group in groups.values():  # each has threads, of which hundreds make all slow
        with contextlib.suppress(ValueError):  # Megatron has destroyed some already
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
    )


def sizes_now() -> tuple[int, int]:
    """Ranks that share the experts of a layer, and those that share its other matrices."""
    state = host("parallel_state")
    return state.get_expert_model_parallel_world_size(), state.get_tensor_model_parallel_world_size()


def configure(**settings: Any) -> Any:
    """A `TransformerConfig` of three small layers; the settings replace or add to its own."""
    state = host("parallel_state")
    fields: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": 96,
        "moe_ffn_hidden_size": 48,
        "num_moe_experts": 8,
        "moe_router_topk": 3,
        "moe_layer_freq": [0, 1, 1],
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",  # loss trackers live on CUDA devices
        "moe_router_pre_softmax": True,  # weights do not add up to 1: those of all experts count
        "init_method_std": 0.2,  # so that experts have a say in the loss
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "sequence_parallel": state.get_tensor_model_parallel_world_size() > 1,
        "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "params_dtype": torch.float32,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return host("transformer.transformer_config").TransformerConfig(**{**fields, **settings})


def first_expert(config: Any, ranks_ahead: int = 0) -> int:
    """Of this rank, or of one further on in its group."""
    rank = int(host("parallel_state").get_expert_model_parallel_rank()) + ranks_ahead
    return rank * int(config.num_moe_experts) // int(config.expert_model_parallel_size)


def moe_spec(config: Any) -> Any:
    """The spec of an MoE layer alone."""
    spec = host("models.gpt.moe_module_specs").get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    submodules(spec).router = watched_router()
    return spec


def block_spec(config: Any) -> Any:
    """The specs of all layers of a model."""
    spec = host("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        if hasattr(submodules(layer.submodules.mlp), "router"):
            submodules(layer.submodules.mlp).router = watched_router()
    return spec


def submodules(spec: Any) -> Any:
    """Of a spec as it is written by either version."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def exchanged(spec: Any, options: dict[str, Any] | None) -> Any:
    """The spec with fp4comm, or as it is for None."""
    return spec if options is None else adapter().with_fp4comm(spec, **options)


def gpt_model(config: Any, options: dict[str, Any] | None) -> Any:
    """A model with the stock dispatcher for None, or with fp4comm's."""
    torch.manual_seed(0)
    return host("models.gpt.gpt_model").GPTModel(
        config=config,
        transformer_layer_spec=exchanged(block_spec(config), options),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )


def moe_layer(config: Any, options: dict[str, Any] | None, **arguments: Any) -> Any:
    """An MoE layer with the stock dispatcher for None, or with fp4comm's."""
    torch.manual_seed(0)
    return exchanged(moe_spec(config), options)(config=config, layer_number=1, **arguments)
