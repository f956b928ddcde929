"""The exchange on eight or four GPUs of a machine: what two can't show. `benchmarks/node.sh` runs this.

On a machine with two or three GPUs the same runs there on all of them.
"""

from __future__ import annotations

import functools

import cuda_graph_cases
import exchange_cases
import pytest
import torch
from launch import TESTS, have_launcher, launch_command, run_command, run_ranks
from thread_ranks import run_thread_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]
NUM_GPUS = torch.cuda.device_count()
NUM_RANKS = next((num for num in (8, 4) if num <= NUM_GPUS), max(NUM_GPUS, 2))
TIMEOUT_SECS = 120.0


@pytest.fixture(autouse=True)
def enough_gpus() -> None:
    if NUM_RANKS > NUM_GPUS:
        pytest.skip("needs two GPUs")
    if not have_launcher("mpi"):
        pytest.skip("no mpi on this machine")


@functools.cache
def on_threads(case: str) -> list[list[int]]:
    """What a case gives on the CPU. One run serves all transports."""
    return run_thread_ranks(exchange_cases.CASES[case], NUM_RANKS)


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_exchange_gives_the_bits_of_a_cpu(transport: str) -> None:
    processes = run_ranks(exchange_cases.run_cases, NUM_RANKS, transport, True, timeout=TIMEOUT_SECS)
    for case in exchange_cases.CASES:
        assert [results[case] for results in processes] == on_threads(case), case


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_graphs(transport: str) -> None:
    for rank, failures in enumerate(run_ranks(cuda_graph_cases.run_all, NUM_RANKS, transport, timeout=TIMEOUT_SECS)):
        assert not failures, f"rank {rank}: {failures}"


def test_peers_under_load() -> None:
    soak = [str(TESTS / "peer_soak.py"), "--iterations", "3000"]
    code, output = run_command([*launch_command("mpi", NUM_RANKS), *soak], timeout=TIMEOUT_SECS)
    assert code == 0, output
    assert output.count(": 0 wrong of") == NUM_RANKS
