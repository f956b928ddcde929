"""Kernels from `csrc/cuda`, compiled for the device at hand by NVRTC at first use and kept on disk by CuPy.

Every kernel is `extern "C"`, takes pointers and int64 only, and is specialised by macros. CuPy compiles with
`-ftz=true`; arithmetic whose subnormals matter, negation included, is therefore in PTX (`mul_rn`, `add_rn`, `sub_rn`),
which that option leaves as it is.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path
from typing import Any

import cupy
import torch
from torch import Tensor

_PACKAGE = Path(__file__).resolve().parent.parent

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID

num_launches = 0
"""Kernels launched so far; tests and benchmarks read it."""


@functools.cache
def source_folder() -> Path:
    """Where the kernels lie: inside an installed package, or beside it in a checkout."""
    return next(folder for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc") if (folder / "cuda").is_dir())


@functools.cache
def _digest() -> str:
    """Of all sources: CuPy's cache does not look into included files."""
    digest = hashlib.sha256()
    for path in sorted(source_folder().rglob("*.*h")) + sorted(source_folder().rglob("*.cu")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def options(constants: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """What the compiler is told for these macros."""
    folder = source_folder()
    macros = tuple(f"-D{name}={value}" for name, value in constants)
    return ("-std=c++17", f"-I{folder / 'include'}", f"-I{folder / 'cuda'}", *macros)


@functools.cache
def _kernel(file: str, name: str, constants: tuple[tuple[str, int], ...]) -> Any:
    code = f'// {_digest()}\n#include "{file}"\n'
    return cupy.RawModule(code=code, options=options(constants), backend="nvrtc").get_function(name)


@functools.cache
def _can_start_early(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


class _TorchStream:
    """A stream of torch's as CuPy takes it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer  # version of the protocol


@functools.cache
def _stream(pointer: int, device: int) -> Any:
    if hasattr(cupy.cuda.Stream, "from_external"):  # since CuPy 14
        return cupy.cuda.Stream.from_external(_TorchStream(pointer))
    return cupy.cuda.ExternalStream(pointer, device)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an int for a value."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


def _launch_early(kernel: Any, grid: int, block: int, args: tuple[int, ...], shared: int, stream: int) -> None:
    """By the driver itself, since CuPy has no launch attributes."""
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
    config = _Config(grid, 1, 1, block, 1, 1, shared, stream, ctypes.pointer(attribute), 1)
    values = (ctypes.c_int64 * len(args))(*((arg + 2**63) % 2**64 - 2**63 for arg in args))
    start, size = ctypes.addressof(values), ctypes.sizeof(ctypes.c_int64)
    pointers = (ctypes.c_void_p * len(args))(*(start + size * i for i in range(len(args))))
    error = _driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(kernel.ptr), pointers, None)
    if error:
        raise RuntimeError(f"cuLaunchKernelEx: CUDA error {error}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def launch(
    file: str,
    name: str,
    constants: dict[str, int],
    grid: int,
    block: int,
    args: tuple[int, ...],
    shared: int = 0,
    early: bool = False,
) -> None:
    """Launches a kernel on torch's current stream of the current device.

    Args:
        file: source in `csrc/cuda`.
        name: of the kernel in it.
        constants: macros that specialise it.
        grid, block: number of blocks, and of threads in each; nothing is launched for 0 blocks.
        args: pointers and integers, all passed as 64 bits.
        shared: bytes of dynamic shared memory.
        early: the kernel may start once all blocks of the one before it allow that, where the device can do so.
    """
    global num_launches
    if grid == 0:
        return
    device = torch.cuda.current_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel = _kernel(file, name, tuple(constants.items())).kernel
    if early and _can_start_early(device):
        _launch_early(kernel, grid, block, args, shared, stream)
    else:
        kernel((grid,), (block,), args, shared, _stream(stream, device))
    num_launches += 1


def pointer(tensor: Tensor | None, dtype: torch.dtype = torch.int64) -> int:
    """An argument of a kernel; 0 if there is no tensor."""
    if tensor is None:
        return 0
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()
