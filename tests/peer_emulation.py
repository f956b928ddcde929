"""`PeerTransport` without a GPU: ranks are processes, kernels run in the emulator, memory is that of the machine.

As with GPUs, a block of memory lies at another address in every process that has mapped it, a process can't map its
own, and nobody can read what has been freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from test_cuda_exchange import cpu_tensors_as_if_on_a_gpu

from fp4comm.communicator import EPCommunicator
from fp4comm.transport import peer, peer_memory

FREED = 0xD5  # what freed memory holds
_STREAM = SimpleNamespace(cuda_stream=0)
_mapped: dict[int, mmap.mmap] = {}


class HostBlock:
    """Takes the place of `DeviceBlock`. The memory has no name, so nothing is left of it when its processes end."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        assert device.type == "cpu"
        self._file = os.memfd_create("fp4comm")
        os.ftruncate(self._file, num_bytes)
        self.handle = f"/proc/{os.getpid()}/fd/{self._file}".encode()
        self.tensor = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def free(self) -> None:
        """As `DeviceBlock.free`; tensors that are still there hold a pattern."""
        self.tensor.fill_(FREED)
        os.close(self._file)


def map_block(handle: bytes) -> int:
    """As `peer_memory.map_block`."""
    path = handle.decode()
    if path.startswith(f"/proc/{os.getpid()}/"):
        raise RuntimeError("a process can't map its own memory")
    file = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _mapped[address] = memory
    return address


def unmap_block(address: int) -> None:
    """As `peer_memory.unmap_block`; who still writes there dies."""
    _mapped.pop(address).close()


def num_mapped() -> int:
    """Blocks of other processes that this one has mapped."""
    return len(_mapped)


def _copy_bytes(target: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(target, source, num_bytes)


@contextlib.contextmanager
def peers_on_the_cpu() -> Iterator[None]:
    """Meanwhile `transport="peer"` takes any processes of the machine, and CPU tensors take the way of a GPU's."""
    patched: dict[Any, dict[str, Any]] = {
        peer_memory: {"DeviceBlock": HostBlock, "map_block": map_block, "unmap_block": unmap_block},
        peer: {
            "current_gpu": lambda: torch.device("cpu"),
            "copy_bytes": _copy_bytes,
            "name_of_gpu": lambda device: str(device),
            "have_atomics": lambda own, others: True,
            "_MIN_COUNTED_ROWS": 8,  # so that tests have exchanges of both kinds
        },
        torch.cuda: {
            "synchronize": lambda device=None: None,
            "current_stream": lambda device=None: _STREAM,
            "is_current_stream_capturing": lambda: False,
        },
        EPCommunicator: {"device": None},  # else it is asked whether it is the CPU, to spare that some steps
    }
    with cpu_tensors_as_if_on_a_gpu(), contextlib.ExitStack() as patches:
        for place, replacements in patched.items():
            for name, replacement in replacements.items():
                patches.enter_context(mock.patch.object(place, name, replacement, create=name.startswith("_MIN")))
        yield
