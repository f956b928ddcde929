"""Recycled memory: never shared while anybody holds it, and bounded."""

from __future__ import annotations

import gc
import os
import threading

import torch

import fp4comm
from fp4comm.memory import RECYCLER, Recycler, empty

MEGABYTE = 1 << 20


def test_a_block_is_used_again_only_when_nothing_holds_it() -> None:
    recycler = Recycler()
    first = recycler.take(4 * MEGABYTE)
    address = first.data_ptr()
    view, array = first[10:20], first.numpy()
    del first
    assert recycler.take(4 * MEGABYTE).data_ptr() != address
    del view
    assert recycler.take(4 * MEGABYTE).data_ptr() != address
    array[:] = 1
    del array
    # the block before was free again, too; of the two, one is the first
    assert address in {block.data_ptr() for block in [recycler.take(4 * MEGABYTE), recycler.take(4 * MEGABYTE)]}


def test_autograd_holds_what_it_saves() -> None:
    x = torch.nn.Parameter(torch.ones(MEGABYTE))
    y = empty((MEGABYTE,), torch.float32)
    y.fill_(3)
    product = x * y  # saves y
    address = y.data_ptr()
    del y
    other = empty((MEGABYTE,), torch.float32)
    assert other.data_ptr() != address
    other.fill_(7)
    product.sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 3).all())


def test_it_holds_at_most_twice_what_was_in_use_at_once() -> None:
    recycler = Recycler()
    peak = 0
    for size in (3, 5, 9, 17, 4, 6, 40, 1):
        block = recycler.take(size * MEGABYTE)
        peak = max(peak, size * MEGABYTE * 5 // 4)
        del block
        assert 0 < recycler.held_bytes <= 2 * peak
    many = [recycler.take(5 * MEGABYTE) for _ in range(20)]
    del many
    assert 100 * MEGABYTE <= recycler.held_bytes <= 2 * 20 * 10 * MEGABYTE


def test_sizes_that_alternate_stay_in_their_blocks() -> None:
    """The pattern of a layer: results of two sizes in turn, never both alive."""
    recycler = Recycler()
    addresses: dict[int, set[int]] = {2: set(), 7: set()}
    for _ in range(5):
        for size, seen in addresses.items():
            block = recycler.take(size * MEGABYTE)
            seen.add(block.data_ptr())
            del block
    assert all(len(seen) == 1 for seen in addresses.values())


def test_garbage_collection_may_give_blocks_back_while_one_is_taken() -> None:
    """Blocks that only cycles hold come back whenever a collection runs, also in the middle of `take`."""
    recycler = Recycler()
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for size in range(300):
            cycle: list[object] = [recycler.take((1 + size % 7) * MEGABYTE)]
            cycle.append(cycle)
    finally:
        gc.set_threshold(*thresholds)


def test_any_thread_may_take_and_drop() -> None:
    recycler = Recycler()
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(200):
            block = recycler.take(MEGABYTE)
            block[::4096] = value
            if not bool((block[::4096] == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert recycler.held_bytes <= 2 * 16 * MEGABYTE  # a thread holds its block until it has the next


def test_a_forked_child_writes_to_its_own_copy() -> None:
    values = empty((MEGABYTE,), torch.float32)
    values.fill_(1)
    child = os.fork()
    if child == 0:
        values.numpy()[:] = 7
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((values == 1).all())


def test_results_of_a_communicator_are_recycled() -> None:
    """Steps of nearly the same size run in the same memory."""
    comm = fp4comm.EPCommunicator(num_experts=4, hidden=1024)
    held = []
    for num_tokens in (1000, 1003, 998, 1001, 999):
        x = torch.randn(num_tokens, 1024, dtype=torch.bfloat16)
        recv, handle = comm.dispatch(x, torch.arange(num_tokens * 2).reshape(-1, 2) % 4)
        assert isinstance(recv.x, torch.Tensor)
        comm.combine(recv.x, handle)
        held.append(RECYCLER.held_bytes)
    assert held[1] > 4 * MEGABYTE
    assert held[2:] == held[1:-1]
