"""Kernels from `csrc/cuda`, compiled for the device at hand by NVRTC at first use and kept on disk by CuPy.

Every kernel is `extern "C"`, takes pointers and int64 only, and is specialised by macros. CuPy compiles with
`-ftz=true`; arithmetic whose subnormals matter, negation included, is therefore in PTX (`mul_rn`, `add_rn`, `sub_rn`),
which that option leaves as it is.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import cupy
import torch

_PACKAGE = Path(__file__).resolve().parent.parent

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


def launch(
    file: str, name: str, constants: dict[str, int], grid: int, block: int, args: tuple[int, ...], shared: int = 0
) -> None:
    """Launches a kernel on torch's current stream of the current device.

    Args:
        file: source in `csrc/cuda`.
        name: of the kernel in it.
        constants: macros that specialise it.
        grid, block: number of blocks, and of threads in each; nothing is launched for 0 blocks.
        args: pointers and integers, all passed as 64 bits.
        shared: bytes of dynamic shared memory.
    """
    global num_launches
    if grid == 0:
        return
    device = torch.cuda.current_device()
    stream = _stream(torch.cuda.current_stream(device).cuda_stream, device)
    kernel = _kernel(file, name, tuple(constants.items())).kernel
    kernel((grid,), (block,), args, shared, stream)
    num_launches += 1
