"""The helper that runs functions on several ranks must report failures and never hang."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from launch import RankError, run_ranks

pytestmark = pytest.mark.mpi


def rank_and_size(group: Any, factor: int) -> tuple[int, int]:
    if hasattr(group, "Get_rank"):
        return factor * group.Get_rank(), group.Get_size()
    return factor * group.rank(), group.size()


def one_rank_raises(group: Any) -> None:
    rank, _ = rank_and_size(group, 1)
    print(f"hello from rank {rank}")
    if rank == 1:
        time.sleep(2)
        raise ValueError("the cause")
    time.sleep(60)


def one_rank_exits(group: Any) -> None:
    if rank_and_size(group, 1)[0] == 1:
        os._exit(3)
    time.sleep(60)


def sleep(group: Any) -> None:
    time.sleep(60)


def test_results_come_back_in_rank_order(launcher: str) -> None:
    assert run_ranks(rank_and_size, 3, 10, launcher=launcher) == [(0, 3), (10, 3), (20, 3)]


def test_an_exception_fails_with_the_output_of_all_ranks(launcher: str) -> None:
    with pytest.raises(RankError, match=r"(?s)hello from rank 0.*hello from rank 1.*ValueError: the cause"):
        run_ranks(one_rank_raises, 2, launcher=launcher, timeout=30)


def test_a_dead_rank_fails_the_run(launcher: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError):
        run_ranks(one_rank_exits, 2, launcher=launcher, timeout=40)
    assert time.monotonic() - start < 35


def test_a_rank_that_hangs_shows_where(launcher: str) -> None:
    with pytest.raises(RankError, match=r"in sleep\b"):
        run_ranks(sleep, 2, launcher=launcher, timeout=3)
