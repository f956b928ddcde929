"""SwiGLU of `swiglu.py` in one pass with the conversion of what it gives: kernels of `csrc/cuda/swiglu.cu`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import Rows, cuda_compile
from ..backends.cuda_compile import pointer
from ..backends.cuda_gemm_rows import threads_of
from ..formats import GROUP_SIZE, Kind

_FILE = "swiglu.cu"
_MAX_THREADS = 512
_ALIGNMENT = 16
_DTYPES = (torch.bfloat16, torch.float32)


def fits(gate_up: Tensor, row_weights: Tensor) -> bool:
    """Whether the kernels take such rows: whole groups of 128, aligned, of bfloat16 or float32."""
    is_aligned = gate_up.is_contiguous() and row_weights.is_contiguous() and gate_up.data_ptr() % _ALIGNMENT == 0
    has_kernels = gate_up.dtype in _DTYPES and row_weights.dtype == torch.float32
    return has_kernels and gate_up.shape[1] % (2 * GROUP_SIZE) == 0 and is_aligned


def forward(gate_up: Tensor, row_weights: Tensor, gemms: Any, end: Tensor | None = None) -> Any:
    """`swiglu.forward_rows`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    act = gemms.empty_rows(num_rows, width, gate_up.device, gate_up.dtype)
    args = (
        *Rows.of(gate_up).address[:2],
        row_weights.data_ptr(),
        *_rows(act).address,
        pointer(end, torch.int32),
    )
    _launch("swiglu_forward", width, gate_up, _rows(act), False, args)
    return act


def backward(
    gate_up: Tensor, row_weights: Tensor, grad_act: Tensor, gemms: Any, makes_act: bool, end: Tensor | None = None
) -> tuple[Any, Tensor, Any]:
    """`swiglu.backward_rows`; grad_act is contiguous, aligned, of the dtype of gate_up."""
    num_rows, width = grad_act.shape
    assert grad_act.dtype == gate_up.dtype
    assert grad_act.is_contiguous()
    assert grad_act.data_ptr() % _ALIGNMENT == 0
    make = (gate_up.device, gate_up.dtype)
    grad = gemms.empty_rows(num_rows, 2 * width, *make)
    act = gemms.empty_rows(num_rows, width, *make) if makes_act else None
    grad_weights = torch.empty(num_rows, dtype=torch.float32, device=gate_up.device)
    act_address = (0, 0, 0, 0) if act is None else _rows(act).address
    sources = (*Rows.of(gate_up).address[:2], row_weights.data_ptr(), *Rows.of(grad_act).address[:2])
    args = (
        *sources,
        *_rows(grad).address,
        grad_weights.data_ptr(),
        *act_address,
        pointer(end, torch.int32),
    )
    _launch("swiglu_backward", width, gate_up, _rows(grad), makes_act, args)
    return grad, grad_weights, act


def _rows(written: Any) -> Rows:
    rows: Rows = Rows.of(written) if isinstance(written, Tensor) else written._rows
    return rows


def _launch(name: str, width: int, gate_up: Tensor, to: Rows, makes_act: bool, args: tuple[int, ...]) -> None:
    source, threads = Kind.BF16 if gate_up.dtype == torch.bfloat16 else Kind.F32, threads_of(width, _MAX_THREADS)
    constants = {"FFN": width, "THREADS": threads, "SRC_KIND": int(source), "DST_KIND": int(to.kind)}
    cuda_compile.launch(_FILE, name, constants | {"WITH_ACT": int(makes_act)}, len(gate_up), threads, args)
