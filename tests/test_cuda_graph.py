"""Dispatch and combine without the host, on one GPU and on two."""

from __future__ import annotations

import functools
from typing import Any

import cuda_graph_cases
import pytest
import torch
from launch import have_launcher, run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cuda_graph_cases.CASES, ids=lambda case: case.__name__)
def test_alone(case: Any) -> None:
    case(None)


@functools.cache
def failures_of_two_ranks(transport: str) -> list[dict[str, str]]:
    """One start for all cases."""
    return run_ranks(cuda_graph_cases.run_all, 2, transport, timeout=120)


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["nccl", "peer"])
@pytest.mark.parametrize("case", cuda_graph_cases.CASES, ids=lambda case: case.__name__)
def test_two_gpus(case: Any, transport: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if not have_launcher("mpi"):
        pytest.skip("no mpi on this machine")
    for rank, failures in enumerate(failures_of_two_ranks(transport)):
        assert case.__name__ not in failures, f"rank {rank}: {failures[case.__name__]}"
