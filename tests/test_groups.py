"""Groups of every kind, and what else goes on in them: parts of the world, several communicators, a rank that dies."""

from __future__ import annotations

import functools
import math
import os
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from launch import have_launcher, run_ranks
from moe_problem import Problem, communicator, expert_function, experts_of_rows, moe_on_one_rank, size_of
from torch import Tensor

import fp4comm
from fp4comm.errors import ClosedError, InvalidArgument, TransportError
from fp4comm.transport import mpi

DEATH_TIMEOUT_SECS = 8.0


class Step:
    """One step of a MoE layer, stage by stage, that knows what must come out."""

    def __init__(self, comm: Any, problem: Problem) -> None:
        self.comm, self.problem = comm, problem
        x, self.idx, weights = problem.mine(comm.rank)
        self.x, self.weights = x.requires_grad_(), weights.requires_grad_()
        self.out = x

    def dispatch(self) -> None:
        self.recv, self.handle = self.comm.dispatch(self.x, self.idx, self.weights, layout="expert")

    def combine(self) -> None:
        self.out = self.comm.combine(expert_function(self.recv.x, experts_of_rows(self.recv, self.comm)), self.handle)

    def backward(self) -> None:
        rng = np.random.default_rng(self.comm.rank)
        upstream = torch.from_numpy(rng.standard_normal(self.out.shape).astype(np.float32))
        self.out.backward(upstream)
        leaves: list[Tensor] = [value.detach().clone().requires_grad_() for value in (self.x, self.weights)]
        alone = moe_on_one_rank(self.problem, leaves[0], self.idx, leaves[1])
        alone.backward(upstream)
        assert torch.equal(self.out, alone)
        torch.testing.assert_close(self.x.grad, leaves[0].grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(self.weights.grad, leaves[1].grad, rtol=1e-5, atol=1e-4)


def train_once(group: Any, seed: int = 31) -> tuple[int, int]:
    """A step with checked results; returns the rank and the number of ranks."""
    problem = Problem(size_of(group), seed=seed)
    with communicator(group, problem, "fp32") as comm:
        step = Step(comm, problem)
        step.dispatch()
        step.combine()
        step.backward()
        return comm.rank, comm.num_ranks


def interleave(group: Any) -> None:
    """Two communicators on one group, each in the middle of a step of its own."""
    problems = [Problem(size_of(group), seed=seed) for seed in (32, 33)]
    with communicator(group, problems[0], "fp32") as first, communicator(group, problems[1], "fp32") as second:
        one, other = Step(first, problems[0]), Step(second, problems[1])
        one.dispatch()
        other.dispatch()
        other.combine()
        one.combine()
        one.backward()
        other.backward()


def train_with_timeout(group: Any, timeout_secs: float) -> tuple[int, int]:
    """A step with a timeout of its own."""
    with mock.patch("moe_problem.TIMEOUT_SECS", timeout_secs):
        return train_once(group)


def refusal_of(group: Any) -> str:
    """What a communicator over it says."""
    with pytest.raises(InvalidArgument) as caught:
        fp4comm.EPCommunicator(group, num_experts=4, hidden=32)
    return str(caught.value)


def on_mpi(world: Any) -> dict[str, Any]:
    """All checks on one rank of four."""
    rank = world.Get_rank()
    freed = world.Dup()
    freed.Free()
    seen = {
        "Split": train_once(world.Split(rank % 2, -rank)),
        "Create_cart": train_once(world.Create_cart([world.Get_size()])),
        "no end": train_with_timeout(world, math.inf),
    }
    part = world.Create(world.Get_group().Incl([0]))  # MPI.COMM_NULL on the other ranks
    refused = refusal_of(freed if rank == 0 else part)
    halves = world.Split(rank % 2, rank)
    both = halves.Create_intercomm(0, world, 1 - rank % 2, 77)
    assert "group is an intercommunicator; accepted: a communicator of the ranks" in refusal_of(both)
    interleave(world)
    with mock.patch.object(mpi, "_PIECE_BYTES", 100):  # of rows of 640; other numbers than recycled memory still holds
        seen["pieces"] = train_once(world, seed=35)
    return seen | {"refused": refused}


@pytest.mark.mpi
def test_mpi_groups() -> None:
    if not have_launcher("mpi"):
        pytest.skip("mpi is not installed")
    for rank, seen in enumerate(run_ranks(on_mpi, 4, launcher="mpi", timeout=60)):
        assert "group is MPI.COMM_NULL: this process is not in it, or it has been freed" in seen.pop("refused")
        whole = dict.fromkeys(("Create_cart", "no end", "pieces"), (rank, 4))
        assert seen == {"Split": (1 - rank // 2, 2)} | whole


def interleave_with_pending_receives(world: Any) -> list[float]:
    """As with pipeline parallelism, the program has receives of its own under way on the group, with small tags."""
    import torch.distributed as dist

    numbers = torch.zeros(64)
    works = [dist.irecv(numbers[tag : tag + 1], 1, tag=tag) for tag in range(64)] if world.rank() == 0 else []
    interleave(world)
    if world.rank() == 1:
        for tag in range(64):
            dist.send(torch.full((1,), float(tag)), 0, tag=tag)
    for work in works:
        work.wait()
    return numbers.tolist()


def lose_a_rank(world: Any) -> tuple[str, tuple[int, ...], float, str]:
    """The last rank dies while the others wait for it: what they see, after how long, and what they see next."""
    import torch.distributed as dist

    problem = Problem(size_of(world), seed=34)
    with mock.patch("moe_problem.TIMEOUT_SECS", DEATH_TIMEOUT_SECS):
        comm = communicator(world, problem, "fp32")
    dist.destroy_process_group = functools.partial(os._exit, 0)  # the launcher's next step, without a farewell
    if comm.rank == comm.num_ranks - 1:
        time.sleep(0.5)
        return "died", (), 0.0, ""
    start = time.monotonic()
    try:
        comm.dispatch(*problem.mine(comm.rank))
    except TransportError as error:
        seen = type(error).__name__, error.ranks, time.monotonic() - start
    try:
        comm.dispatch(*problem.mine(comm.rank))
    except ClosedError as error:
        then = type(error).__name__
    time.sleep(1.0)  # so that the others miss the dead rank and not this one
    return *seen, then


def on_process_groups(world: Any) -> dict[str, Any]:
    """All checks on one rank of four; the last one ends the group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    rank = world.rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([3, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    return {
        "new_group": train_once(odd if rank % 2 else even),
        "not in it": refusal_of(even if rank % 2 else odd),
        "no end": [train_with_timeout(world, secs) for secs in (1e15, math.inf)],
        "mesh": train_once(init_device_mesh("cpu", (4,))),
        "mesh ep": train_once(mesh["ep"]),
        "mesh dp": train_once(mesh["dp"]),
        "receive": interleave_with_pending_receives(world),
        "death": lose_a_rank(world),
    }


@pytest.mark.mpi
def test_process_groups() -> None:
    results = run_ranks(on_process_groups, 4, launcher="torchrun", timeout=60)
    for rank, seen in enumerate(results):
        assert seen["new_group"] == (rank // 2, 2)
        assert "group is one of torch that this process is not in; accepted: one that it is in" in seen["not in it"]
        assert seen["no end"] == [(rank, 4)] * 2
        assert seen["mesh"] == (rank, 4)
        assert seen["mesh ep"] == (rank % 2, 2)
        assert seen["mesh dp"] == (rank // 2, 2)
    assert results[0]["receive"] == list(range(64))
    assert results[3]["death"][0] == "died"
    for error, ranks, seconds, then in (seen["death"] for seen in results[:3]):
        assert error == "TransportError"
        assert ranks == (3,)
        assert seconds < DEATH_TIMEOUT_SECS + 2
        assert then == "ClosedError"
