"""Expert parallelism of Megatron-Core, with fp4comm's numbers on the wire.

`with_fp4comm(spec)` is a layer spec whose MoE layers send their tokens through an `EPCommunicator`:

    spec = with_fp4comm(get_gpt_decoder_block_spec(config, use_transformer_engine=True), precision="fp4")
    model = GPTModel(config, spec, ...)

Routers, experts, shared experts and everything around them stay Megatron's own. With `recipe=` instead of `precision=`
experts are fp4comm's, which compute on what arrives.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..communicator import EPCommunicator, Handle
from ..errors import require
from ..moe import Recipe
from ..precision import Precision
from ..received import Received
from .megatron_experts import POOL, Choice, Experts, check_experts, host, stock_state_dict
from .pool import checked_options

__all__ = ["TokenDispatcher", "close", "communicators", "stock_state_dict", "with_fp4comm"]

# Settings with values that change what a dispatcher has to do, and what to do instead.
_REFUSED = {
    "moe_token_dispatcher_type": ("flex", "'alltoall' here, or fp4comm.adapters.deep_ep, which serves 'flex'"),
    "moe_pad_expert_input_to_capacity": (True, "False; moe_expert_capacity_factor alone drops tokens"),
    "moe_shared_expert_overlap": (True, "False, which computes shared experts before the exchange"),
    "overlap_moe_expert_parallel_comm": (True, "False, since forward and backward of a layer stay one autograd graph"),
    "overlap_dispatch_backward_with_experts_wgrad": (True, "False"),
    "transformer_impl": ("inference_optimized", "'local' or 'transformer_engine'"),
}
_GRAPHS_WITHOUT_EXCHANGE = ("attn", "mamba", "mlp", "moe_router")


_MoETokenDispatcher: Any = host("megatron.core.transformer.moe.token_dispatcher").MoETokenDispatcher
_MoELayer: Any = host("megatron.core.transformer.moe.moe_layer").MoELayer
_moe_utils: Any = host("megatron.core.transformer.moe.moe_utils")
_spec_utils: Any = host("megatron.core.transformer.spec_utils")


def with_fp4comm(
    spec: Any,
    precision: Precision | str | None = None,
    *,
    recipe: Recipe | str | None = None,
    gemms: str = "auto",
    **options: Any,
) -> Any:
    """A copy of a spec whose MoE layers use fp4comm's dispatcher; dense layers and all else stay as they are.

    With a recipe, their routed experts are fp4comm's as well (`fp4comm.moe.GroupedExperts`): they read the FP8 rows
    that arrive and keep the payload for backward. Routers and shared experts stay Megatron's.

    Args:
        spec: of a layer (`get_gpt_layer_local_spec`, `get_gpt_layer_with_transformer_engine_spec`), of an MoE layer
            alone (`get_moe_module_spec`), or anything that holds such specs, as `TransformerBlockSubmodules`
            (`get_gpt_decoder_block_spec`) do. If fp4comm is in it already, the last call counts.
        precision: of the wire, for experts of Megatron's: a `Precision` or the name of one: "fp4" (default), "fp8",
            "mxfp4", "bf16", "fp32".
        recipe: for experts of fp4comm's, instead of precision: a `fp4comm.moe.Recipe` or the name of one: "bf16",
            "fp8_flow", "fp4", "fp4_all", "fp32".
        gemms: how these experts multiply, "auto", "emulated" or "tensor_cores"; see docs/moe.md.
        options: further arguments of `EPCommunicator`: check_inputs, max_buffer_bytes, num_max_tokens_per_rank,
            num_sms, seed, timeout_secs, transport. Equal on all ranks, as is precision.

    Raises:
        InvalidArgument: an unknown recipe or option, precision and recipe, or a spec without MoE layers. Layers raise
            it when they are built, if the configuration has something that the dispatcher or the experts can't do.
    """
    if recipe is None:
        require(gemms == "auto", "gemms", repr(gemms), "'auto' without a recipe: experts are Megatron's")
        chosen = Choice(checked_options("fp4" if precision is None else precision, options))
    else:
        accepted = "None with a recipe, which has a precision of its own"
        require(precision is None, "precision", repr(precision), accepted)
        recipe = Recipe.of(recipe)
        chosen = Choice(checked_options(recipe.legs, options), recipe, gemms)
    replaced = _replace(spec, chosen, {})
    require(replaced is not spec, "spec", f"a {type(spec).__name__} without MoE layers", "one that has an MoELayer")
    return replaced


def communicators() -> tuple[EPCommunicator, ...]:
    """The communicators of all layers so far, or since `close`, in the order in which they were made.

    There is one for all layers of equal group, number of experts, width and options; it is made in the first forward
    pass. Their `traffic` counts the bytes sent, their `stage_hook` is for profiling.
    """
    return POOL.all()


def close() -> None:
    """Closes the communicators. Collective; to be called before the process groups are destroyed.

    A model that is used again afterwards makes a new one.
    """
    POOL.close()


class TokenDispatcher(_MoETokenDispatcher):  # type: ignore[misc]  # the host's class is not known to mypy
    """What takes the place of Megatron's dispatchers, with their six phases in the order of its `MoELayer`.

    A token goes once to each rank that has any of its experts. Experts multiply by the routing weights, as with the
    other dispatchers, so that the way back is a plain sum.

    Args:
        config: the `TransformerConfig` of the layer.
        pg_collection: process groups, of which `ep` is that of the experts; None = those of `parallel_state`.
        precision, options: as for `with_fp4comm`.

    Raises:
        InvalidArgument: the configuration or the groups have something that is not supported.
    """

    def __init__(
        self, config: Any, pg_collection: Any = None, *, precision: Precision | str = "fp4", **options: Any
    ) -> None:
        self._options = checked_options(precision, options)
        groups = _moe_utils.get_default_pg_collection() if pg_collection is None else pg_collection
        _check_settings(config)
        _check_groups(config, groups)
        super().__init__(config=config, pg_collection=groups)
        # Experts that quantize want each one's rows in multiples of this, and pad them themselves if they aren't.
        quantizes = bool(config.fp8 or getattr(config, "fp4", None))
        self._alignment = _moe_utils.get_align_size_for_quantization(config) if quantizes else 1
        self._forget()

    def _forget(self) -> None:
        """Between two forward passes nothing is kept."""
        self._shape: torch.Size | None = None
        self._topk_idx: Tensor | None = None
        self._comm: EPCommunicator | None = None
        self._recv: Received | None = None
        self._handle: Handle | None = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """From the router's map to the experts of each token.

        Args:
            hidden_states: `[sequence, batch, hidden]`, this rank's part if the sequence is split.
            routing_map: `[num_tokens, num_experts]` bool, at most `moe_router_topk` in a row.
            probs: `[num_tokens, num_experts]`, the weights; they travel as float32.

        Returns:
            The tokens `[num_tokens, hidden]` and their weights `[num_tokens, moe_router_topk]`.
        """
        self._shape = hidden_states.shape
        self._topk_idx, weights = _choices(routing_map, probs, self.config.moe_router_topk)
        return hidden_states.reshape(-1, hidden_states.shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The exchange: rows in the order of the local experts, and the weight of each. Collective, as its backward."""
        num_experts, hidden = self.config.num_moe_experts, hidden_states.shape[-1]
        self._comm = POOL.get(self.ep_group, num_experts, hidden, self._options, self._alignment)
        self._recv, self._handle = self._comm.dispatch(hidden_states, self._topk_idx, probs)
        assert isinstance(self._recv.x, Tensor)
        return self._recv.x, self._recv.topk_weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts take: rows, how many for each expert (int64, on the host), weights.

        With `num_max_tokens_per_rank` the empty rows at the end are cut off here: Megatron's experts need the counts on
        the host anyway.
        """
        assert self._recv is not None
        counts = torch.tensor(self._recv.num_rows_per_expert, dtype=torch.int64, device="cpu")
        num_rows = sum(self._recv.num_rows_per_expert)
        return hidden_states[:num_rows], counts, probs[:num_rows]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' rows, and again the empty ones that have been cut off."""
        assert self._recv is not None
        num_missing = self._recv.topk_weights.shape[0] - hidden_states.shape[0]
        return nn.functional.pad(hidden_states, (0, 0, 0, num_missing)) if num_missing else hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """The way back: `[num_tokens, hidden]`, the sum over each token's experts. Collective, as its backward."""
        assert self._comm is not None
        assert self._handle is not None
        return self._comm.combine(hidden_states, self._handle, apply_weights=False)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The sums in the shape that the tokens had."""
        assert self._shape is not None
        output = hidden_states.view(self._shape)
        self._forget()
        return output


class _PassingDispatcher(TokenDispatcher):
    """For experts that exchange their rows themselves: they get this rank's tokens, choices and weights."""

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self._topk_idx is not None
        return hidden_states, self._topk_idx, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class _Layer:
    """What `with_fp4comm` puts before Megatron's `MoELayer`, with the arguments of its constructor and the choice."""

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        fp4comm_choice: Choice,
        **others: Any,
    ) -> None:
        # The TransformerLayer of 0.16 hands its groups to MoELayer itself only, not to what is derived from it.
        groups = _moe_utils.get_default_pg_collection() if pg_collection is None else pg_collection
        options = dict(fp4comm_choice.options)
        if fp4comm_choice.recipe is None:
            dispatcher = TokenDispatcher(config, groups, **options)
        else:
            dispatcher = _PassingDispatcher(config, groups, **options)
            check_experts(config)
            experts = _spec_utils.ModuleSpec(module=Experts, params={"choice": fp4comm_choice})
            submodules = dataclasses.replace(submodules, experts=experts)
        # A dispatcher of Megatron's is made as well. This one costs nothing; others make CUDA streams or buffers.
        kind, config.moe_token_dispatcher_type = config.moe_token_dispatcher_type, "allgather"
        try:
            host: Any = super().__init__
            host(config=config, submodules=submodules, layer_number=layer_number, pg_collection=groups, **others)
        finally:
            config.moe_token_dispatcher_type = kind
        self.token_dispatcher = dispatcher


@functools.cache
def _layer_class(stock: type) -> type:
    if issubclass(stock, _Layer):
        return stock
    return type(f"Fp4Comm{stock.__name__}", (_Layer, stock), {"__module__": __name__})


def _replace(spec: Any, choice: Choice, known: dict[int, Any]) -> Any:
    """The spec with fp4comm in its MoE layers; the same object if it has none. What is shared in it stays shared."""
    if id(spec) not in known:
        known[id(spec)] = _replaced(spec, choice, known)
    return known[id(spec)]


def _replaced(spec: Any, choice: Choice, known: dict[int, Any]) -> Any:
    if isinstance(spec, list):
        parts = [_replace(part, choice, known) for part in spec]
        return spec if all(new is old for new, old in zip(parts, spec, strict=True)) else parts
    if isinstance(spec, dict):
        return {**spec, **changed} if (changed := _changes(spec, choice, known)) else spec
    if isinstance(spec, functools.partial):  # how the specs of 0.19 say it
        if _is_moe_layer(spec.func):
            keywords = {**spec.keywords, "fp4comm_choice": choice}
            return functools.partial(_layer_class(spec.func), *spec.args, **keywords)
        keywords = _replace(spec.keywords, choice, known)
        return spec if keywords is spec.keywords else functools.partial(spec.func, *spec.args, **keywords)
    if isinstance(spec, type) or not dataclasses.is_dataclass(spec):
        return spec
    if isinstance(spec, _spec_utils.ModuleSpec) and _is_moe_layer(module := _spec_utils.get_module(spec)):
        changed = {"module": _layer_class(module), "params": {**spec.params, "fp4comm_choice": choice}}
    else:
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        changed = _changes(values, choice, known)
    return _copy_with(spec, changed) if changed else spec


def _changes(values: dict[str, Any], choice: Choice, known: dict[int, Any]) -> dict[str, Any]:
    """Those of the values in which there are MoE layers, replaced."""
    replaced = {name: _replace(value, choice, known) for name, value in values.items()}
    return {name: value for name, value in replaced.items() if value is not values[name]}


def _copy_with(spec: Any, changed: dict[str, Any]) -> Any:
    new = copy.copy(spec)
    for name, value in changed.items():
        setattr(new, name, value)
    return new


def _is_moe_layer(module: Any) -> bool:
    return isinstance(module, type) and issubclass(module, _MoELayer)


def _choices(routing_map: Tensor, probs: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """The experts of each token in ascending order, -1 at the end where it has fewer, and their weights.

    Returns:
        `[num_tokens, num_topk]` int64 and float32, the latter differentiable. A token with more than `num_topk` experts
        gets one that doesn't exist, at which dispatch raises on all ranks: here only one rank knows, and the host of a
        GPU would have to wait.
    """
    num_experts = routing_map.shape[1]
    numbers = torch.arange(num_experts, device=routing_map.device)
    ascending = torch.where(routing_map, numbers, num_experts)
    first = ascending.topk(min(num_topk + 1, num_experts), dim=1, largest=False).values
    slots = first[:, :num_topk]
    is_free = slots == num_experts
    weights = probs.gather(1, slots.clamp(max=num_experts - 1)).float().masked_fill(is_free, 0)
    has_too_many = (first[:, num_topk:] < num_experts).any(dim=1, keepdim=True)
    return slots.masked_fill(is_free, -1).masked_fill(has_too_many, num_experts), weights


def _check_settings(config: Any) -> None:
    for name, (refused, accepted) in _REFUSED.items():
        value = getattr(config, name, None)
        require(value != refused, name, repr(value), accepted)
    width = "moe_latent_size" if getattr(config, "moe_latent_size", None) else "hidden_size"
    value = getattr(config, width)
    require(value % 32 == 0, width, value, "a multiple of 32")
    if getattr(config, "cuda_graph_impl", "none") != "none":
        name = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
        captured = [getattr(scope, "name", scope) for scope in getattr(config, name)]
        holds_exchange = not captured or not set(captured) <= set(_GRAPHS_WITHOUT_EXCHANGE)
        accepted = f"some of {', '.join(map(repr, _GRAPHS_WITHOUT_EXCHANGE))}: the experts' row counts go to the host"
        require(not holds_exchange, name, captured, accepted)


def _check_groups(config: Any, groups: Any) -> None:
    size = config.expert_model_parallel_size
    is_member = dist.get_rank(groups.ep) >= 0
    found = f"a group of {dist.get_world_size(groups.ep)}" if is_member else "a group of other ranks"
    accepted = f"a group of expert_model_parallel_size={size} ranks with this one among them"
    require(is_member and dist.get_world_size(groups.ep) == size, "pg_collection.ep", found, accepted)
    num_parts = dist.get_world_size(groups.expt_tp)
    accepted = "1: experts that are split over ranks would need their rows on each; raise expert_model_parallel_size"
    require(num_parts == 1, "expert_tensor_parallel_size", num_parts, accepted)
