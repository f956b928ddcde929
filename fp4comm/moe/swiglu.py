"""SwiGLU with the routing weight, and its gradients, in float32.

    act = silu(gate) * up * weight          one row per token and local expert, one weight per row

The weight is applied before the down projection, so that the sum of combine has no factors and y need not be kept.

`forward` and `backward` are made of operations of torch that round once each, and give the bits of
`csrc/cuda/swiglu.cu`, which does the same in one pass together with the conversion to what GEMMs read.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_LOG2_E = 1.44269502
_LN_2 = (0.693359375, -2.12194440e-4)  # of which the first times a small integer is exact
_EXP = (-0.00829022564, 0.0418983959, -0.166676402, 0.499991447, -0.999999702, 1.0)  # of -r, highest power first
_ROUNDS = 12582912.0  # 1.5 * 2**23: what is added to it loses its fraction
_LARGEST = 86.0  # the exponential of minus that is still a normal number
_NUM_SUMS = 256  # of a row, which are added in pairs then


def forward_rows(gate_up: Tensor, row_weights: Tensor, gemms: Any) -> Any:
    """`forward` as the rows that GEMMs read, by a kernel where there is one.

    Args:
        gate_up, row_weights: as there.
        gemms: whose rows to make, those of a `gemm.Gemms`.
    """
    kernels = _kernels(gate_up, row_weights)
    if kernels is None:
        return gemms.rows(forward(gate_up, row_weights), gate_up.dtype)
    return kernels.forward(gate_up, row_weights, gemms.is_fp8)


def backward_rows(
    gate_up: Tensor, row_weights: Tensor, grad_act: Tensor, gemms: Any, makes_act: bool
) -> tuple[Any, Tensor, Any]:
    """`backward`, its first result as rows of gemms; and what `forward_rows` returned once more, if `makes_act`."""
    kernels = _kernels(gate_up, row_weights)
    if kernels is not None:
        results: tuple[Any, Tensor, Any] = kernels.backward(gate_up, row_weights, grad_act, gemms.is_fp8, makes_act)
        return results
    act = gemms.rows(forward(gate_up, row_weights), gate_up.dtype) if makes_act else None
    grad, grad_weights = backward(gate_up, row_weights, grad_act)
    return gemms.rows(grad, gate_up.dtype), grad_weights, act


def _kernels(gate_up: Tensor, row_weights: Tensor) -> ModuleType | None:
    """Those for such rows, if there are any."""
    if gate_up.device.type != "cuda":
        return None
    from . import cuda_swiglu  # here, since CuPy is optional

    return cuda_swiglu if cuda_swiglu.fits(gate_up, row_weights) else None


def forward(gate_up: Tensor, row_weights: Tensor) -> Tensor:
    """The activation, float32 `[num_rows, ffn_hidden]`.

    Args:
        gate_up: `[num_rows, 2 * ffn_hidden]`, gates first, any float dtype.
        row_weights: float32 `[num_rows]`.
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    value, _ = _logistic(gate)
    return value.mul_(gate).mul_(up).mul_(row_weights[:, None])


def backward(gate_up: Tensor, row_weights: Tensor, grad_act: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up, float32, and of row_weights: a sum over a row, in an order that is always the same.

    Args:
        gate_up, row_weights: as in `forward`.
        grad_act: `[num_rows, ffn_hidden]`, any float dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    grad_act = grad_act.float()
    value, complement = _logistic(gate)
    silu = gate * value
    grad_weights = _row_sums((silu * up).mul_(grad_act))
    weighted = grad_act * row_weights[:, None]
    grad = torch.empty_like(gate_up, dtype=torch.float32)
    grad_gate, grad_up = grad.chunk(2, dim=1)
    torch.mul(weighted, silu, out=grad_up)
    slope = complement.mul_(gate).add_(1).mul_(value)  # of silu
    torch.mul(weighted.mul_(up), slope, out=grad_gate)
    return grad, grad_weights


def _logistic(x: Tensor) -> tuple[Tensor, Tensor]:
    """`1 / (1 + exp(-x))` and 1 minus that, as in `csrc/cuda/silu.cuh`."""
    magnitude = x.abs().clamp_(max=_LARGEST)
    shifted = (magnitude * _LOG2_E).add_(_ROUNDS)
    power = shifted - _ROUNDS
    rest = magnitude.sub_(power * _LN_2[0]).sub_(power * _LN_2[1])
    exponential = torch.full_like(rest, _EXP[0])
    for coefficient in _EXP[1:]:
        exponential.mul_(rest).add_(coefficient)
    exponential.mul_(torch.ldexp(torch.ones_like(power), power.neg_()))
    large = (1 + exponential).reciprocal_()
    small = exponential.mul_(large)
    is_positive = x >= 0
    return torch.where(is_positive, large, small), torch.where(is_positive, small, large)


def _row_sums(x: Tensor) -> Tensor:
    """Of float32 `[num_rows, width]`: of the columns j, j + 256, ..., then of halves until one is left."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % _NUM_SUMS))
    sums = torch.zeros_like(padded[:, :_NUM_SUMS])
    for part in padded.split(_NUM_SUMS, dim=1):
        sums = sums + part
    while sums.shape[1] > 1:
        lower, upper = sums.chunk(2, dim=1)
        sums = lower + upper
    return sums[:, 0]
