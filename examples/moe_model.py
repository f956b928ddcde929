"""A small decoder-only Mixture-of-Experts language model over bytes. Experts are spread over ranks by fp4comm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4comm import EPCommunicator

VOCABULARY = 256  # bytes


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
class RoutedTokens:
    """What a layer sent to its experts: x `[num_tokens, hidden]` and the router's choice `[num_tokens, num_topk]`."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = _rotate(qkv[:2])
        y = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


def _rotate(x: Tensor) -> Tensor:
    """Turns each pair of elements of x `[..., length, width]` by an angle that grows with the position."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(length)[:, None] * 1000.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Expert(nn.Module):
    """A SwiGLU network."""

    def __init__(self, hidden: int, expert_hidden: int) -> None:
        super().__init__()
        self.gate_and_value = nn.Linear(hidden, 2 * expert_hidden, bias=False)
        self.out = nn.Linear(expert_hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class MoE(nn.Module):
    """Router and experts.

    Attributes:
        balance: the load balancing loss of the last forward, 1 if all experts are equally used.
        load: `[num_experts]`, choices of this rank's tokens per expert in the last forward.
        routed: what the last forward sent to the experts.
    """

    balance: Tensor
    load: Tensor
    routed: RoutedTokens

    def __init__(self, size: ModelSize, comm: EPCommunicator) -> None:
        super().__init__()
        self.comm, self.num_topk = comm, size.num_topk
        self.router = nn.Linear(size.hidden, size.num_experts, bias=False)
        # Every rank draws the weights of all experts and keeps its own: they don't depend on the number of ranks.
        experts = [Expert(size.hidden, size.expert_hidden) for _ in range(size.num_experts)]
        first = comm.rank * comm.num_local_experts
        self.experts = nn.ModuleList(experts[first : first + comm.num_local_experts])

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(dim=-1)
        topk_weights, topk_idx = probabilities.topk(self.num_topk, dim=-1)
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        num_experts = probabilities.shape[1]
        self.load = torch.bincount(topk_idx.flatten(), minlength=num_experts).float()
        self.balance = num_experts * (self.load / topk_idx.numel()) @ probabilities.mean(dim=0)
        self.routed = RoutedTokens(x.detach(), topk_idx, topk_weights.detach())
        received, handle = self.comm.dispatch(x, topk_idx, topk_weights)
        rows = received.x.split(received.num_rows_per_expert)
        y = torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])
        return self.comm.combine(y, handle)


class Block(nn.Module):
    """Attention and MoE, each behind a norm and beside a residual path."""

    def __init__(self, size: ModelSize, comm: EPCommunicator) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.attention = Attention(size.hidden, size.num_heads)
        self.moe = MoE(size, comm)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x).flatten(0, 1)).view_as(x)


class ByteModel(nn.Module):
    """Predicts the next byte: int64 `[batch, length]` -> logits `[batch, length, 256]`.

    Args:
        size: of the model.
        comm: spreads the experts; one communicator serves all layers.
        seed: of the initial weights, which don't depend on the number of ranks.
    """

    def __init__(self, size: ModelSize, comm: EPCommunicator, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, size.hidden)
        self.previous_embedding = nn.Embedding(VOCABULARY, size.hidden)
        self.blocks = nn.ModuleList(Block(size, comm) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        # showing each position the byte before as well spares attention from learning that first
        x = self.embedding(inputs) + self.previous_embedding(F.pad(inputs[:, :-1], (1, 0)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @property
    def moe_layers(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]
