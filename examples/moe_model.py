"""A decoder-only Mixture-of-Experts language model over bytes. Experts are spread over ranks by fp4comm.

The MoE of a layer is either `WireMoE`, made here of an `EPCommunicator`, or `fp4comm.moe.MoELayer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4comm import EPCommunicator
from fp4comm.moe import MoELayer

VOCABULARY = 256  # bytes
_ROTARY_BASE = 1000.0


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model; `expert_hidden` is the inner width of one expert."""

    num_layers: int
    hidden: int
    num_heads: int
    num_experts: int
    num_topk: int
    expert_hidden: int


@dataclass(frozen=True)
class Placement:
    """Where a model is and how it computes.

    Attributes:
        device: of weights and tokens.
        dtype: of what attention and experts read and multiply. Weights, what runs past the layers, norms, routers and
            the head are float32.
    """

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class RoutedTokens:
    """What a layer sent to its experts: x `[num_tokens, hidden]` and the router's choice `[num_tokens, num_topk]`."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


class Linear(nn.Linear):
    """Without bias; multiplies in the dtype of its input, whatever that of its weight."""

    def __init__(self, width: int, out: int, device: torch.device | None = None) -> None:
        super().__init__(width, out, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, num_heads: int, device: torch.device) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(hidden, 3 * hidden, device)
        self.out = Linear(hidden, hidden, device)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(qkv[:2], *rotation)
        y = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


def rotation_of(length: int, width: int, placement: Placement) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[length, width / 2]` of angles that grow with the position."""
    half = width // 2
    positions, pairs = (torch.arange(count, device=placement.device) for count in (length, half))
    angles = positions[:, None] * _ROTARY_BASE ** (-pairs / half)
    return angles.cos().to(placement.dtype), angles.sin().to(placement.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of elements of x `[..., length, width]` by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Expert(nn.Module):
    """A SwiGLU network."""

    def __init__(self, hidden: int, expert_hidden: int, device: torch.device) -> None:
        super().__init__()
        self.gate_and_value = Linear(hidden, 2 * expert_hidden, device)
        self.out = Linear(expert_hidden, hidden, device)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class WireMoE(nn.Module):
    """Router and experts around an `EPCommunicator`: only what travels has small numbers.

    Attributes:
        balance: the load balancing loss of the last forward, 1 if all experts are equally used.
        num_tokens_per_expert: int64 `[num_experts]`, choices of this rank's tokens in the last forward.
        routed: what the last forward sent to the experts.
    """

    balance: Tensor
    num_tokens_per_expert: Tensor
    routed: RoutedTokens

    def __init__(self, size: ModelSize, comm: EPCommunicator, device: torch.device) -> None:
        super().__init__()
        self.comm, self.num_topk = comm, size.num_topk
        self.router = Linear(size.hidden, size.num_experts, device)
        # Every rank draws the weights of all experts and keeps its own: they don't depend on the number of ranks.
        experts = [Expert(size.hidden, size.expert_hidden, device) for _ in range(size.num_experts)]
        first = comm.rank * comm.num_local_experts
        self.experts = nn.ModuleList(experts[first : first + comm.num_local_experts])

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x.float()).softmax(dim=-1)
        topk_weights, topk_idx = probabilities.topk(self.num_topk, dim=-1)
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        num_experts = probabilities.shape[1]
        self.num_tokens_per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        load = self.num_tokens_per_expert.float() / topk_idx.numel()
        self.balance = num_experts * load @ probabilities.mean(dim=0)
        self.routed = RoutedTokens(x.detach(), topk_idx, topk_weights.detach())
        received, handle = self.comm.dispatch(x, topk_idx, topk_weights)
        rows = received.x.split(received.num_rows_per_expert)
        y = torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])
        return self.comm.combine(y, handle)


def wire_moes(
    size: ModelSize, group: Any, placement: Placement, precision: str, transport: str, seed: int
) -> Callable[[], WireMoE]:
    """Makes the MoE of one layer after the other; all share a communicator with that precision."""
    comm = EPCommunicator(
        group,
        num_experts=size.num_experts,
        hidden=size.hidden,
        precision=precision,
        transport=transport,
        seed=seed,
    )
    return lambda: WireMoE(size, comm, placement.device)


def recipe_moes(
    size: ModelSize, group: Any, placement: Placement, recipe: str, transport: str, seed: int
) -> Callable[[], MoELayer]:
    """As `wire_moes`, of `MoELayer` with that recipe.

    Weights of experts are float32, which the optimizer changes; GEMMs read what is made of them once per step.
    """
    shape: dict[str, Any] = {
        "hidden": size.hidden,
        "ffn_hidden": size.expert_hidden,
        "num_experts": size.num_experts,
        "num_topk": size.num_topk,
        "recipe": recipe,
        "dtype": torch.float32,
        "device": placement.device,
    }
    made: list[MoELayer] = []

    def make() -> MoELayer:
        if made:
            return MoELayer(made[0].comm, **shape)
        made.append(MoELayer(group, transport=transport, seed=seed, **shape))
        return made[0]

    return make


class Block(nn.Module):
    """Attention and MoE, each behind a norm and beside a residual path."""

    def __init__(self, size: ModelSize, make_moe: Callable[[], WireMoE | MoELayer], placement: Placement) -> None:
        super().__init__()
        self.dtype = placement.dtype
        self.attention_norm, self.moe_norm = (nn.RMSNorm(size.hidden, device=placement.device) for _ in range(2))
        self.attention = Attention(size.hidden, size.num_heads, placement.device)
        self.moe = make_moe()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x).to(self.dtype), rotation)
        tokens = self.moe_norm(x).to(self.dtype).flatten(0, 1)
        y: Tensor = self.moe(tokens)
        return x + y.view_as(x)


class ByteModel(nn.Module):
    """Predicts the next byte: int64 `[batch, length]` -> float32 logits `[batch, length, 256]`.

    Args:
        size: of the model.
        make_moe: makes the MoE of the next layer; see `wire_moes` and `recipe_moes`.
        seed: of the initial weights, which don't depend on the number of ranks.
        placement: where and in which dtype it computes.

    Attributes:
        moe_layers: the MoE of each layer.
        comm: their communicator.
    """

    def __init__(
        self, size: ModelSize, make_moe: Callable[[], WireMoE | MoELayer], seed: int, placement: Placement
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        device = placement.device
        self.placement, self.head_width = placement, size.hidden // size.num_heads
        self.embedding = nn.Embedding(VOCABULARY, size.hidden, device=device)
        self.previous_embedding = nn.Embedding(VOCABULARY, size.hidden, device=device)
        self.blocks = nn.ModuleList(Block(size, make_moe, placement) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden, device=device)
        self.head = Linear(size.hidden, VOCABULARY, device)

    def forward(self, inputs: Tensor) -> Tensor:
        # showing each position the byte before as well spares attention from learning that first
        x = self.embedding(inputs) + self.previous_embedding(F.pad(inputs[:, :-1], (1, 0)))
        rotation = rotation_of(inputs.shape[1], self.head_width, self.placement)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))

    @property
    def moe_layers(self) -> list[Any]:
        return [module for module in self.modules() if isinstance(module, WireMoE | MoELayer)]

    @property
    def comm(self) -> EPCommunicator:
        return self.moe_layers[0].comm

    @property
    def num_experts(self) -> int:
        """Over all ranks, of a layer."""
        return self.comm.num_experts

    def replicated(self) -> list[nn.Parameter]:
        """The weights that every rank has."""
        return [weight for name, weight in self.named_parameters() if ".experts." not in name]

    def own(self) -> list[nn.Parameter]:
        """The weights of this rank's experts, whose gradients are sums over all ranks' tokens already."""
        return [weight for name, weight in self.named_parameters() if ".experts." in name]

    def num_parameters(self) -> tuple[int, int]:
        """Of all ranks together: all, and those of experts."""
        of_experts = self.comm.num_ranks * sum(weight.numel() for weight in self.own())
        return sum(weight.numel() for weight in self.replicated()) + of_experts, of_experts
