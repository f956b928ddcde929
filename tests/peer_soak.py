"""Exchanges over peer memory without end: random routes, random delays on random ranks, and a check of every row.

    mpirun -n 2 python tests/peer_soak.py --iterations 100000

An iteration is a dispatch, a combine and a dispatch along the same routes: an odd number of exchanges, so that the
slots change places from one to the next. Most iterations are replays of a CUDA graph that draws tokens and routes
itself, the others are eager: with new routes and sizes that are fixed or exact, and along routes that are known since
the start, where rows are expanded while others arrive.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fp4comm
from fp4comm.transport import peer

HIDDEN, NUM_TOPK, EXPERTS_PER_RANK = 256, 4, 4
MAX_DELAY_CYCLES = 200_000  # 0.1 ms
CHECK_EVERY = 500


@dataclass
class Soak:
    """One rank's part.

    Attributes:
        fixed, exact: the same group with sizes that are fixed and with sizes that are exchanged.
        num_tokens: of a dispatch with fixed sizes.
        known: routes of `exact`, and their handle.
        wrong: on the device, rows so far that were not as they should be.
        rows: likewise, rows that were looked at.
    """

    fixed: fp4comm.EPCommunicator
    exact: fp4comm.EPCommunicator
    num_tokens: int
    known: tuple[Tensor, Any]
    wrong: Tensor
    rows: Tensor

    @classmethod
    def on(cls, group: Any, num_tokens: int) -> Soak:
        """Of the calling rank."""
        num_experts = EXPERTS_PER_RANK * group.Get_size()
        options: dict[str, Any] = {"num_experts": num_experts, "hidden": HIDDEN, "precision": "bf16"}
        fixed, exact = (
            fp4comm.EPCommunicator(group, transport="peer", num_max_tokens_per_rank=most, **options)
            for most in (num_tokens, None)
        )
        counts = torch.zeros(2, dtype=torch.int64, device=fixed.device).unbind()
        idx = _routes(exact, 2 * num_tokens)
        _, handle = exact.dispatch(_tokens(exact, 2 * num_tokens), idx, layout="rank")
        return cls(fixed, exact, num_tokens, (idx, handle), *counts)

    def new_routes(self, comm: fp4comm.EPCommunicator, num_tokens: int) -> None:
        """An iteration with routes of its own."""
        x, idx = _tokens(comm, num_tokens), _routes(comm, num_tokens)
        self._rest(comm, x, idx, *comm.dispatch(x, idx, layout="rank"))

    def known_routes(self) -> None:
        """An iteration of `exact` along the routes that it has a handle of."""
        idx, handle = self.known
        x = _tokens(self.exact, len(idx))
        self._rest(self.exact, x, idx, *self.exact.dispatch(x, handle=handle))

    def _rest(self, comm: fp4comm.EPCommunicator, x: Tensor, idx: Tensor, received: Any, handle: Any) -> None:
        self._check_rows(received.x, received.topk_idx)
        home = comm.combine(received.x, handle)
        ranks = idx.clamp(min=0) // EXPERTS_PER_RANK
        goes = torch.zeros(len(x), comm.num_ranks, device=x.device).scatter_(1, ranks, 1.0) * (idx[:, :1] >= 0)
        expected = (x.float() * goes.sum(1, keepdim=True)).to(torch.bfloat16)
        self.wrong += (home != expected).any(1).sum()
        again, _ = comm.dispatch(x, handle=handle)
        self.wrong += torch.ne(again.x, received.x).any(1).sum()

    def _check_rows(self, rows: Tensor, local_experts: Tensor) -> None:
        used = (local_experts >= 0).any(1)
        self.wrong += (used & (rows.sum(1, dtype=torch.float32) % 256 != 0)).sum()
        self.rows += used.sum()


def _tokens(comm: fp4comm.EPCommunicator, num_tokens: int) -> Tensor:
    """Rows of small integers, the last of which makes their sum a multiple of 256; BF16 holds them exactly."""
    x = torch.randint(0, 256, (num_tokens, HIDDEN), device=comm.device)
    x[:, -1] -= x.sum(1) % 256
    return torch.where(x < 0, x + 256, x).to(torch.bfloat16)


def _routes(comm: fp4comm.EPCommunicator, num_tokens: int) -> Tensor:
    """Some tokens without experts."""
    scores = torch.rand(num_tokens, comm.num_experts, device=comm.device)
    return torch.where(torch.rand(num_tokens, 1, device=comm.device) < 0.1, -1, scores.topk(NUM_TOPK).indices)


def soak(group: Any, iterations: int, num_tokens: int = 64, seed: int = 0) -> tuple[int, int]:
    """Wrong rows, and rows in all, of the calling rank."""
    torch.cuda.set_device(group.Get_rank() % torch.cuda.device_count())
    peer._MIN_COUNTED_ROWS = 1
    part = Soak.on(group, num_tokens)
    shared, own = random.Random(seed), random.Random(seed + 1 + group.Get_rank())
    torch.manual_seed(own.getrandbits(32))
    with torch.no_grad():
        graph = _captured(part)
        for iteration in range(iterations):
            kind = shared.random()  # alike on all ranks, which have to make the same calls
            if own.random() < 0.05:
                torch.cuda._sleep(own.randrange(MAX_DELAY_CYCLES))
            if own.random() < 0.001:
                time.sleep(own.random() * 0.01)
            if kind < 0.9:
                graph.replay()
            elif kind < 0.93:
                part.new_routes(part.fixed, own.randrange(num_tokens + 1))
            elif kind < 0.96:
                part.new_routes(part.exact, own.randrange(2 * num_tokens))
            else:
                part.known_routes()
            if iteration % CHECK_EVERY == 0 and int(part.wrong):
                break
        wrong, rows = int(part.wrong), int(part.rows)
        graph.reset()
    part.fixed.close()
    part.exact.close()
    return wrong, rows


def _captured(part: Soak) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()

    def both() -> None:
        part.new_routes(part.fixed, part.num_tokens)
        part.known_routes()

    with torch.cuda.stream(side):
        both()  # compiles kernels and makes slots
        part.new_routes(part.exact, 2 * part.num_tokens)  # the largest, since slots in graphs are kept
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    return graph


def main() -> None:
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    found = MPI.COMM_WORLD.allgather(soak(MPI.COMM_WORLD, options.iterations, options.tokens, options.seed))
    if MPI.COMM_WORLD.rank == 0:
        for rank, (wrong, rows) in enumerate(found):
            print(f"rank {rank}: {wrong} wrong of {rows} received rows")
        print(f"{options.iterations} iterations in {time.monotonic() - start:.0f} s")
    raise SystemExit(any(wrong for wrong, _ in found))


if __name__ == "__main__":
    main()
