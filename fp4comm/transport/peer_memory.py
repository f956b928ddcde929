"""Device memory that the processes of one machine share, by CUDA IPC through CuPy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import NotAvailable
from .base import Transport

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_DEFAULT_KIND = 4  # cudaMemcpyDefault
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_GRANULARITY = 2 << 20


def _load_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise NotAvailable(f"memory can't be shared between GPUs without CuPy ({error})") from error
    return cupy


def current_gpu() -> torch.device:
    """The device that this process has chosen."""
    return torch.device("cuda", torch.cuda.current_device())


def name_of_gpu(device: torch.device) -> str:
    """The same in every process of the machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def have_atomics(own: str, others: Sequence[str]) -> bool:
    """Whether atomic operations of this GPU on the memory of the others are sure to work.

    That is so over NVLink, but not between all GPUs that can map each other's memory. Of GPUs that this process does
    not see (CUDA_VISIBLE_DEVICES) it is not known.
    """
    numbers = {name_of_gpu(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    answer = ctypes.c_int()
    for other in set(others) - {own}:
        if other not in numbers:
            return False
        pair = (numbers[own], numbers[other])
        error = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(answer), _NATIVE_ATOMICS, *pair)
        if error or not answer.value:
            return False
    return True


class DeviceBlock:
    """Zeroed memory of this process's GPU.

    Attributes:
        address: of its first byte.
        tensor: uint8, all of it.
        handle: by which other processes of the machine can map it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        cupy = _load_cupy()
        self._runtime = cupy.cuda.runtime
        with cupy.cuda.Device(device.index):
            # an allocation of its own, not a part of one: a handle is of the whole
            num_bytes = -(-num_bytes // _GRANULARITY) * _GRANULARITY
            self.address: int = self._runtime.malloc(num_bytes)
            self._runtime.memset(self.address, 0, num_bytes)
            self._runtime.deviceSynchronize()
            self.handle = bytes(self._runtime.ipcGetMemHandle(self.address))
            memory = cupy.cuda.UnownedMemory(self.address, num_bytes, self, device.index)
            array = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        self.tensor: Tensor = torch.from_dlpack(array)

    def free(self) -> None:
        """After all who have mapped it have unmapped it."""
        self._runtime.free(self.address)


def map_block(handle: bytes) -> int:
    """The address, here, of another process's block."""
    return int(_load_cupy().cuda.runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))


def unmap_block(address: int) -> None:
    """Gives up what `map_block` returned."""
    _load_cupy().cuda.runtime.ipcCloseMemHandle(address)


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """From address to address, on any device that is mapped here, on torch's current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    _load_cupy().cuda.runtime.memcpyAsync(target, source, num_bytes, _DEFAULT_KIND, stream)


class SharedBlock:
    """A block on every rank, mapped by all of them. Making one and closing it are collective.

    Args:
        num_bytes: of each.
        device: of this rank.
        control: the ranks.

    Attributes:
        num_bytes: of each.
        own: this rank's.
        addresses: of all ranks' blocks, here.

    Raises:
        NotAvailable: on all ranks: one of them can't map another's memory.
    """

    def __init__(self, num_bytes: int, device: torch.device, control: Transport) -> None:
        self._control, self.num_bytes = control, num_bytes
        problem, handle = "", b""
        try:
            self.own: DeviceBlock | None = DeviceBlock(num_bytes, device)
            handle = self.own.handle
        except Exception as error:  # CuPy's, torch's or out of memory; the others must not wait
            self.own, problem = None, f"{type(error).__name__}: {error}"
        handles = control.all_gather_bytes(handle)
        self.addresses: list[int] = []
        for rank, other in enumerate(handles):
            if problem or not all(handles):
                break
            try:
                is_own = rank == control.rank and self.own is not None
                self.addresses.append(self.own.address if is_own and self.own else map_block(other))
            except Exception as error:
                problem = f"can't map the memory of rank {rank}: {error}"
        problems = control.all_gather_bytes(problem.encode())
        if any(problems):
            self.close()
            texts = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(problems) if text]
            raise NotAvailable(f"GPUs can't share memory: {'; '.join(texts)}")

    def close(self, may_wait: bool = True) -> None:
        """Unmaps the others' blocks and, once they have done the same, frees the own one.

        Args:
            may_wait: False = a rank may be lost: what it may have mapped is left to the end of the process.
        """
        for rank, address in enumerate(self.addresses):
            if rank != self._control.rank:
                unmap_block(address)
        self.addresses = []
        if may_wait:
            self._control.all_gather_bytes(b"")
            if self.own is not None:
                self.own.free()
        self.own = None
