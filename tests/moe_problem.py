"""A small MoE problem, alike on every rank, and the same MoE in one process to compare with.

Tensors lie where `numerics.tensors_on` says. What experts compute gives the same bits on a CPU and a GPU.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numerics import on_device, tensors_device
from torch import Tensor

import fp4comm
from fp4comm.precision import Precision
from fp4comm.transport import Transport

TIMEOUT_SECS = 30.0
gpu_transport = "nccl"  # what groups of processes use where the tensors lie on GPUs


@dataclass
class Problem:
    """The same random MoE input, built alike on every rank: a list per rank of each input.

    Token counts are uneven, one rank of several has none, some choices are -1, and some tokens have no expert at all.
    """

    num_ranks: int
    num_local_experts: int = 3
    num_topk: int = 4
    hidden: int = 160
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.num_experts = self.num_ranks * self.num_local_experts
        counts = [0 if rank == 1 else 5 + 7 * rank for rank in range(self.num_ranks)]
        self.xs = [rng.standard_normal((n, self.hidden)).astype(np.float32) * 3 for n in counts]
        self.weights = [rng.uniform(0.1, 1.0, (n, self.num_topk)).astype(np.float32) for n in counts]
        self.idx = [self._choices(rng, n) for n in counts]
        self.num_tokens = counts

    def _choices(self, rng: np.random.Generator, num_tokens: int) -> np.ndarray:
        chosen = [rng.permutation(self.num_experts) for _ in range(num_tokens)]
        idx = np.full((num_tokens, self.num_topk), -1, np.int64)
        width = min(self.num_topk, self.num_experts)
        for token, experts in enumerate(chosen):
            idx[token, :width] = experts[:width]
        idx[rng.random(idx.shape) < 0.15] = -1
        idx[: 1 if num_tokens > 2 else 0] = -1
        return idx

    def mine(self, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """x, topk_idx and topk_weights of a rank."""
        x = on_device(self.xs[rank]).to(dtype)
        return x, on_device(self.idx[rank]), on_device(self.weights[rank])


def communicator(group: Any, problem: Problem, precision: Precision | str = "fp32", **options: Any) -> Any:
    """One for tensors that lie where the test's do: where a GPU is left unused, "auto" would take it."""
    if group is not None and not isinstance(group, Transport) and "transport" not in options:
        on_host = "mpi" if hasattr(group, "Get_rank") else "process_group"
        options["transport"] = on_host if tensors_device().type == "cpu" else gpu_transport
    return fp4comm.EPCommunicator(
        group,
        num_experts=problem.num_experts,
        hidden=problem.hidden,
        precision=precision,
        timeout_secs=TIMEOUT_SECS,
        **options,
    )


def size_of(group: Any) -> int:
    """Ranks of a group of any kind."""
    if group is None:
        return 1
    if hasattr(group, "num_ranks"):
        return int(group.num_ranks)
    return int(group.Get_size() if hasattr(group, "Get_size") else group.size())


def host(tensor: Tensor) -> np.ndarray:
    """The numbers on the CPU."""
    return tensor.detach().cpu().numpy()


def floats_like(rng: np.random.Generator, tensor: Tensor) -> Tensor:
    """Random numbers of the shape of a tensor."""
    return on_device(rng.standard_normal(tensor.shape).astype(np.float32))


def digest(*tensors: Tensor) -> int:
    """A checksum of the bits."""
    value = 0
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        value = zlib.crc32(host(tensor.detach().contiguous().view(torch.uint8)).tobytes(), value)
    return value


def expert_function(rows: Tensor, experts: Tensor) -> Tensor:
    """A different function for each expert (a global index per row), so that misrouting shows."""
    factor = 1.0 + 0.25 * experts.to(rows.dtype).unsqueeze(1)
    return rows * factor


def times(rows: Tensor, factors: Tensor) -> Tensor:
    """Each row times a factor. On the CPU, since gradients of the factors are sums, which add in another order."""
    return (rows.cpu() * factors.cpu().unsqueeze(1)).to(rows.device)


def experts_of_rows(recv: Any, comm: Any) -> Tensor:
    """Global expert of each row of the expert layout, padding included."""
    local = np.repeat(np.arange(comm.num_local_experts), recv.num_rows_per_expert)
    padding = np.zeros(recv.x.shape[0] - len(local), np.int64)
    return on_device(np.concatenate([local, padding]) + comm.rank * comm.num_local_experts)


def moe_on_one_rank(problem: Problem, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """The MoE of the cases for some tokens, in one process, sums in the order that ranks give them."""
    out = torch.zeros_like(x)
    for rank in range(problem.num_ranks):
        local = torch.zeros_like(x)
        for slot in range(idx.shape[1]):
            here = (idx[:, slot] >= 0) & (idx[:, slot] // problem.num_local_experts == rank)
            term = weights[:, slot, None] * expert_function(x, idx[:, slot].clamp(min=0))
            local = local + torch.where(here[:, None], term, torch.zeros_like(term))
        out = out + local
    return out


def total(comm: Any, value: float) -> float:
    """Sum over the ranks."""
    return float(sum(np.frombuffer(part)[0] for part in comm._transport.all_gather_bytes(np.float64(value).tobytes())))


def num_remote_rows(problem: Problem, rank: int) -> int:
    """Rows that a rank sends to others: one per token and rank of its experts."""
    ranks = np.where(problem.idx[rank] >= 0, problem.idx[rank] // problem.num_local_experts, -1)
    return sum(len(set(row.tolist()) - {-1, rank}) for row in ranks)
