"""Transport peer on GPUs: what is its own. Its exchange is tested with all other transports (test_exchange.py)."""

from __future__ import annotations

import functools
import random
import time
from typing import Any
from unittest import mock

import gpu_messages
import peer_soak
import pytest
import torch
from gpu_messages import on_own_gpu
from launch import failures_of, have_launcher, run_ranks

import fp4comm
from fp4comm.errors import ClosedError, InvalidArgument, TransportError
from fp4comm.transport import peer

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


def messages_of_any_size(group: Any) -> None:
    gpu_messages.messages_of_any_size(group, "peer", 5_000_001)


def tokens(comm: fp4comm.EPCommunicator, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and topk_idx: each to all experts of the first two ranks."""
    return torch.ones(num, 64, device=comm.device), torch.arange(4, device=comm.device).repeat(num, 1)


def rank_that_never_calls(group: Any) -> None:
    options: dict[str, Any] = {"num_experts": 4, "hidden": 64, "transport": "peer"}
    with fp4comm.EPCommunicator(on_own_gpu(group), **options) as comm:
        comm.dispatch(*tokens(comm, 8))  # compiles kernels, one rank faster than the other
    comm = fp4comm.EPCommunicator(group, timeout_secs=1.0, **options)
    x, idx = tokens(comm, 8)
    _, handle = comm.dispatch(x, idx)
    start = time.monotonic()
    if comm.rank == 0:
        comm.dispatch(x, handle=handle)
        torch.cuda.synchronize()
        with pytest.raises(TransportError, match=r"waited 1 s for signal \d+ of rank\(s\) \[1\]") as caught:
            comm.dispatch(x, handle=handle)
        assert caught.value.ranks == (1,)
        with pytest.raises(ClosedError, match="can't be used"):
            comm.dispatch(x, handle=handle)
        assert time.monotonic() - start < 10
    group.Barrier()
    comm.close()
    assert time.monotonic() - start < 30


def slots_grow_to_their_limit(group: Any) -> None:
    options: dict[str, Any] = {"num_experts": 4, "hidden": 64, "transport": "peer", "max_buffer_bytes": 100_000}
    with fp4comm.EPCommunicator(on_own_gpu(group), **options) as comm:
        for num in (1, 100, 3):
            x, idx = tokens(comm, num)
            assert torch.equal(comm.combine(*turned(comm.dispatch(x, idx, layout="rank"))), 2 * x)
        before = repr(comm)
        assert "peer with 0 MiB of at most 0 MiB of buffers" in before
        x, idx = tokens(comm, 5000)
        with pytest.raises(InvalidArgument, match="max_buffer_bytes is 100000; accepted: at least "):
            comm.dispatch(x, idx)
        x, idx = tokens(comm, 10)
        assert torch.equal(comm.combine(*turned(comm.dispatch(x, idx, layout="rank"))), 2 * x)


def turned(dispatched: tuple[Any, Any]) -> tuple[torch.Tensor, Any]:
    """The arguments of the combine of a dispatch, for experts that do nothing."""
    return dispatched[0].x, dispatched[1]


def payload_must_be_asked_for_in_time(group: Any) -> None:
    with fp4comm.EPCommunicator(on_own_gpu(group), num_experts=4, hidden=64, transport="peer") as comm:
        x, idx = tokens(comm, 10)
        received, handle = comm.dispatch(x, idx)
        payload = received.payload
        late, _ = comm.dispatch(x, handle=handle)
        comm.dispatch(x, handle=handle)
        comm.dispatch(x, handle=handle)
        assert torch.equal(received.payload.dequantize(), payload.dequantize())
        with pytest.raises(InvalidArgument, match="payload: its memory may have been used again"):
            _ = late.payload


def auto_takes_it(group: Any) -> None:
    with fp4comm.EPCommunicator(on_own_gpu(group), num_experts=4, hidden=64) as comm:
        assert comm.transport == ("peer" if torch.cuda.device_count() > 1 else "mpi")


def no_row_is_wrong(group: Any) -> None:
    wrong, rows = peer_soak.soak(group, 1000)
    assert wrong == 0
    assert rows > 50_000


def rows_that_arrive_do_not_spoil_those_that_leave(group: Any) -> None:
    """Two kernels at the same time: neither may write to memory that was freed after the other had been launched."""
    options: dict[str, Any] = {"num_experts": 4, "hidden": 1024, "precision": "bf16", "transport": "peer"}
    with mock.patch.object(peer, "_MIN_COUNTED_ROWS", 1), fp4comm.EPCommunicator(on_own_gpu(group), **options) as comm:
        num = 3000
        idx = torch.arange(num, device=comm.device).view(-1, 1) % 4
        weights = 2.0 ** -(torch.arange(num, device=comm.device).view(-1, 1) % 3).float()
        received, handle = comm.dispatch(torch.ones(num, 1024, device=comm.device), idx, weights)
        expected = received.topk_weights.view(-1, 1).expand_as(received.x)
        for _ in range(30):
            y = torch.ones_like(received.x).requires_grad_()
            if comm.rank:
                torch.cuda._sleep(random.randrange(1_000_000))
            comm.combine(y, handle).sum().backward()  # autograd's gradient is a view, of which a copy is sent
            assert torch.equal(y.grad, expected)


def two_communicators_at_once(group: Any) -> None:
    """Kernels that wait leave room for those that others wait for, in whatever order ranks come to them."""
    options: dict[str, Any] = {"num_experts": 4, "hidden": 1024, "transport": "peer", "timeout_secs": 20.0}
    comms = [fp4comm.EPCommunicator(on_own_gpu(group), **options) for _ in range(2)]
    x = torch.randn(8192, 1024, device=comms[0].device)
    idx = torch.rand(8192, 4, device=x.device).topk(2).indices
    ways = [(comm, torch.cuda.Stream(), comm.dispatch(x, idx, layout="rank")) for comm in comms]
    torch.cuda.synchronize()
    for _ in range(40):
        order = random.sample(ways, 2)
        for comm, stream, (first, handle) in order:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(random.randrange(200_000))
                again, _ = comm.dispatch(x, handle=handle)
                assert again.x.shape == first.x.shape
    torch.cuda.synchronize()
    for comm, _, (first, handle) in ways:
        assert torch.equal(comm.dispatch(x, handle=handle)[0].x, first.x)
        comm.close()


CASES = (
    messages_of_any_size,
    rank_that_never_calls,
    slots_grow_to_their_limit,
    payload_must_be_asked_for_in_time,
    auto_takes_it,
    rows_that_arrive_do_not_spoil_those_that_leave,
    two_communicators_at_once,
    no_row_is_wrong,
)


def run_all(group: Any) -> dict[str, str]:
    """One start for all cases."""
    return failures_of(CASES, group)


@functools.cache
def failures_of_two_ranks() -> list[dict[str, str]]:
    return run_ranks(run_all, 2, timeout=150)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    if not have_launcher("mpi"):
        pytest.skip("no mpi on this machine")
    for rank, failures in enumerate(failures_of_two_ranks()):
        assert case.__name__ not in failures, f"rank {rank}: {failures[case.__name__]}"
