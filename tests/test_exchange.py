"""The cases of `exchange_cases.py` on every transport, and their equality between transports."""

from __future__ import annotations

import functools

import exchange_cases
import numpy as np
import pytest
import torch
from launch import have_launcher, run_ranks
from numerics import tensors_on
from thread_ranks import run_thread_ranks

import fp4comm

# launcher and number of ranks of every group that the cases run on
PROCESS_GROUPS = [("mpi", 1), ("mpi", 2), ("mpi", 4), ("torchrun", 2), ("torchrun", 3)]


@functools.cache
def on_threads(case: str, num_ranks: int) -> list[list[int]]:
    """What a case returned on every rank. One run serves all tests."""
    return run_thread_ranks(exchange_cases.CASES[case], num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", exchange_cases.CASES)
def test_case_on_threads(case: str, num_ranks: int) -> None:
    on_threads(case, num_ranks)


@pytest.mark.parametrize("case", exchange_cases.CASES)
def test_case_alone(case: str) -> None:
    assert exchange_cases.CASES[case](None) == on_threads(case, 1)[0]


def test_a_seed_of_numpy() -> None:
    """Gives the bits of the same number of Python's."""
    results = []
    for seed in (3, np.int64(3)):
        precision = fp4comm.Precision(dispatch=fp4comm.Leg("mxfp4", "rceil", stochastic=True))
        with fp4comm.EPCommunicator(num_experts=1, hidden=32, precision=precision, seed=seed) as comm:
            results.append(comm.dispatch(torch.linspace(-3, 3, 320).reshape(10, 32), torch.zeros(10, 1).int())[0].x)
    assert torch.equal(*results)


@pytest.mark.mpi
@pytest.mark.parametrize("launcher, num_ranks", PROCESS_GROUPS)
def test_processes_give_the_bits_of_threads(launcher: str, num_ranks: int) -> None:
    if not have_launcher(launcher):
        pytest.skip(f"{launcher} is not installed")
    processes = run_ranks(exchange_cases.run_cases, num_ranks, launcher=launcher, timeout=150)
    for case in exchange_cases.CASES:
        assert [results[case] for results in processes] == on_threads(case, num_ranks), case


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", exchange_cases.CASES)
def test_threads_on_a_gpu_give_the_bits_of_a_cpu(case: str, num_ranks: int) -> None:
    with tensors_on("cuda"):
        results = run_thread_ranks(exchange_cases.CASES[case], num_ranks, timeout_secs=60)
    assert results == on_threads(case, num_ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("case", exchange_cases.CASES)
def test_case_alone_on_a_gpu(case: str) -> None:
    with tensors_on("cuda"):
        assert exchange_cases.CASES[case](None) == on_threads(case, 1)[0]


@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.parametrize("transport, num_ranks", [("nccl", 2), ("peer", 2), ("peer", 3)])
def test_gpus_give_the_bits_of_a_cpu(launcher: str, transport: str, num_ranks: int) -> None:
    """Three ranks share two GPUs, or one, which do the work of one rank at a time."""
    if transport == "nccl" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    processes = run_ranks(exchange_cases.run_cases, num_ranks, transport, launcher=launcher, timeout=400)
    for case in exchange_cases.CASES:
        assert [results[case] for results in processes] == on_threads(case, num_ranks), case
