"""Rows of numbers in memory, the argument of every loop of a backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..formats import GemmKind, Kind

# of a number, without its share of a scale
BITS: dict[Kind | GemmKind, int] = {
    Kind.F32: 32,
    Kind.BF16: 16,
    Kind.F16: 16,
    Kind.FP8: 8,
    Kind.FP8_E8M0: 8,
    Kind.MXFP4: 4,
    GemmKind.FP8_ROW: 8,
}
_KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16, torch.float16: Kind.F16}

Address = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What kernels must know to wait for rows from other ranks one by one, see `csrc/cuda/arrivals.cuh`.

    Attributes:
        facts: int64, on the device.
        num_turns: if each rank has a row read in turn, how many there are, with those of ranks that have no more.
    """

    facts: Tensor
    num_turns: int
    most_blocks: int = 0
    """Of the kernel that waits, per multiprocessor; 0 = as many as have room."""
    sent: object = None
    """What must not be freed, and its memory written to, before that kernel has been launched."""


class Rows:
    """Rows of numbers of one kind; the dtypes of the tensors do not matter, only their bytes. Not to be changed.

    Args:
        kind: how the bytes of a row are read.
        data: 2-D, inner stride 1; any row stride.
        scales: likewise, one row of scales per row of data; None where the kind has none.
    """

    peers: Tensor | None = None
    """Where they are in the memory of other ranks, see `PeerRows`; None = in our own."""
    counting_blocks: int = 0
    """So many blocks per multiprocessor write them and count them on their ranks, where they can be read while others
    are on their way; 0 = they are not counted."""
    arrivals: Arrivals | None = None
    """How to wait for rows that are on their way; None = all are here."""
    source: Rows | None = None
    """What they were made of."""
    num_sms: int | None = None
    """Multiprocessors of a GPU that may be taken to read or write them; None = all."""

    def __init__(self, kind: Kind | GemmKind, data: Tensor, scales: Tensor | None = None) -> None:
        self.kind = kind
        self.data = data
        self.scales = scales
        self.hidden = data.shape[1] * data.element_size() * 8 // BITS[kind]
        """Numbers in a row."""

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """The rows of a float32, bfloat16 or float16 tensor; a copy if its inner stride is not 1."""
        if x.stride(1) != 1:
            x = x.clone(memory_format=torch.contiguous_format)
        return Rows(_KINDS[x.dtype], x)

    @cached_property
    def address(self) -> Address:
        """Address and row stride in bytes of data and of scales; 0 for scales that are not there."""
        scales = (0, 0) if self.scales is None else _address_and_stride(self.scales)
        return *_address_and_stride(self.data), *scales

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.data.device

    def __len__(self) -> int:
        return self.data.shape[0]


class BufferRows(Rows):
    """Rows in a buffer of bytes, at a fixed stride: the tensors are made only if somebody asks for them.

    Args:
        kind: of the numbers.
        buffer: uint8 `[num_rows, row_bytes]`, contiguous.
        layout: a `RowLayout`.
        num_sms, arrivals: see `Rows`.
    """

    def __init__(
        self,
        kind: Kind,
        buffer: Tensor,
        layout: Any,
        num_sms: int | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.kind, self.num_sms, self.arrivals = kind, num_sms, arrivals
        self.hidden = layout.data_bytes * 8 // BITS[kind]
        self._buffer, self._layout = buffer, layout

    # Attributes there, made at first use here: the same to who reads them, but not to mypy.
    @cached_property
    def data(self) -> Tensor:  # type: ignore[override]
        """uint8 `[num_rows, data_bytes]`, a view."""
        return self._buffer[:, : self._layout.data_bytes]

    @cached_property
    def scales(self) -> Tensor | None:  # type: ignore[override]
        """uint8 `[num_rows, scale_bytes]`, a view."""
        start = self._layout.scale_offset
        return self._buffer[:, start : start + self._layout.scale_bytes] if self._layout.scale_bytes else None

    @cached_property
    def address(self) -> Address:
        start, stride = self._buffer.data_ptr(), self._layout.row_bytes
        if not self._layout.scale_bytes:
            return start, stride, 0, 0
        return start, stride, start + self._layout.scale_offset, stride

    def __len__(self) -> int:
        return self._buffer.shape[0]


class PeerRows(Rows):
    """Rows to be written to the memory of several GPUs, as in `Destination` of `csrc/cuda/rows.cuh`.

    Args:
        kind: of the numbers.
        num_rows: on all ranks together; they are numbered through.
        layout: a `RowLayout`.
        table: int64 on the device, see `Destination` of `csrc/cuda/rows.cuh`.
        num_ranks: that it is about.
        num_turns: as in `Arrivals`.
        num_sms, counting_blocks: see `Rows`.
    """

    def __init__(
        self,
        kind: Kind,
        num_rows: int,
        layout: Any,
        table: Tensor,
        num_ranks: int,
        num_turns: int,
        num_sms: int | None = None,
        counting_blocks: int = 0,
    ) -> None:
        self.kind, self.num_sms, self.peers, self.counting_blocks = kind, num_sms, table, counting_blocks
        self.num_ranks, self.num_turns = num_ranks, num_turns
        self.hidden = layout.data_bytes * 8 // BITS[kind]
        self._num_rows = num_rows
        self.address = 0, layout.row_bytes, layout.scale_offset if layout.scale_bytes else 0, layout.row_bytes

    def __len__(self) -> int:
        return self._num_rows


def _address_and_stride(tensor: Tensor) -> tuple[int, int]:
    assert tensor.dim() == 2
    assert tensor.numel() == 0 or tensor.shape[1] == 1 or tensor.stride(1) == 1
    return tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
