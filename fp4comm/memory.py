"""Memory for results. On the host it is used again once nobody holds it, as torch's allocator does for devices.

The C library maps every block above 32 MB anew and gives it back when it is freed, so each large result is zeroed and
faulted in page by page: 64 of the 72 ms of CPU time that unpacking 117 MB took (Zen 3), against 10 ms in memory that
has been used before.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20  # smaller blocks come from the C library, which does keep them


class Recycler:
    """Blocks of memory by size. A block returns when the last tensor, view or array over it is gone.

    A request takes the smallest free block that is large enough and at most twice as large. Never more than twice the
    memory is held that was in use at once so far: beyond that the oldest free blocks are given back. (At once the peak
    itself, results of several sizes in turn throw out the block that is needed next: a dispatch took 518 ms, not 48.)

    Attributes:
        held_bytes: bytes of all blocks, in use and free.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._bytes_in_use = 0
        self._peak_bytes = 0
        self._free: list[mmap.mmap] = []  # oldest first
        # A garbage collection can give a block back at any time, also within `take`. So that only appends here, which
        # is atomic, and the accounting follows in the next `take`.
        self._returned: deque[mmap.mmap] = deque()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """Uninitialised uint8 memory."""
        with self._lock:
            self._collect_returned()
            block = self._free_block(_rounded(num_bytes))
            self._bytes_in_use += len(block)
            self._peak_bytes = max(self._peak_bytes, self._bytes_in_use)
            while self._free and self.held_bytes > 2 * self._peak_bytes:
                self.held_bytes -= len(self._free.pop(0))
        view = memoryview(block)
        weakref.finalize(view, self._returned.append, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes)

    def _collect_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._bytes_in_use -= len(block)
            self._free.append(block)

    def _free_block(self, size: int) -> mmap.mmap:
        fitting = [block for block in self._free if size <= len(block) <= 2 * size]
        if fitting:
            block = min(fitting, key=len)
            self._free.remove(block)
            return block
        self.held_bytes += size
        # private, so that a forked child gets a copy of results rather than a hand on ours
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _rounded(num_bytes: int) -> int:
    """Sizes in steps of at most an eighth, so that the slightly different sizes of successive steps share blocks."""
    step = max(1 << 18, 1 << max((num_bytes - 1).bit_length() - 3, 0))
    return -(-num_bytes // step) * step


RECYCLER = Recycler()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """`torch.empty` on a device, None = the CPU; there in recycled memory if it is large."""
    if device is not None and torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    num_bytes = dtype.itemsize
    for extent in shape:
        num_bytes *= extent
    if num_bytes < _LEAST_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return RECYCLER.take(num_bytes).view(dtype).view(tuple(shape))


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a device's tensor in host memory, which is there once the current stream has come to this point."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, device="cpu", dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
