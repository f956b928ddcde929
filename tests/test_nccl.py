"""What is NCCL's own: finding each other, errors, lost ranks. Its exchange is tested with all other transports."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable
from typing import Any

import gpu_messages
import numpy as np
import pytest
import torch
from gpu_messages import on_own_gpu
from launch import have_launcher, run_ranks

import fp4comm
from fp4comm.errors import ClosedError, InvalidArgument, NotAvailable, TransportError
from fp4comm.transport import make_transport, nccl


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if not have_launcher("mpi"):
        pytest.skip("no mpi on this machine")


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotAvailable, match="torch finds no CUDA device"):
        nccl.load_nccl()
    assert nccl.own_device() is None


def test_ranks_that_share_or_lack_a_gpu_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"ranks \[0, 2\] share a GPU; accepted: one GPU per rank"):
        nccl._check_devices(["a 0", "a 1", "a 0", "b 0"])
    with pytest.raises(NotAvailable, match=r"on rank\(s\) \[1\]: no CUDA device"):
        nccl._check_devices(["a 0", None])
    nccl._check_devices(["a 0", "b 0"])


def messages_of_any_size(group: Any) -> None:
    gpu_messages.messages_of_any_size(group, "nccl", 50_000_001)


def time_without_rank_1(group: Any, calls: Callable[[fp4comm.EPCommunicator, Any, Any], None]) -> float:
    """Seconds that rank 0 needs for `calls(comm, x, (idx, handle))`, which rank 1 does not make."""
    rank = on_own_gpu(group).Get_rank()
    with fp4comm.EPCommunicator(group, num_experts=4, hidden=64, transport="nccl", timeout_secs=2.0) as comm:
        x = torch.ones(8, 64, device=comm.device)
        idx = torch.arange(4, device=comm.device).repeat(8, 1)
        _, handle = comm.dispatch(x, idx)
        start = time.monotonic()
        if rank == 0:
            calls(comm, x, (idx, handle))
            with pytest.raises(ClosedError, match="can't be used"):
                comm.dispatch(x, handle=handle)
        waited = time.monotonic() - start
        group.Barrier()
    return waited


def rank_that_never_calls(group: Any) -> float:
    def calls(comm: fp4comm.EPCommunicator, x: Any, routes: Any) -> None:
        with pytest.raises(TransportError, match="rank 0: agreement over NCCL took longer than 2 s; a rank ended"):
            comm.dispatch(x, routes[0])

    return time_without_rank_1(group, calls)


def rank_that_skips_a_call_nobody_waits_for(group: Any) -> float:
    """The stream of a rank that sent and received in vain is freed, and the next call says why."""

    def calls(comm: fp4comm.EPCommunicator, x: Any, routes: Any) -> None:
        comm.dispatch(x, handle=routes[1])
        torch.cuda.synchronize()
        with pytest.raises(TransportError, match="dispatch over NCCL took longer than 2 s"):
            comm.dispatch(x, handle=routes[1])

    return time_without_rank_1(group, calls)


def wrong_argument_on_one_rank(group: Any) -> None:
    """An expert that does not exist is found by a kernel; all ranks raise, and go on afterwards."""
    on_own_gpu(group)
    with fp4comm.EPCommunicator(group, num_experts=4, hidden=64, transport="nccl", timeout_secs=30.0) as comm:
        x = torch.ones(8, 64, device=comm.device)
        idx = torch.arange(4, device=comm.device).repeat(8, 1)
        wrong = idx.clone()
        wrong[3, 1] = 4 if comm.rank == 1 else 1
        with pytest.raises(InvalidArgument, match=r"rank 1: topk_idx\[3, 1\] is 4; accepted: 0 to 3, or -1"):
            comm.dispatch(x, wrong)
        with pytest.raises(InvalidArgument, match=r"rank 0: x is on cpu; accepted: cuda"):
            comm.dispatch(x.cpu() if comm.rank == 0 else x, idx)
        with pytest.raises(InvalidArgument, match="dtype of x is"):
            comm.dispatch(x.to(torch.bfloat16) if comm.rank == 0 else x, idx)
        recv, handle = comm.dispatch(x, idx)
        assert torch.equal(comm.combine(recv.x, handle), 4 * x)
    with fp4comm.EPCommunicator(
        group, num_experts=4, hidden=64, transport="nccl", num_max_tokens_per_rank=8, timeout_secs=30.0
    ) as comm:
        comm.dispatch(x, wrong)
        torch.cuda.synchronize()
        if comm.rank == 1:
            with pytest.raises(InvalidArgument, match="numbers that are no expert"):
                comm.dispatch(x, idx)
        recv, handle = comm.dispatch(x, idx)
        assert torch.equal(comm.combine(recv.x, handle), 4 * x)


def several_communicators_and_streams(group: Any) -> None:
    """Two communicators in turn on two streams: each call waits for what its stream holds."""
    on_own_gpu(group)
    comms = [
        fp4comm.EPCommunicator(group, num_experts=4, hidden=4096, precision="bf16", transport="nccl") for _ in range(2)
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    idx = torch.from_numpy(np.random.default_rng(comms[0].rank).permuted(np.tile(np.arange(4), (2048, 1)), axis=1))
    idx = idx[:, :2].contiguous().to(comms[0].device)
    torch.cuda.synchronize()
    results = []
    for step in range(6):
        comm, stream = comms[step % 2], streams[step // 2 % 2]
        with torch.cuda.stream(stream):
            x = torch.full((2048, 4096), float(step), device=comm.device, dtype=torch.bfloat16)
            torch.cuda._sleep(2_000_000)
            x += 1
            recv, handle = comm.dispatch(x, idx)
            results.append((step, comm.combine(recv.x, handle)))
    torch.cuda.synchronize()
    for step, out in results:
        assert torch.equal(out, torch.full_like(out, 2.0 * (step + 1)))
    for comm in comms:
        comm.close()


def rank_that_leaves(group: Any) -> float:
    """Closing waits for an exchange that the other rank never makes, but not for ever."""
    rank = on_own_gpu(group).Get_rank()
    start = time.monotonic()
    with fp4comm.EPCommunicator(group, num_experts=4, hidden=64, transport="nccl", timeout_secs=2.0) as comm:
        x = torch.ones(8, 64, device=comm.device)
        _, handle = comm.dispatch(x, torch.arange(4, device=comm.device).repeat(8, 1))
        if rank == 0:
            comm.dispatch(x, handle=handle)
    waited = time.monotonic() - start
    group.Barrier()
    return waited


CASES = (
    messages_of_any_size,
    wrong_argument_on_one_rank,
    several_communicators_and_streams,
    rank_that_never_calls,
    rank_that_skips_a_call_nobody_waits_for,
    rank_that_leaves,
)


def run_all(group: Any) -> dict[str, Any]:
    """What each case returned, or how it failed: starting ranks takes longer than all cases."""
    results: dict[str, Any] = {}
    for case in CASES:
        try:
            results[case.__name__] = case(group)
        except BaseException:
            results[case.__name__] = traceback.format_exc()
    return results


@functools.cache
def results_of_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, timeout=120)


@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    for rank, results in enumerate(results_of_two_ranks()):
        result = results[case.__name__]
        assert not isinstance(result, str), f"rank {rank}: {result}"
        if rank == 0 and result is not None:
            assert 1.5 < result < 10


def sharing_a_gpu(group: Any) -> str:
    torch.cuda.set_device(0)
    with pytest.raises(InvalidArgument, match=r"ranks \[0, 1\] share a GPU"):
        make_transport(group, "nccl", 30.0)
    return make_transport(group, "auto", 30.0).name


@pytest.mark.gpu
@pytest.mark.mpi
def test_ranks_on_one_gpu_fall_back_to_the_host() -> None:
    if not have_launcher("mpi"):
        pytest.skip("no mpi on this machine")
    assert run_ranks(sharing_a_gpu, 2, timeout=60) == ["mpi", "mpi"]
