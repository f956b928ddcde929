"""The exchange on all GPUs of a machine, four and eight of them: what two can't show. `benchmarks/node.sh` runs this.

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
NUM_RANKS = [num for num in (4, 8) if num <= NUM_GPUS] or [max(NUM_GPUS, 2)]
TIMEOUT_SECS = 120.0


@pytest.fixture(autouse=True)
def enough_gpus(num_ranks: int) -> None:
    if num_ranks > NUM_GPUS:
        pytest.skip("needs two GPUs")
    if not have_launcher("mpi"):
        pytest.skip("no mpi on this machine")


@functools.cache
def on_threads(case: str, num_ranks: int) -> list[list[int]]:
    """What a case gives on the CPU. One run serves all transports."""
    return run_thread_ranks(exchange_cases.CASES[case], num_ranks)


@pytest.mark.parametrize("transport", ["nccl", "peer"])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_exchange_gives_the_bits_of_a_cpu(num_ranks: int, transport: str) -> None:
    processes = run_ranks(exchange_cases.run_cases, num_ranks, transport, timeout=TIMEOUT_SECS)
    for case in exchange_cases.CASES:
        assert [results[case] for results in processes] == on_threads(case, num_ranks), case


@pytest.mark.parametrize("transport", ["nccl", "peer"])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_graphs(num_ranks: int, transport: str) -> None:
    for rank, failures in enumerate(run_ranks(cuda_graph_cases.run_all, num_ranks, transport, timeout=TIMEOUT_SECS)):
        assert not failures, f"rank {rank}: {failures}"


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_peers_under_load(num_ranks: int) -> None:
    soak = [str(TESTS / "peer_soak.py"), "--iterations", "3000"]
    code, output = run_command([*launch_command("mpi", num_ranks), *soak], timeout=TIMEOUT_SECS)
    assert code == 0, output
    assert output.count(": 0 wrong of") == num_ranks
