"""Kernels of `csrc/cuda` on torch CUDA tensors: the functions of `cpu.py`, in the order of torch's current stream.

Callers have checked shapes, dtypes and devices. Nothing here waits for the device, except `fp8_columns` of rows with
float32 scales, which must be powers of two.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidArgument, TransportError
from . import cuda_route, cuda_rows
from .cuda_columns import fp8_columns, fp8_rows_and_columns, gemm_columns, mxfp4_columns
from .cuda_gemm_rows import expert_scales, quantize_gemm_rows
from .cuda_rows import Meta, convert_rows, dot_rows, expand_rows, options, sum_rows
from .rows import Rows
from .wire import Experts, Plan, Wire

__all__ = [
    "Rows",
    "convert_rows",
    "dot_rows",
    "expand_rows",
    "expert_scales",
    "fp8_columns",
    "fp8_rows_and_columns",
    "gemm_columns",
    "mxfp4_columns",
    "options",
    "pack_tokens",
    "quantize_gemm_rows",
    "raise_deferred",
    "read_routing",
    "route",
    "sum_rows",
]

_INVALID_EXPERTS, _CORRUPT_ROWS = 1, 2


# Host memory that kernels write to, what they found wrong last; 0 = nothing. The array is quicker to read.
_STATUS = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_available())
_STATUS_WORDS: NDArray[np.int32] = _STATUS.numpy()


def raise_deferred() -> None:
    """See `fp4comm.backends.raise_deferred`."""
    status = int(_STATUS_WORDS[0])
    if status == 0:
        return
    _STATUS_WORDS[0] = 0
    if status == _INVALID_EXPERTS:
        raise InvalidArgument("topk_idx of an earlier dispatch had numbers that are no expert; they counted as -1")
    if status == _CORRUPT_ROWS:
        raise TransportError(
            "rows of an earlier dispatch do not fit: their topk_idx named an expert more than once for a token, for "
            "which num_max_tokens_per_rank leaves no room, or they are corrupt"
        )


def pack_tokens(
    x: Rows, send: Wire, plan: Plan, weights: Tensor | None, num_experts: int, options: cuda_rows.Options
) -> None:
    """See `cpu.pack_tokens`."""
    meta = None
    if send.num_topk:
        meta = Meta(send.layout, plan.topk_idx, weights, num_experts, plan.rows_per_rank, plan.rows_stride)
    cuda_rows.pack_tokens(x, send.rows, plan.token_rows, options, meta)


def route(
    topk_idx: Tensor, num_experts: int, num_ranks: int, rows_stride: int | None = None
) -> tuple[Tensor, Tensor, None]:
    """See `cpu.route`. Entries that are no expert are counted in `counts`; with rows_stride they are reported later."""
    status = None if rows_stride is None else _STATUS.data_ptr()
    return *cuda_route.route(topk_idx, num_experts, num_ranks, rows_stride, status), None


def read_routing(
    arrived: Wire,
    num_local_experts: int,
    alignment: int | None = None,
    num_rows: int | None = None,
    mark_unused: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Experts | None, Tensor | None]:
    """See `cpu.read_routing`; num_rows must be given with alignment. Experts out of range are reported later."""
    buffer = arrived.buffer
    source_rows = torch.empty(len(buffer), dtype=torch.int64, device=buffer.device) if mark_unused else None
    sizes = (arrived.layout, arrived.num_topk, num_local_experts, alignment, num_rows)
    return *cuda_route.read_routing(buffer, *sizes, _STATUS.data_ptr(), source_rows), source_rows
