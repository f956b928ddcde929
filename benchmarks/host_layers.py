"""The hosts of the benchmark, each with its own dispatcher and fp4comm's adapters for it."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp4comm import InvalidArgument
from fp4comm.adapters import distributed

Dispatcher = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`([T, hidden] tokens, [T, K] experts, [T, K] weights) -> [T, hidden]`, differentiable in tokens and weights."""

RECIPES = ("bf16", "fp8", "fp4", "mxfp4")


@dataclass(frozen=True)
class Sizes:
    """Of a layer, on all ranks; `width` 0 = experts that return their rows."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    width: int
    dtype: torch.dtype


class Host(Protocol):
    """A library with a layer of experts.

    Attributes:
        version: its version.
        sizes: of the layer.
        stock: which of the dispatchers is its own.
        dispatchers: by name; that of its own first.
    """

    version: str
    sizes: Sizes
    stock: str
    dispatchers: dict[str, Dispatcher]

    def traffic(self, clear: bool) -> Counter[str]:
        """Bytes that fp4comm has sent to other ranks since it was cleared, by leg."""

    def close(self) -> None:
        """Frees what the dispatchers have made. Collective."""


class SameRows(nn.Module):
    """Experts as transformers calls them, which return their rows."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return rows


class Transformers:
    """Experts of Qwen3-MoE, reached by an `ep_implementation`."""

    stock = "all_to_all"

    def __init__(self, group: Any, device: torch.device, sizes: Sizes) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.sizes = sizes
        self.version = importlib.import_module("transformers").__version__
        self._adapter = importlib.import_module("fp4comm.adapters.transformers")
        num_ranks = dist.get_world_size(group)
        shape, names = (num_ranks, 1), ("ep", "tp")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        distributed.register()
        compressed = init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override={"ep": "fp4comm"})
        self._compressed = compressed["ep"].get_group()
        experts = self._experts(sizes.num_experts // num_ranks, device)
        known = importlib.import_module("transformers.distributed.expert_parallel").EPImplementationInterface()
        self.dispatchers: dict[str, Dispatcher] = {
            self.stock: known[self.stock](experts, mesh["ep"], mesh["tp"]),
            f"{self.stock}, fp4comm group": known[self.stock](experts, compressed["ep"], compressed["tp"]),
        }
        options: dict[str, dict[str, Any]] = {f"fp4comm {recipe}": {"precision": recipe} for recipe in RECIPES}
        options["fp4comm fp4, fixed"] = {"num_max_tokens_per_rank": sizes.num_tokens}
        for name, chosen in options.items():
            self._adapter.register(name, **chosen)
            self.dispatchers[name] = known[name](experts, mesh["ep"], mesh["tp"])

    def _experts(self, num_local_experts: int, device: torch.device) -> nn.Module:
        if not self.sizes.width:
            return SameRows(num_local_experts)
        models: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        config = models.Qwen3MoeConfig(
            hidden_size=self.sizes.hidden, moe_intermediate_size=self.sizes.width, num_experts=num_local_experts
        )
        config._experts_implementation = "grouped_mm"
        experts: nn.Module = models.Qwen3MoeExperts(config).to(device, self.sizes.dtype)
        experts._is_expert_parallel = True  # type: ignore[assignment]  # rows of no expert are left out
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(std=self.sizes.hidden**-0.5).requires_grad_(True)
        return experts

    def traffic(self, clear: bool) -> Counter[str]:
        return total_traffic([*self._adapter.communicators(), self._compressed], clear)

    def close(self) -> None:
        self._adapter.close()


class Megatron:
    """Megatron-Core's token dispatchers. They need GPUs. Experts return their rows, weighted, as its experts do."""

    stock = "alltoall"

    def __init__(self, group: Any, device: torch.device, sizes: Sizes) -> None:
        self.sizes = sizes
        for problem, received, accepted in (
            (device.type != "cuda", f"device {device.type}", "a GPU per rank"),
            (sizes.width != 0, f"--width {sizes.width}", "0: its grouped experts need TransformerEngine"),
        ):
            if problem:
                raise InvalidArgument(f"--host megatron with {received}; accepted: {accepted}")
        core = importlib.import_module("megatron.core")
        self.version = core.__version__
        self._adapter = importlib.import_module("fp4comm.adapters.megatron")
        self._num_ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        core.parallel_state.initialize_model_parallel(expert_model_parallel_size=self._num_ranks)
        stock = importlib.import_module("megatron.core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
        groups = importlib.import_module("megatron.core.transformer.moe.moe_utils").get_default_pg_collection()
        config, num_local = self._config(), sizes.num_experts // self._num_ranks
        local = list(range(self._rank * num_local, (self._rank + 1) * num_local))
        self.dispatchers: dict[str, Dispatcher] = {self.stock: self._phases(stock(num_local, local, config, groups))}
        for recipe in RECIPES:
            ours = self._adapter.TokenDispatcher(config, groups, precision=recipe)
            self.dispatchers[f"fp4comm {recipe}"] = self._phases(ours)

    def _config(self) -> Any:
        sizes = self.sizes
        return importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig(
            num_layers=1,
            hidden_size=sizes.hidden,
            num_attention_heads=8,
            num_moe_experts=sizes.num_experts,
            moe_router_topk=sizes.num_topk,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            expert_model_parallel_size=self._num_ranks,
            add_bias_linear=False,
            bf16=sizes.dtype == torch.bfloat16,
            params_dtype=sizes.dtype,
        )

    def _phases(self, dispatcher: Any) -> Dispatcher:
        """A dispatcher's phases in the order of Megatron's `MoELayer`, with what its router gives."""

        def call(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
            empty = torch.zeros(len(x), self.sizes.num_experts, device=x.device)
            probs, routing_map = empty.scatter(1, topk_idx, topk_weights), empty.bool().scatter(1, topk_idx, True)
            rows, probs = dispatcher.dispatch_preprocess(x.unsqueeze(1), routing_map, probs)
            rows, probs = dispatcher.token_dispatch(rows, probs)
            rows, _, probs = dispatcher.dispatch_postprocess(rows, probs)
            rows = (rows * probs.unsqueeze(1)).to(rows.dtype)
            rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
            y: Tensor = dispatcher.combine_postprocess(rows)
            return y.squeeze(1)

        return call

    def traffic(self, clear: bool) -> Counter[str]:
        return total_traffic(self._adapter.communicators(), clear)

    def close(self) -> None:
        self._adapter.close()
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()


def total_traffic(comms: Any, clear: bool) -> Counter[str]:
    """Of all the communicators and compressed groups."""
    total: Counter[str] = sum((comm.traffic for comm in comms), Counter())
    del total["given"]  # what a group has not sent
    for comm in comms if clear else ():
        comm.traffic.clear()
    return total


HOSTS: dict[str, Callable[[Any, torch.device, Sizes], Host]] = {"transformers": Transformers, "megatron": Megatron}
