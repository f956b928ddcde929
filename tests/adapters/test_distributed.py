"""The torch.distributed backend, over gloo."""

from __future__ import annotations

from functools import cache

import pytest
import torch.distributed as dist
from adapters.distributed_cases import CASES, run_cases
from launch import run_ranks

import fp4comm
from fp4comm.adapters import distributed


@cache
def failures(num_ranks: int) -> list[dict[str, str]]:
    """Of all cases on every rank; started once."""
    return run_ranks(run_cases, num_ranks, launcher="torchrun", timeout=120.0)


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_backend(name: str, num_ranks: int) -> None:
    texts = [f"rank {rank}:\n{found[name]}" for rank, found in enumerate(failures(num_ranks)) if name in found]
    assert not texts, "\n".join(texts)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(fp4comm.InvalidArgument, match="wire is 'fp4'; accepted: 'mxfp4', 'fp8', 'bf16'"):
        distributed.register(wire="fp4")
    with pytest.raises(fp4comm.InvalidArgument, match="min_width is -1; accepted: an integer, 0 or more"):
        distributed.Options(min_width=-1)


def test_a_default_group_is_refused() -> None:
    distributed.register()
    store = dist.HashStore()
    with pytest.raises(fp4comm.InvalidArgument, match=r"accepted: .*dist.new_group\(ranks, backend="):
        dist.init_process_group("fp4comm", store=store, rank=0, world_size=1)
    assert not dist.is_initialized()
