"""fp4comm's experts in the place of Megatron-Core's: tokens arrive as FP8 rows, and are computed as such.

`with_fp4comm(spec, recipe=...)` of `fp4comm.adapters.megatron` puts them there.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import NotAvailable, require
from ..moe import GroupedExperts, Recipe
from .pool import Options, Pool

OLDEST = (0, 16)
POOL = Pool()
_LINEARS = {"gate_up": "linear_fc1", "down": "linear_fc2"}
# Settings of which GroupedExperts knows one value alone, and what to do about others.
_KNOWN = {
    "gated_linear_unit": (True, "True: experts are SwiGLU networks"),
    "activation_func": (nn.functional.silu, "torch.nn.functional.silu: experts are SwiGLU networks"),
    "glu_linear_offset": (0.0, "0.0"),
    "activation_func_clamp_value": (None, "None"),
    "activation_func_fp8_input_store": (False, "False: the recipe says what is kept"),
    "use_te_activation_func": (False, "False"),
    "use_transformer_engine_op_fuser": (False, "False"),
    "add_bias_linear": (False, "False: experts have no biases"),
    "moe_apply_probs_on_input": (False, "False: experts multiply after the activation"),
    "moe_latent_size": (None, "None"),
    "moe_mlp_glu_interleave_size": (None, "None: gates come first, then ups"),
    "moe_paged_stash": (False, "False: the recipe says what is kept"),
    "fp8": (None, "None: the recipe says how experts compute"),
    "fp4": (None, "None: the recipe says how experts compute"),
    "delay_wgrad_compute": (False, "False: forward and backward of a layer stay one autograd graph"),
    "init_model_with_meta_device": (False, "False"),
}
_PARTS_OF_EXPERTS = ("expert_fc1", "moe_act")  # what recompute_modules and offload_modules call them


def host(module: str) -> Any:
    """A module of Megatron-Core, of a version that is known to fit."""
    needed = "fp4comm.adapters.megatron needs Megatron-Core 0.16 or newer (pip install 'megatron-core>=0.16')"
    try:
        version = importlib.import_module("megatron.core").__version__
        found = importlib.import_module(module)
    except ImportError as error:
        raise NotAvailable(f"{needed}: {error}") from error
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise NotAvailable(f"{needed}; this is {version}")
    return found


_random: Any = host("megatron.core.tensor_parallel.random")
_layers: Any = host("megatron.core.tensor_parallel.layers")
_mapping: Any = host("megatron.core.dist_checkpointing.mapping")
_utils: Any = host("megatron.core.transformer.utils")


@dataclass(frozen=True)
class Choice:
    """What `with_fp4comm` was asked for.

    Attributes:
        options: of the communicators, with their precision.
        recipe: of fp4comm's experts; None = the experts of the spec.
        gemms: see `GroupedExperts`.
    """

    options: Options
    recipe: Recipe | None = None
    gemms: str = "auto"


class Experts(GroupedExperts):
    """Megatron's interface to the SwiGLU experts of a rank, which exchange their rows themselves.

    Weights start as those of Megatron's `SequentialMLP` do, drawn from the same random numbers. `load_state_dict` takes
    those of its three classes of experts, too.

    What FP8 GEMMs read of the weights is made anew after each backward pass, up to and with the next forward pass whose
    results have gradients. Call `forget_operands()` where something writes through `.data` at another time.

    Args:
        num_local_experts: of this rank.
        config: the `TransformerConfig` of the layer.
        pg_collection: process groups, of which `ep` is that of the experts, `expt_dp` that of their replicas.
        choice: has a recipe.
        name: of the module, for later versions of Megatron; not used.

    Raises:
        InvalidArgument: see `check_experts`.
    """

    def __init__(
        self, num_local_experts: int, config: Any, *, pg_collection: Any, choice: Choice, name: str | None = None
    ) -> None:
        assert choice.recipe is not None
        check_experts(config)
        self.config = config  # the base's constructor calls reset_parameters
        device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        most = dict(choice.options).get("num_max_tokens_per_rank")
        self.ep_group, self.dp_group, self._options = pg_collection.ep, pg_collection.expt_dp, choice.options
        # What the base's constructor reads of a communicator; the first forward pass makes one.
        sizes: Any = SimpleNamespace(
            hidden=config.hidden_size,
            rank=dist.get_rank(pg_collection.ep),
            num_local_experts=num_local_experts,
            expert_alignment=choice.recipe.expert_alignment(most is not None),
            num_max_tokens_per_rank=most,
        )
        super().__init__(
            sizes,
            config.moe_ffn_hidden_size,
            choice.recipe,
            gemms=choice.gemms,
            dtype=config.params_dtype,
            device=device,
        )
        self._may_be_stale = False
        self.register_load_state_dict_pre_hook(_take_stock_layouts)
        for dim, parameter in enumerate((self.gate_up, self.down), start=1):
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]  # Megatron's mark
            # Not a copy of what another rank has, says this to norms of gradients.
            _layers.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draws the weights with the init methods of the configuration; with a seed, as `GroupedExperts` does."""
        config = self.config
        if seed is not None:
            super().reset_parameters(seed)
        elif config.perform_initialization and config.use_cpu_initialization:
            for weights, draw in self._matrices():
                drawn = torch.empty(weights.shape, dtype=torch.float32, device="cpu")
                draw(drawn)
                weights.copy_(drawn)
        elif config.perform_initialization:
            with _random.get_cuda_rng_tracker().fork(_random.get_expert_parallel_rng_tracker_name()):
                for weights, draw in self._matrices():
                    draw(weights)

    def _matrices(self) -> list[tuple[Tensor, Callable[[Tensor], object]]]:
        """Each with what draws it, in the order in which `SequentialMLP` makes them."""
        draws = self.config.init_method, self.config.output_layer_init_method
        return [
            pair for expert in zip(self.gate_up, self.down, strict=True) for pair in zip(expert, draws, strict=True)
        ]

    def forward(  # type: ignore[override]  # Megatron's call has no communicator
        self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor
    ) -> tuple[Tensor, None]:
        """From this rank's tokens to the sums of all their experts. Collective, as is its backward.

        Args:
            tokens: `[num_tokens, hidden]` bfloat16 or float32.
            topk_idx: `[num_tokens, num_topk]` int64, -1 = none.
            topk_weights: float32 of that shape.

        Returns:
            `[num_tokens, hidden]`, and None for the bias that there is not.
        """
        if self._may_be_stale:
            self.forget_operands()
        num_experts = self.config.num_moe_experts
        comm = POOL.get(self.ep_group, num_experts, self.hidden, self._options, self._alignment)
        out = super().forward(tokens, topk_idx, topk_weights, comm)
        if out.requires_grad:  # others (evaluation, logging) may come between the backward pass and the step
            self._may_be_stale = False
            out.register_hook(self._note_backward)
        return out, None

    def _note_backward(self, grad: Tensor) -> None:
        """Optimizers step after a backward pass, and those of Megatron write where torch does not notice."""
        self._may_be_stale = True

    def backward_dw(self) -> None:
        """Nothing: weight gradients are made with all others."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's distributed checkpoints, in which these experts and its own are one and the same.

        Raises:
            InvalidArgument: `singleton_local_shards` in the metadata.
        """
        is_split = bool((metadata or {}).get("singleton_local_shards"))
        require(not is_split, "singleton_local_shards", True, "False: experts are saved as shards of one tensor")
        replica, ranks = (0, 0, self.dp_group.rank()), (self.ep_group.rank(), self.ep_group.size())
        state: dict[str, Any] = {}
        for name, linear in _LINEARS.items():
            key = f"{prefix}experts.{linear}.weight"
            build = functools.partial(_shards, offsets=sharded_offsets, ranks=ranks, num_parts=2 - (name == "down"))
            merge = functools.partial(torch.cat, dim=1)
            factory = _mapping.ShardedTensorFactory(key, getattr(self, name), build, merge, replica)
            state[f"{prefix}{name}"] = factory
            for local in range(self.gate_up.shape[0]):  # empty, but Megatron's own experts ask for them
                place = len(sharded_offsets), self.first_expert + local, self.config.num_moe_experts
                state[f"{prefix}local_experts.{local}.{linear}._extra_state"] = (
                    _utils.make_sharded_object_for_checkpoint(
                        None, f"{prefix}experts.{linear}._extra_state", (*sharded_offsets, place), replica
                    )
                )
        return state


@torch.no_grad()
def _shards(
    key: str,
    weights: Tensor,
    replica: Any,
    flattened_range: slice | None,
    *,
    offsets: tuple[Any, ...],
    ranks: tuple[int, int],
    num_parts: int,
) -> list[Any]:
    """`[num_local_experts, n, k]` weights, or optimizer state for them, as shards of `[num_experts, n, k]`.

    Gates and ups are shards of their own, so that Megatron can split each of them over ranks.
    """
    assert flattened_range is None, "state of these experts is saved in its own shape"
    axis = len(offsets)
    return [
        _mapping.ShardedTensor.from_rank_offsets(
            key,
            part.contiguous(),
            *offsets,
            (axis, *ranks),
            (axis + 1, number, num_parts),
            replica_id=replica,
            prepend_axis_num=axis,
        )
        for number, part in enumerate(weights.chunk(num_parts, dim=1))
    ]


def _take_stock_layouts(experts: Experts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: weights of Megatron's classes of experts become those of this one."""
    for name, linear in _LINEARS.items():
        found = _stock_weights(experts, state, prefix, linear)
        if found is not None:
            state[f"{prefix}{name}"] = found
    for key in [key for key in state if key.startswith(prefix) and key.endswith("_extra_state")]:
        del state[key]


def _stock_weights(experts: Experts, state: dict[str, Any], prefix: str, linear: str) -> Tensor | None:
    """`[num_experts, n, k]` of what the state has for `linear`, taken out of it; None if it has nothing."""
    whole = state.pop(f"{prefix}weight{linear[-1]}", None)  # GroupedMLP: [num_experts, k, n], seen as a matrix
    if whole is not None:
        return _of_grouped_mlp(whole, experts.hidden, experts.ffn_hidden, linear)
    for form in (f"{prefix}local_experts.{{}}.{linear}.weight", f"{prefix}{linear}.weight{{}}"):
        parts: list[Tensor] = []
        while (part := state.pop(form.format(len(parts)), None)) is not None:
            parts.append(part)
        if parts:
            return torch.stack(parts)
    return None


def _of_grouped_mlp(whole: Tensor, hidden: int, ffn_hidden: int, linear: str) -> Tensor:
    shape = (-1, hidden, 2 * ffn_hidden) if linear == "linear_fc1" else (-1, ffn_hidden, hidden)
    return whole.reshape(shape).transpose(1, 2)


def stock_state_dict(model: nn.Module, layout: str = "SequentialMLP") -> dict[str, Any]:
    """`model.state_dict()` for the same model with experts of Megatron's own.

    The other way needs no function: `load_state_dict` takes the state of a model with any of Megatron's experts, with
    the same experts on this rank. Between different numbers of ranks, use Megatron's distributed checkpoints.

    Args:
        model: has experts that `with_fp4comm(spec, recipe=...)` put there; without any, its state is as it is.
        layout: "SequentialMLP", "TEGroupedMLP" or "GroupedMLP", the class of the other model's experts.

    Raises:
        InvalidArgument: an unknown layout.
    """
    require(layout in _LAYOUTS, "layout", repr(layout), " or ".join(map(repr, _LAYOUTS)))
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            prefix = f"{name}." if name else ""
            for own, linear in _LINEARS.items():
                of_linear = _LAYOUTS[layout](state.pop(f"{prefix}{own}"), linear)
                state.update((f"{prefix}{key}", value) for key, value in of_linear.items())
    return state


def _as_sequential_mlp(weights: Tensor, linear: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for local, matrix in enumerate(weights):
        state[f"local_experts.{local}.{linear}.weight"] = matrix
        state[f"local_experts.{local}.{linear}._extra_state"] = None
    return state


def _as_te_grouped_mlp(weights: Tensor, linear: str) -> dict[str, Any]:
    state: dict[str, Any] = {f"{linear}.weight{local}": matrix for local, matrix in enumerate(weights)}
    return {**state, f"{linear}._extra_state": None}


def _as_grouped_mlp(weights: Tensor, linear: str) -> dict[str, Any]:
    _, n, k = weights.shape
    shape = (k, -1) if linear == "linear_fc1" else (-1, n)
    return {f"weight{linear[-1]}": weights.transpose(1, 2).reshape(shape)}


_LAYOUTS: dict[str, Callable[[Tensor, str], dict[str, Any]]] = {
    "SequentialMLP": _as_sequential_mlp,
    "TEGroupedMLP": _as_te_grouped_mlp,
    "GroupedMLP": _as_grouped_mlp,
}


def check_experts(config: Any) -> None:
    """Raises InvalidArgument if the configuration has something that `GroupedExperts` can't do."""
    for name, (known, accepted) in _KNOWN.items():
        value = getattr(config, name, known)
        shown = getattr(value, "__name__", repr(value))
        require(value == known, name, shown, f"{accepted}; or with_fp4comm without a recipe")
    dtype = config.params_dtype
    require(dtype in (torch.bfloat16, torch.float32), "params_dtype", dtype, "torch.bfloat16 or torch.float32")
    width = config.moe_ffn_hidden_size
    require(width % 32 == 0, "moe_ffn_hidden_size", width, "a multiple of 32")
    for name in ("recompute_modules", "offload_modules"):
        found = sorted(set(getattr(config, name, None) or ()) & set(_PARTS_OF_EXPERTS))
        require(not found, name, found, "others: the recipe says what experts keep and what they compute again")
