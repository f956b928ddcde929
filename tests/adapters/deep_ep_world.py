"""All ranks' tokens for the tests of DeepEP's interface, and what must arrive of them where.

Every rank can make the tokens of all, so that nothing needs to be exchanged to know it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import fp4comm
from fp4comm import Precision
from fp4comm.adapters import deep_ep
from fp4comm.adapters.deep_ep import Buffer, ElasticBuffer

HIDDEN, NUM_EXPERTS, NUM_TOPK = 256, 8, 3
TIMEOUT_SECS = 20.0
NUM_TOKENS = (9, 0, 6, 4)  # of each rank


Cases = dict[str, Callable[["World"], None]]


def registry() -> tuple[Cases, Callable[[Callable[[World], None]], Callable[[World], None]]]:
    """A place for the cases of a module, and the decorator that puts them there."""
    cases: Cases = {}

    def case(function: Callable[[World], None]) -> Callable[[World], None]:
        cases[function.__name__] = function
        return function

    return cases, case


@dataclass
class World:
    """All ranks' tokens, and what of them belongs here."""

    group: Any

    @cached_property
    def is_mpi(self) -> bool:
        return hasattr(self.group, "Get_rank")

    @cached_property
    def device(self) -> torch.device:
        """Where tokens are: on this rank's GPU if the group has NCCL."""
        has_gpus = not self.is_mpi and "nccl" in torch.distributed.get_backend_config(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if has_gpus else torch.device("cpu")

    @cached_property
    def rank(self) -> int:
        rank: int = self.group.Get_rank() if self.is_mpi else self.group.rank()
        return rank

    @cached_property
    def num_ranks(self) -> int:
        size: int = self.group.Get_size() if self.is_mpi else self.group.size()
        return size

    def all_gather(self, value: Any) -> list[Any]:
        if self.is_mpi:
            gathered: list[Any] = self.group.allgather(value)
        else:
            gathered = [None] * self.num_ranks
            torch.distributed.all_gather_object(gathered, value, self.group)
        return gathered

    @property
    def num_local_experts(self) -> int:
        return NUM_EXPERTS // self.num_ranks

    def buffer(self, precision: Precision | str = "bf16", **arguments: Any) -> Buffer:
        deep_ep.configure(precision=precision, timeout_secs=TIMEOUT_SECS, check_inputs=True)
        return Buffer(None, comm=self.group, **arguments) if self.is_mpi else Buffer(self.group, **arguments)

    def elastic(self, precision: Precision | str = "bf16", **arguments: Any) -> ElasticBuffer:
        deep_ep.configure(precision=precision, timeout_secs=TIMEOUT_SECS, check_inputs=True)
        return ElasticBuffer(self.group, **arguments)

    def x(self, rank: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(NUM_TOKENS[rank], HIDDEN, generator=generator, device="cpu")
        return x.to(self.device, dtype)

    def topk(self, rank: int) -> tuple[Tensor, Tensor]:
        """Some of them no expert."""
        generator = torch.Generator().manual_seed(100 + rank)
        scores = torch.rand(NUM_TOKENS[rank], NUM_EXPERTS, generator=generator, device="cpu")
        weights, experts = scores.topk(NUM_TOPK, dim=-1)
        is_dropped = torch.rand(experts.shape, generator=generator, device="cpu") < 0.2
        return experts.masked_fill(is_dropped, -1).to(self.device), weights.to(self.device)

    @property
    def own(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, topk_idx, topk_weights."""
        return (self.x(self.rank), *self.topk(self.rank))

    def local_topk(self, rank: int) -> tuple[Tensor, Tensor]:
        """As this rank sees those of `rank`, for all of its tokens: local experts, and weights of these."""
        experts, weights = self.topk(rank)
        is_here = (experts >= 0) & (experts // self.num_local_experts == self.rank)
        local = torch.where(is_here, experts - self.rank * self.num_local_experts, -1)
        return local, torch.where(is_here, weights, 0.0)

    def arriving(self, of_rank: Callable[[int], Tensor]) -> Tensor:
        """Rows of all ranks' tokens that have an expert here."""
        parts = [of_rank(rank)[(self.local_topk(rank)[0] >= 0).any(1)] for rank in range(self.num_ranks)]
        return torch.cat(parts)

    def expanded(self, rows: Tensor, alignment: int = 1) -> Tensor:
        """Arriving rows, once for each local expert and in their order, padded with zeros."""
        idx = self.arriving(lambda rank: self.local_topk(rank)[0])
        parts = []
        for expert in range(self.num_local_experts):
            part = rows[(idx == expert).any(1)]
            parts += [part, rows.new_zeros(-len(part) % alignment, *rows.shape[1:])]
        return torch.cat(parts)

    @property
    def counts(self) -> list[int]:
        """Tokens of each local expert."""
        idx = torch.cat([self.local_topk(rank)[0] for rank in range(self.num_ranks)])
        return [int((idx == expert).sum()) for expert in range(self.num_local_experts)]

    @property
    def num_copies(self) -> Tensor:
        """`[num_tokens, 1]`, to how many ranks each own token goes."""
        ranks = torch.where(self.own[1] >= 0, self.own[1] // self.num_local_experts, -1)
        return sum((ranks == rank).any(1, keepdim=True).int() for rank in range(self.num_ranks))  # type: ignore[return-value]


def dispatch(buffer: Buffer, x: Any, idx: Tensor, weights: Tensor, **arguments: Any) -> tuple[Any, ...]:
    """As a caller of DeepEP does it: layout first."""
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, NUM_EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_rdma_rank}
    layout |= {"num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout, **arguments)


def fp8_by_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepSeek's programs make it: scales that are no powers of two."""
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2, keepdim=True).clamp(1e-4) / 448
    return (groups / scales).to(torch.float8_e4m3fn).view(x.shape), scales.squeeze(2)


def numbers(data: Tensor, scales: Tensor) -> Tensor:
    return (data.float().view(*scales.shape, 128) * scales.unsqueeze(-1)).view(data.shape)


def through(x: Tensor) -> Tensor:
    """What MXFP4 makes of it."""
    return fp4comm.quantize_mxfp4(x).dequantize(x.dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Also of dtypes that don't compare."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
