"""FP8 rows with one scale each, as grouped GEMMs read them, by torch's operations; on GPUs see `cuda_gemm_rows.py`.

Scales are powers of two. A row of zeros has the least of them, so that it has no say where rows share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._cpu import Options
from ..formats import GROUP_SIZE, Kind
from .rows import Rows

LEAST_SCALE = 2.0**-126
_MIN_BYTE, _ONE_BYTE, _NAN_BYTE = 1, 127, 255  # of E8M0
_E4M3_MANTISSA, _E4M3_EXPONENT, _NAN = 448 / 512, 9, 0x7F  # 448 = 0.875 * 2**9
_MXFP4_BINADES = 6  # the largest MXFP4 code, 6, becomes 6 * 2**6 = 384


def quantize_gemm_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of floats under the smallest power of two that avoids saturation; a row with a NaN or an Inf becomes NaN.

    Args:
        x: `[..., k]`, any float dtype.

    Returns:
        float8_e4m3fn of that shape, and float32 `[...]`.
    """
    wide = x.float()
    amax = wide.abs().amax(dim=-1) if x.numel() else wide.new_zeros(x.shape[:-1])
    is_finite = torch.isfinite(amax)
    scales = torch.ldexp(torch.ones_like(amax), least_exponents(torch.where(is_finite, amax, 0)))
    scales = torch.where((amax > 0) & is_finite, scales.clamp(min=LEAST_SCALE), LEAST_SCALE)
    codes = (wide / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(is_finite[..., None], codes, _NAN)
    return codes.view(torch.float8_e4m3fn), scales


def least_exponents(amax: Tensor) -> Tensor:
    """int32, of the smallest powers of two under which finite magnitudes up to `amax` don't saturate E4M3."""
    mantissa, exponent = torch.frexp(amax)
    return exponent - _E4M3_EXPONENT + (mantissa > _E4M3_MANTISSA).int()


def has_row_scales(src: Rows, options: Options) -> bool:
    """Whether the scales of such rows say all about those of FP8 rows, so that only exponents change."""
    return src.kind == Kind.FP8_E8M0 or (src.kind == Kind.MXFP4 and not options.hadamard)


def floats_between(src: Rows, num_rows: int) -> Tensor:
    """Memory for rows of a message that must be floats before they become FP8 rows."""
    dtype = torch.float32 if src.kind == Kind.F32 else torch.bfloat16
    return torch.empty((num_rows, src.hidden), dtype=dtype, device=src.device)


def store_rows(out: Rows, codes: Tensor, scales: Tensor) -> None:
    """Writes codes and scales to FP8 rows."""
    assert out.scales is not None
    out.data.view(torch.uint8).copy_(codes.view(torch.uint8))
    out.scales[:, 0].copy_(scales)


def scales_of_rows(rows: Rows) -> Tensor:
    """float32 `[num_rows]`, the scale of each row of MXFP4 or FP8_E8M0: its largest, in FP8 of groups with numbers."""
    data, scales = rows.data, rows.scales
    assert scales is not None
    if rows.kind == Kind.MXFP4:
        found = torch.where(scales == _NAN_BYTE, 0, scales).int() - _MXFP4_BINADES
    else:
        magnitudes = torch.nn.functional.pad(data.view(torch.uint8) & 0x7F, (0, -data.shape[1] % GROUP_SIZE))
        has_numbers = ((magnitudes > 0) & (magnitudes < 0x7F)).view(*scales.shape, GROUP_SIZE).any(dim=2)
        found = torch.where(has_numbers | (scales != _ONE_BYTE), scales.int(), 0)
    largest = found.amax(dim=1).clamp(min=_MIN_BYTE)
    return torch.ldexp(torch.ones(len(data), dtype=torch.float32, device=data.device), largest - _ONE_BYTE)


def expert_scales(scales: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The largest scale of each expert's rows, and the same for each row; those of rows after the last are undefined.

    Args:
        scales: float32 `[num_rows]`.
        ends: int32 `[num_experts]`, where each expert's rows end.

    Returns:
        float32 `[num_experts]` and `[num_rows]`.
    """
    rows = torch.arange(len(scales), device=scales.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, rows, right=True)
    largest = scales.new_full((len(ends) + 1,), LEAST_SCALE).scatter_reduce(0, expert, scales, "amax")
    return largest[:-1], torch.where(expert < len(ends), largest[expert], scales)


def floats_of_rows(rows: Rows) -> Tensor:
    """The numbers of FP8 rows with one scale each, in float32."""
    assert rows.scales is not None
    return rows.data.view(torch.float8_e4m3fn).float() * rows.scales


def move_rows(x: Tensor, scales: Tensor) -> Tensor:
    """Codes of float32 numbers under scales that are given, `[num_rows, k]` and `[num_rows]`."""
    return (x / scales[:, None]).to(torch.float8_e4m3fn)


def turn_groups(codes: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """Flat memory of the transposes of groups of rows, one after the other."""
    parts = codes.view(torch.uint8).split(list(group_sizes))
    return torch.cat([part.t().reshape(-1) for part in parts]).view(torch.float8_e4m3fn)
