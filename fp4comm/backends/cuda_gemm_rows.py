"""`gemm_rows.py` on the device, and its columns. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cuda_compile
from .rows import Rows

_WARP = 32
_LANE = 8  # numbers of a thread in a step
_MAX_THREADS = 256
_EXPERT_THREADS = 256
_ALIGNMENT = 16
_FLOATS = (torch.bfloat16, torch.float32)


def quantize_gemm_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `gemm_rows.quantize_gemm_rows`. What has no kernel, or is not aligned as it must be, is copied."""
    hidden = x.shape[-1]
    assert hidden > 0
    assert hidden % _LANE == 0
    x = x if x.dtype in _FLOATS else x.float()
    flat = Rows.of(x.reshape(-1, hidden))
    if (flat.address[0] | flat.address[1]) % _ALIGNMENT:
        flat = Rows.of(flat.data.clone(memory_format=torch.contiguous_format))
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    threads = threads_of(hidden, _MAX_THREADS)
    constants = {"HIDDEN": hidden, "SRC_KIND": int(flat.kind), "THREADS": threads}
    args = (*flat.address[:2], codes.data_ptr(), hidden, scales.data_ptr())
    cuda_compile.launch("rows_quantize.cu", "quantize_rows", constants, len(flat), threads, args)
    return codes, scales


def threads_of(hidden: int, most: int) -> int:
    """Of a block that shares a row."""
    return min(most, -(-hidden // (_LANE * _WARP)) * _WARP)


def expert_scales(scales: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """See `gemm_rows.expert_scales`."""
    assert scales.is_contiguous()
    assert ends.is_contiguous()
    assert ends.dtype == torch.int32
    of_experts, of_rows = torch.empty_like(ends, dtype=torch.float32), torch.empty_like(scales)
    args = (scales.data_ptr(), ends.data_ptr(), of_experts.data_ptr(), of_rows.data_ptr())
    constants = {"THREADS": _EXPERT_THREADS}
    cuda_compile.launch("expert_scales.cu", "expert_scales", constants, len(ends), _EXPERT_THREADS, args)
    return of_experts, of_rows
