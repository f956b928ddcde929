"""SwiGLU of `swiglu.py` in one pass with the conversion of what it gives: kernels of `csrc/cuda/swiglu.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import Rows, cuda_compile
from ..codec import FP8Tensor
from ..formats import GROUP_SIZE, Kind

_FILE = "swiglu.cu"
_THREADS = 256
_WARPS = _THREADS // 32
_ALIGNMENT = 16
_DTYPES = (torch.bfloat16, torch.float32)

Written = Tensor | FP8Tensor


def fits(gate_up: Tensor, row_weights: Tensor) -> bool:
    """Whether the kernels take such rows: whole groups of 128, aligned, of bfloat16 or float32."""
    is_aligned = gate_up.is_contiguous() and row_weights.is_contiguous() and gate_up.data_ptr() % _ALIGNMENT == 0
    return gate_up.dtype in _DTYPES and gate_up.shape[1] % (2 * GROUP_SIZE) == 0 and is_aligned


def forward(gate_up: Tensor, row_weights: Tensor, is_fp8: bool) -> Written:
    """`swiglu.forward` as FP8, or rounded to the dtype of gate_up."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    act = _empty(gate_up, width, is_fp8)
    to = _rows(act)
    args = (*Rows.of(gate_up).address[:2], row_weights.data_ptr(), *to.address, num_rows)
    _launch("swiglu_forward", width, gate_up, to, 0, args, num_rows)
    return act


def backward(
    gate_up: Tensor, row_weights: Tensor, grad_act: Tensor, is_fp8: bool, makes_act: bool
) -> tuple[Written, Tensor, Written | None]:
    """`swiglu.backward`, its first result and, if `makes_act`, that of `forward` once more, converted as there.

    Args:
        gate_up, row_weights: as there.
        grad_act: contiguous, of the dtype of gate_up.
        is_fp8: whether to make FP8, instead of the dtype of gate_up.
        makes_act: whether to return what `forward` did, too.
    """
    num_rows, width = grad_act.shape
    grad = _empty(gate_up, 2 * width, is_fp8)
    grad_weights = torch.empty(num_rows, dtype=torch.float32, device=gate_up.device)
    act = _empty(gate_up, width, is_fp8) if makes_act else None
    to = _rows(grad)
    act_address = (0, 0, 0, 0) if act is None else _rows(act).address
    sources = (*Rows.of(gate_up).address[:2], row_weights.data_ptr(), *Rows.of(grad_act).address[:2])
    args = (*sources, *to.address, grad_weights.data_ptr(), *act_address, num_rows)
    _launch("swiglu_backward", width, gate_up, to, int(makes_act), args, num_rows)
    return grad, grad_weights, act


def _empty(gate_up: Tensor, width: int, is_fp8: bool) -> Written:
    if is_fp8:
        return FP8Tensor.empty(gate_up.shape[0], width, gate_up.device)
    return torch.empty((gate_up.shape[0], width), dtype=gate_up.dtype, device=gate_up.device)


def _rows(written: Written) -> Rows:
    return written._rows if isinstance(written, FP8Tensor) else Rows.of(written)


def _launch(
    name: str, width: int, gate_up: Tensor, to: Rows, with_act: int, args: tuple[int, ...], num_rows: int
) -> None:
    source = Kind.BF16 if gate_up.dtype == torch.bfloat16 else Kind.F32
    constants = {"FFN": width, "SRC_KIND": int(source), "DST_KIND": int(to.kind), "WITH_ACT": with_act}
    cuda_compile.launch(_FILE, name, constants, -(-num_rows // _WARPS), _THREADS, args)
