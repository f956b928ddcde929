"""Adapters between two GPUs; those of libraries with models have such tests beside their others."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from adapters import gpu_cases
from launch import run_ranks

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@cache
def failures() -> list[dict[str, str]]:
    """Of all cases on both ranks; started once."""
    return run_ranks(gpu_cases.run_cases, 2, launcher="torchrun", timeout=400, on_gpus=True)


def check(name: str) -> None:
    texts = [f"rank {rank}:\n{found[name]}" for rank, found in enumerate(failures()) if name in found]
    assert not texts, "\n".join(texts)


@needs_two
@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.parametrize("name", [case.__name__ for case in gpu_cases.CASES if case is not gpu_cases.megatron_models])
def test_two_gpus(name: str) -> None:
    check(name)


@needs_two
@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.skipif(not gpu_cases.HAVE_MEGATRON, reason="needs Megatron-Core (pip install megatron-core)")
def test_megatron_on_two_gpus() -> None:
    check("megatron_models")
