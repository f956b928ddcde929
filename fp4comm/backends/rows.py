"""Rows of numbers in memory, the argument of every loop of a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import Kind

_BITS = {Kind.F32: 32, Kind.BF16: 16, Kind.F16: 16, Kind.FP8: 8, Kind.FP8_E8M0: 8, Kind.MXFP4: 4}
_KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16, torch.float16: Kind.F16}


@dataclass(frozen=True)
class Rows:
    """Rows of numbers of one kind; the dtypes of the tensors do not matter, only their bytes.

    Attributes:
        kind: how the bytes of a row are read.
        data: 2-D, inner stride 1; any row stride.
        scales: likewise, one row of scales per row of data; None where the kind has none.
    """

    kind: Kind
    data: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """The rows of a float32, bfloat16 or float16 tensor; a copy if its inner stride is not 1."""
        if x.stride(1) != 1:
            x = x.clone(memory_format=torch.contiguous_format)
        return cls(_KINDS[x.dtype], x)

    @property
    def hidden(self) -> int:
        """Numbers in a row."""
        return self.data.shape[1] * self.data.element_size() * 8 // _BITS[self.kind]

    def __len__(self) -> int:
        return self.data.shape[0]
