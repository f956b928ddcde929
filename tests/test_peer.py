"""Transport peer without a GPU (see `peer_emulation.py`): the bits of other transports, its slots, and lost ranks."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import exchange_cases
import numpy as np
import peer_emulation
import pytest
import torch
from cuda_emulator.emulator import compiler
from launch import RankError, have_launcher, run_ranks
from moe_problem import Problem, communicator, digest
from test_cuda_exchange import cpu_tensors_as_if_on_a_gpu
from test_exchange import on_threads
from thread_ranks import ThreadTransport, run_thread_ranks
from torch import Tensor

import fp4comm
from fp4comm.errors import ClosedError, InvalidArgument, NotAvailable, TransportError
from fp4comm.transport import MAX_BUFFER_BYTES, make_transport, peer, peer_memory

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not have_launcher("mpi"), reason="mpi is not installed"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
]

# By launcher and number of ranks; what is missing takes long here, and runs on GPUs.
CASES = {
    ("torchrun", 2): (
        "expert_layout_equals_reference",
        "gradients_equal_one_rank",
        "extreme_sizes",
    ),
    ("mpi", 3): (
        "rank_layout_equals_reference",
        "fixed_capacity",
        "fp8_arrival",
        "dispatch_and_combine_are_adjoint",
        "rank_layout_gradients",
        "cached_handle",
        "unused_experts_take_part_in_backward",
        "training_of_experts_alone",
        "every_precision_leg",
        "random_numbers_differ",
        "repeated_runs_are_equal",
        "traffic_counts_remote_bytes",
    ),
    ("mpi", 8): ("expert_layout_equals_reference", "gradients_equal_one_rank"),  # as many as a machine has GPUs
}
HIDDEN = 64


def make(group: Any, **options: Any) -> fp4comm.EPCommunicator:
    sizes = {"num_experts": 6, "hidden": HIDDEN, "precision": "bf16", "timeout_secs": 10.0, "transport": "peer"}
    return fp4comm.EPCommunicator(group, **(sizes | options))


def arguments(num_tokens: int, seed: int = 0, num_experts: int = 6) -> dict[str, Tensor]:
    """Tokens that go to two experts each."""
    rng = np.random.default_rng(seed)
    idx = np.array([rng.permutation(num_experts)[:2] for _ in range(num_tokens)], np.int64).reshape(-1, 2)
    x = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    return {"x": torch.from_numpy(x), "topk_idx": torch.from_numpy(idx)}


def exchange_rightly(comm: fp4comm.EPCommunicator, num_tokens: int, seed: int = 0) -> fp4comm.Received:
    """A dispatch and a combine whose results this rank knows: BF16 keeps small integers."""
    given = arguments(num_tokens, seed + comm.rank)
    x = (given["x"] * 8).round()
    recv, handle = comm.dispatch(x, given["topk_idx"], layout="rank")
    assert isinstance(recv.x, Tensor)
    out = comm.combine(recv.x * 2, handle)
    num_ranks = torch.tensor([len({e // comm.num_local_experts for e in row}) for row in given["topk_idx"].tolist()])
    assert torch.equal(out, x * 2 * num_ranks.view(-1, 1))
    return recv


def buffer_bytes(comm: fp4comm.EPCommunicator) -> int:
    assert isinstance(comm._transport, peer.PeerTransport)
    return comm._transport.buffer_bytes


# ---- the cases of all transports ----


def run_cases(group: Any, names: tuple[str, ...]) -> dict[str, list[int]]:
    """Over one transport, whose slots grow on the way."""
    with peer_emulation.peers_on_the_cpu():
        transport = make_transport(group, "peer", 60.0)
        results = {name: exchange_cases.CASES[name](transport) for name in names}
        transport.close()
        assert peer_emulation.num_mapped() == 0
    return results


@pytest.fixture(scope="module")
def started() -> Iterator[dict[tuple[str, int], Future[list[Any]]]]:
    """All groups at once: ranks wait for each other's compiler, not for the processor."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        yield {
            key: pool.submit(run_ranks, run_cases, key[1], names, launcher=key[0], timeout=200)
            for key, names in CASES.items()
        }


@pytest.mark.parametrize("launcher, num_ranks, case", [(*key, case) for key, names in CASES.items() for case in names])
def test_the_bits_of_threads(
    started: dict[tuple[str, int], Future[list[Any]]], launcher: str, num_ranks: int, case: str
) -> None:
    results = started[launcher, num_ranks].result()
    assert [result[case] for result in results] == on_threads(case, num_ranks)


# ---- what is peculiar to this one: each on all ranks of a group of three ----


def scenario_slots_grow(group: Any) -> None:
    """Together with the largest rank, by more than is needed; nothing is lost before and after."""
    with make(group) as comm:
        assert "peer with 0 MiB of at most 4096 MiB" in repr(comm)
        sizes = []
        for step, num_tokens in enumerate((3, 3, 40, 5, 41, 3000, 7)):
            exchange_rightly(comm, num_tokens if comm.rank == 0 else 2, seed=10 * step)
            sizes.append(buffer_bytes(comm))
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[2] < sizes[5] == sizes[6]
        assert set(comm._transport.all_gather_bytes(repr(sizes).encode())) == {repr(sizes).encode()}
        assert f"peer with {sizes[-1] / 2**20:.0f} MiB" in repr(comm)
        assert peer_emulation.num_mapped() == 2 * (comm.num_ranks - 1)  # the board and the slots
    assert peer_emulation.num_mapped() == 0


def scenario_slots_have_a_limit(group: Any) -> None:
    """Which is for both of them; beyond it all ranks raise, and can go on."""
    with make(group, max_buffer_bytes=60_000) as comm:
        exchange_rightly(comm, 10)
        with pytest.raises(InvalidArgument, match=r"max_buffer_bytes is 60000; accepted: at least \d{6} for this"):
            comm.dispatch(**arguments(1000, comm.rank))
        for _ in range(3):
            exchange_rightly(comm, 20)
        assert buffer_bytes(comm) <= 60_000
    for bad in (0, 1.5, True):
        with pytest.raises(InvalidArgument, match=f"rank 1: max_buffer_bytes is {bad}; accepted: a positive integer"):
            make(group, max_buffer_bytes=bad if group.Get_rank() == 1 else MAX_BUFFER_BYTES)
    with pytest.raises(InvalidArgument, match="max_buffer_bytes is 1000 on rank 0, 2000 on ranks 1, 2"):
        make(group, max_buffer_bytes=2000 if group.Get_rank() else 1000)


def be_late(comm: fp4comm.EPCommunicator, group: Any, make_late_call: Callable[[], object]) -> None:
    """The call of rank 1 comes when the others have given up; they name it, and are quickly gone."""
    if comm.rank == 1:
        group.Barrier()
        with pytest.raises(TransportError, match=r"rank 1 waited 0\.5 s"):  # for ranks that have closed
            make_late_call()
        return
    with pytest.raises(
        TransportError, match=r"waited 0.5 s for signal (\d+) of rank\(s\) \[1\] \(rank 1 at \d+\)"
    ) as e:
        make_late_call()
    assert e.value.ranks == (1,)
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"the peer transport can't be used: rank \d waited"):
            exchange_rightly(comm, 3)
    start = time.monotonic()
    comm.close()
    assert time.monotonic() - start < 3
    group.Barrier()


def scenario_late_rank_in_the_agreement(group: Any) -> None:
    """The same call finds out."""
    comm = make(group, timeout_secs=0.5)
    exchange_rightly(comm, 5)
    start = time.monotonic()
    be_late(comm, group, lambda: [exchange_rightly(comm, 5) for _ in range(2)])
    assert 0.4 < time.monotonic() - start < 8
    comm.close()


def scenario_late_rank_in_an_exchange(group: Any) -> None:
    """Without an agreement the next call finds out."""
    comm = make(group, timeout_secs=0.5, check_inputs=False)
    recv, handle = comm.dispatch(**arguments(5, comm.rank))

    def calls() -> None:
        for _ in range(4):
            comm.combine(recv.x, handle)

    be_late(comm, group, calls)
    comm.close()


def scenario_no_rank_waits_for_one_that_does_not_close(group: Any) -> None:
    comm = make(group)
    exchange_rightly(comm, 5)
    if comm.rank != 1:
        start = time.monotonic()
        comm.close()
        assert time.monotonic() - start < 5
    group.Barrier()
    comm.close()
    with pytest.raises(ClosedError, match="closed"):
        exchange_rightly(comm, 5)


def scenario_payload(group: Any) -> None:
    """What arrived is there until its memory is needed again, and for ever once it has been taken."""
    with make(group, precision="fp4") as comm, make(group, precision="fp4", transport="mpi") as other:
        given = arguments(20, comm.rank)
        recv, handle = comm.dispatch(**given)
        bits = payload_bits(recv)
        assert bits == payload_bits(other.dispatch(**given)[0])
        missed, _ = comm.dispatch(given["x"] * 2, handle=handle)
        for factor in (3, 4):
            comm.dispatch(given["x"] * factor, handle=handle)
        for ask in (lambda: missed.payload, missed.to_fp8_columns):
            with pytest.raises(InvalidArgument, match="payload: its memory may have been used again"):
                ask()
        assert payload_bits(recv) == bits


def scenario_payload_of_a_slow_rank(group: Any) -> None:
    """The others have gone on and may write where it still reads: it gets the right bits or an error."""
    with make(group, precision="fp4", check_inputs=False) as comm:
        given = arguments(20, comm.rank)
        recv, handle = comm.dispatch(**given)
        bits = payload_bits(recv)
        for _ in range(2):  # the slots grow
            comm.combine(recv.x, handle)
        recv, _ = comm.dispatch(given["x"], handle=handle)
        comm.combine(recv.x, handle)
        found = bits
        if comm.rank == 0:
            time.sleep(0.3)
            with contextlib.suppress(InvalidArgument):
                found = payload_bits(recv)
        comm.dispatch(given["x"] * 2 + 1, handle=handle)
        assert found == bits


def scenario_payload_of_a_closed_communicator(group: Any) -> None:
    with make(group, precision="fp4") as comm:
        recv, _ = comm.dispatch(**arguments(20, comm.rank))
    with pytest.raises(InvalidArgument, match="payload: its memory"):
        payload_bits(recv)


def payload_bits(recv: fp4comm.Received) -> int:
    return digest(recv.payload.packed, recv.payload.scales)


def scenario_other_machine(group: Any) -> None:
    name = "elsewhere" if group.Get_rank() == 2 else "here"
    with (
        mock.patch("socket.gethostname", return_value=name),
        pytest.raises(NotAvailable, match="transport 'peer' is for one machine; the ranks are on 2"),
    ):
        make(group)
    make(group).close()


def scenario_memory_cannot_be_mapped(group: Any) -> None:
    """Neither at the start, nor later, when smaller exchanges go on."""
    with failing_on_rank_1(group, "map_block"), pytest.raises(NotAvailable) as caught:
        make(group)
    assert str(caught.value) == "GPUs can't share memory: rank 1: can't map the memory of rank 0: map_block fails"
    assert peer_emulation.num_mapped() == 0
    with make(group) as comm:
        exchange_rightly(comm, 5)
        for name in ("map_block", "DeviceBlock"):
            message = "GPUs can't share memory: rank 1: .*" + name
            with failing_on_rank_1(group, name), pytest.raises(NotAvailable, match=message):
                comm.dispatch(**arguments(1000, comm.rank))
            assert peer_emulation.num_mapped() == comm.num_ranks - 1  # the boards
            exchange_rightly(comm, 5)
        exchange_rightly(comm, 1000)


@contextlib.contextmanager
def failing_on_rank_1(group: Any, name: str) -> Iterator[None]:
    def fail(*args: Any) -> None:
        raise OSError(f"{name} fails")

    with mock.patch.object(peer_memory, name, fail) if group.Get_rank() == 1 else contextlib.nullcontext():
        yield


class AsIfOnAGPU(Tensor):
    """A CPU tensor that says otherwise."""

    device = torch.device("cuda", 0)


def scenario_messages(group: Any) -> None:
    """Of any size, of the host and of the device, and numbers, of which a message can have too many."""
    transport = make_transport(group, "peer", 20.0)
    num_ranks, rank = transport.num_ranks, transport.rank
    for scale in (0, 1, 700, 0, 3):
        for kind in (Tensor, AsIfOnAGPU):
            outgoing = [message(rank, to, scale).as_subclass(kind) for to in range(num_ranks)]
            incoming = [torch.zeros_like(message(of, rank, scale)) for of in range(num_ranks)]
            transport.exchange(outgoing, incoming, "dispatch")
            assert all(torch.equal(part, message(of, rank, scale)) for of, part in enumerate(incoming))
    assert transport.all_gather_bytes(b"x" * rank) == [b"x" * other for other in range(num_ranks)]
    for width in (1, 2048, 2049):
        numbers = torch.arange(num_ranks * width).view(num_ranks, width)
        expected = torch.stack([numbers[rank] + 10**6 * other for other in range(num_ranks)])
        assert torch.equal(transport.all_to_all(numbers + 10**6 * rank), expected)
        strided = (numbers + 10**6 * rank).T.contiguous().T
        parts = [strided[:, :1], torch.tensor([[rank]]).expand(num_ranks, 3), strided[:, 1:-3]]
        arrived = transport.begin_all_to_all(parts)()
        assert arrived[:, 1:4].tolist() == [[other] * 3 for other in range(num_ranks)]
        assert torch.equal(
            torch.cat([arrived[:, :1], arrived[:, 4:]], 1), torch.cat([expected[:, :1], expected[:, 1:-3]], 1)
        )
    transport.close()


def message(source: int, target: int, scale: int) -> Tensor:
    return (torch.arange(scale * ((source + 2 * target) % 4)) * 7 + 3 * source + 5 * target).to(torch.uint8)


def scenario_many_experts(group: Any) -> None:
    """More numbers in an agreement than a message of the device has."""
    with make(group, num_experts=3 * 2100) as comm:
        given = arguments(9, comm.rank, num_experts=3 * 2100)
        recv, handle = comm.dispatch(**given)
        assert int(recv.num_recv_tokens_per_expert.sum()) == sum(recv.num_rows_per_expert)
        rounded = given["x"].bfloat16().float()
        assert torch.equal(comm.combine(recv.x, handle), (rounded * 2).bfloat16().float())


def scenario_alone(group: Any) -> None:
    """A group of one has nobody to write to."""
    from mpi4py import MPI

    with make(MPI.COMM_SELF) as comm:
        exchange_rightly(comm, 7)
        assert buffer_bytes(comm) == 0


def scenario_nobody_has_a_token(group: Any) -> None:
    with make(group) as comm:
        for num_tokens in (0, 3, 0):
            exchange_rightly(comm, num_tokens)


def scenario_no_gpu_on_one_rank(group: Any) -> None:
    def fail() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    is_here = group.Get_rank() == 1
    with (
        mock.patch.object(peer, "current_gpu", fail) if is_here else contextlib.nullcontext(),
        pytest.raises(NotAvailable, match=r"rank 1: .*No CUDA GPUs"),
    ):
        make(group, timeout_secs=1.0)


def scenario_few_multiprocessors(group: Any) -> None:
    """Loops over rows that go to other ranks."""
    assert len({layer(group, num_sms, transport="peer") for num_sms in (None, 1, 3)}) == 1


def scenario_random_delays(group: Any) -> None:
    """Ranks that fall behind anywhere, in exchanges with and without an agreement: every row is the right one."""
    delays, shared = np.random.default_rng(1000 + group.Get_rank()), np.random.default_rng(5)

    def dawdle() -> None:
        if delays.random() < 0.2:
            time.sleep(delays.uniform(0, 0.006))

    options: dict[str, Any] = {"precision": "fp32", "hidden": 32}
    with (
        make(group, **options) as checked,
        make(group, **options, check_inputs=False) as free,
        make(group, **options, check_inputs=False, num_max_tokens_per_rank=4) as fixed,
    ):
        for step in range(0, 320, 4):
            comm = (checked, free, fixed)[step // 4 % 3]
            idx = [choices(shared) for _ in range(comm.num_ranks)]
            dawdle()
            recv, handle = comm.dispatch(tokens(idx, comm.rank, step), idx[comm.rank], layout="rank")
            for _ in range(int(shared.integers(0, 3))):
                check_rows(recv, idx, comm, step)
                step += 1
                dawdle()
                recv, _ = comm.dispatch(tokens(idx, comm.rank, step), handle=handle)
            check_rows(recv, idx, comm, step)
            dawdle()
            out = comm.combine(recv.x, handle)
            num_ranks = sum(goes_to(idx[comm.rank], rank).int() for rank in range(comm.num_ranks))
            assert torch.equal(out, tokens(idx, comm.rank, step) * num_ranks.view(-1, 1)), step


def choices(rng: np.random.Generator) -> Tensor:
    """Up to two of six experts for up to four tokens."""
    return torch.from_numpy(rng.integers(-1, 6, (int(rng.integers(0, 5)), 2)))


def goes_to(idx: Tensor, rank: int) -> Tensor:
    return ((idx >= 0) & (idx // 2 == rank)).any(1)


def tokens(idx: list[Tensor], rank: int, step: int) -> Tensor:
    """Rows that say what they are."""
    first = (3 * step + rank) * 4
    return first + torch.arange(len(idx[rank])).view(-1, 1) + torch.arange(32) / 64


def check_rows(recv: fp4comm.Received, idx: list[Tensor], comm: fp4comm.EPCommunicator, step: int) -> None:
    sent = [tokens(idx, source, step)[goes_to(chosen, comm.rank)] for source, chosen in enumerate(idx)]
    assert torch.equal(recv.x[(recv.topk_idx >= 0).any(1)], torch.cat(sent)), step


SCENARIOS = {name.removeprefix("scenario_"): run for name, run in globals().items() if name.startswith("scenario_")}


def run_scenarios(group: Any, names: tuple[str, ...]) -> dict[str, str]:
    """How each failed on this rank, by name; empty if none has."""
    failures = {}
    with peer_emulation.peers_on_the_cpu(), mock.patch.object(peer, "_CLOSE_SECS", 1.0):
        for name in names:
            try:
                SCENARIOS[name](group)
            except (Exception, pytest.fail.Exception):
                failures[name] = traceback.format_exc()
            group.Barrier()
    return failures


@functools.cache
def failures_of_three_ranks() -> list[dict[str, str]]:
    """One start for all scenarios, also if it ends badly."""
    try:
        return run_ranks(run_scenarios, 3, tuple(SCENARIOS), timeout=150)
    except RankError as error:
        return [dict.fromkeys(SCENARIOS, str(error))]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    failures = {rank: failed[name] for rank, failed in enumerate(failures_of_three_ranks()) if name in failed}
    assert not failures, "".join(f"rank {rank}: {text}" for rank, text in failures.items())


# ---- a limit on multiprocessors, which needs no peers ----


def layer(group: Any, num_sms: int | None, **options: Any) -> int:
    """Bits of a forward and a backward pass."""
    problem = Problem(3, hidden=64)
    with communicator(group, problem, "fp4", num_sms=num_sms, **options) as comm:
        x, idx, weights = problem.mine(comm.rank)
        x.requires_grad_()
        weights.requires_grad_()
        recv, handle = comm.dispatch(x, idx, weights)
        out = comm.combine(recv.x * 2, handle)
        out.backward(torch.ones_like(out))
        return digest(recv.x, out, x.grad, weights.grad)


def test_few_multiprocessors_give_the_same_bits() -> None:
    expected = run_thread_ranks(layer, 3, None)
    with cpu_tensors_as_if_on_a_gpu():
        assert [run_thread_ranks(layer, 3, num_sms) for num_sms in (None, 1, 3)] == [expected] * 3


@pytest.mark.parametrize("num_sms", [0, -1, 1.5, True])
def test_wrong_number_of_multiprocessors(num_sms: Any) -> None:
    def run(group: ThreadTransport) -> None:
        with pytest.raises(
            InvalidArgument, match=f"rank 1: num_sms is {num_sms}; accepted: a positive integer or None"
        ):
            make(group, num_sms=num_sms if group.rank == 1 else None)

    run_thread_ranks(run, 2)


@pytest.mark.parametrize(("others", "expected"), [([], 0), (["same"], 0), (["same", "other"], 3), ([None], 3)])
def test_kernels_that_wait_leave_room_for_other_streams(others: list[str | None], expected: int) -> None:
    """None: a communicator that has not been used, and may be on any."""

    def transport(stream: str | None) -> Any:
        return types.SimpleNamespace(_last_stream=stream)

    own = transport("same")
    with mock.patch.object(peer, "_LIVE", [own, *map(transport, others)]):
        assert peer.PeerTransport._most_blocks(own, counting_blocks=1) == expected
