"""FP8 rows with one scale each: the form that grouped FP8 GEMMs on Hopper read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import Rows, backend_for
from .errors import require
from .formats import GemmKind
from .memory import empty


@dataclass(frozen=True, eq=False)
class FP8Rows:
    """Rows of E4M3 numbers with one power-of-two scale per row: `number = data * scale`.

    What `torch._scaled_grouped_mm` reads on Hopper. E4M3 has normal numbers in 15 binades and subnormal ones in three
    more, so rows from MXFP4 are exact as long as the scales of their blocks are within a factor of 2**14.

    Attributes:
        data: float8_e4m3fn `[..., k]`.
        scales: float32 `[...]`; the least, 2**-126, for a row of zeros.
    """

    data: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, num_rows: int, hidden: int, device: torch.device | str | None = None) -> FP8Rows:
        """Uninitialised memory for `num_rows` rows."""
        return cls(empty((num_rows, hidden), torch.float8_e4m3fn, device), empty((num_rows,), torch.float32, device))

    @property
    def num_rows(self) -> int:
        """Number of rows, of all matrices together."""
        return self.scales.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.data.nbytes + self.scales.nbytes

    @property
    def _rows(self) -> Rows:
        return Rows(GemmKind.FP8_ROW, self.data.view(-1, self.data.shape[-1]), self.scales.view(-1, 1))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[..., k]`. Exact in float32; in bfloat16, too, where numbers are above its subnormals."""
        return (self.data.float() * self.scales[..., None]).to(dtype)


def quantize_fp8_rows(x: Tensor) -> FP8Rows:
    """Quantizes rows of floats with the smallest power of two per row as scale that avoids saturation.

    Args:
        x: `[..., k]` float32, bfloat16 or float16, k a multiple of 8. A row with a NaN or an Inf becomes NaN.

    Raises:
        InvalidArgument: another dtype or width.
    """
    floats = (torch.float32, torch.bfloat16, torch.float16)
    require(x.dtype in floats, "x", f"of dtype {x.dtype}", "torch.float32, torch.bfloat16 or torch.float16")
    fits = x.ndim >= 1 and x.shape[-1] > 0 and x.shape[-1] % 8 == 0
    require(fits, "x", f"of shape {list(x.shape)}", "rows of a multiple of 8 numbers, at least 8")
    return FP8Rows(*backend_for(x).quantize_gemm_rows(x))
