"""Where tests run the functions of a backend: on a GPU, on the CPU by the emulator, or in the loops of the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cuda_emulator import emulator
from numerics import to_numpy
from numpy.typing import NDArray
from torch import Tensor

from fp4comm.backends import Rows, cpu
from fp4comm.formats import Kind

FILL = 0xA5  # what memory that nobody may write holds
ALIGNMENT = 32  # of rows in our own memory


@dataclass(frozen=True)
class Target:
    """A backend and the device of its tensors."""

    backend: ModuleType
    device: torch.device
    machine: emulator.Emulator | None = None

    def num_launches(self) -> int:
        """Kernels launched so far."""
        from fp4comm.backends import cuda_compile

        return cuda_compile.num_launches if self.machine is None else len(self.machine.launches)

    def pick(self, small: Any, large: Any) -> Any:
        """What a processor gets through in a moment, and what a GPU does (but not under a sanitizer)."""
        return large if self.device.type == "cuda" and "SMALL_TESTS" not in os.environ else small

    def tensor(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device)

    def bytes(self, x: NDArray[Any], gap: int | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """The bytes of the rows of `x`, and the memory around them.

        Args:
            x: `[num_rows, n]`.
            gap: bytes between rows; None = as many as bring every row to a multiple of 32, and 32 more.
            start: bytes before the first row.
        """
        raw = np.ascontiguousarray(x).view(np.uint8)
        num_rows, width = raw.shape
        gap = -width % ALIGNMENT + ALIGNMENT if gap is None else gap
        memory = np.full(start + num_rows * (width + gap), FILL, np.uint8)
        rows = memory[start:].reshape(num_rows, width + gap)
        rows[:, :width] = raw
        on_device = torch.from_numpy(memory).to(self.device)
        return on_device[start:].view(num_rows, width + gap)[:, :width], on_device

    def rows(self, kind: Kind, arrays: Sequence[NDArray[Any]], gap: int | None = None, start: int = 0) -> Rows:
        """The arrays of `hard_rows` as an argument of a backend."""
        return Rows(kind, *(self.bytes(part, gap, start)[0] for part in arrays))

    def empty(self, kind: Kind, num_rows: int, hidden: int) -> tuple[Rows, list[Tensor]]:
        """Aligned rows to be written, and the memory around them."""
        parts = [self.bytes(np.full((num_rows, n), FILL, np.uint8)) for n in row_bytes(kind, hidden)]
        return Rows(kind, *(rows for rows, _ in parts)), [memory for _, memory in parts]


CPU = Target(cpu, torch.device("cpu"))


def row_bytes(kind: Kind, hidden: int) -> list[int]:
    """Bytes of the data of a row and, where the kind has them, of its scales."""
    layout = cpu.row_layout(kind, hidden, 0)
    return [layout.data_bytes] + [layout.scale_bytes] * (layout.scale_bytes > 0)


Run = Callable[[Target], Sequence[Tensor]]


def assert_all_same(target: Target, runs: dict[str, Run]) -> None:
    """As `assert_same`, for several, whose kernels are compiled together."""
    if target.machine is not None:
        target.machine.prepare([functools.partial(run, target) for run in runs.values()])
    for what, run in runs.items():
        assert_same(target, run, what)


def assert_same(target: Target, run: Run, what: str = "") -> None:
    """Compares the bits that `run` gives on `target` with those on the CPU."""
    expected, actual = run(CPU), run(target)
    for i, (want, got) in enumerate(zip(expected, actual, strict=True)):
        assert got.device.type == target.device.type
        assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{what} result {i}"
        a, b = (to_numpy(t).reshape(-1).view(np.uint8) for t in (got, want))
        if not np.array_equal(a, b):
            at = np.flatnonzero(a != b)
            size = want.element_size()
            first = int(at[0]) // size
            raise AssertionError(
                f"{what} result {i} of shape {list(want.shape)}: {len(at)} of {len(a)} bytes differ, first in element "
                f"{np.unravel_index(first, want.shape)}: got {a[first * size :][:size].tolist()}, "
                f"expected {b[first * size :][:size].tolist()}"
            )


@contextlib.contextmanager
def open_target(name: str) -> Iterator[Target]:
    """ "emulated" or "cuda"."""
    if name == "emulated":
        if emulator.compiler() is None:
            assert not os.environ.get("CI"), "no C++ compiler, which the kernels of the emulator need"
            pytest.skip("no C++ compiler")
        with emulator.emulated() as machine:
            from fp4comm.backends import cuda

            yield Target(cuda, torch.device("cpu"), machine)
    else:
        from fp4comm.backends import cuda

        yield Target(cuda, torch.device("cuda", torch.cuda.current_device()))
