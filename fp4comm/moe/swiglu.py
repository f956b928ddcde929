"""SwiGLU with the routing weight, and its gradients, in float32.

    act = silu(gate) * up * weight          one row per token and local expert, one weight per row

The weight is applied before the down projection, so that the sum of combine has no factors and y need not be kept.

`forward` and `backward` are made of operations of torch. `csrc/cuda/swiglu.cu` does the same in one pass together with
the conversion to what GEMMs read; its exponential is the device's, so numbers differ in the last bits of float32.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def forward_rows(gate_up: Tensor, row_weights: Tensor, gemms: Any, end: Tensor | None = None) -> Any:
    """`forward` as the rows that GEMMs read, by a kernel where there is one.

    Args:
        gate_up, row_weights: as there.
        gemms: whose rows to make, those of a `gemm.Gemms`.
        end: see `gemm.Groups`.
    """
    kernels = _kernels(gate_up, row_weights)
    if kernels is None:
        return gemms.rows(forward(gate_up, row_weights), gate_up.dtype)
    return kernels.forward(gate_up, row_weights, gemms, end)


def backward_rows(
    gate_up: Tensor, row_weights: Tensor, grad_act: Tensor, gemms: Any, makes_act: bool, end: Tensor | None = None
) -> tuple[Any, Tensor, Any]:
    """`backward`, its first result as rows of gemms; and what `forward_rows` returned once more, if `makes_act`.

    Args:
        gate_up, row_weights, grad_act: as there.
        gemms, end: as in `forward_rows`.
        makes_act: whether to return what that did, too.
    """
    kernels = _kernels(gate_up, row_weights)
    if kernels is not None:
        results: tuple[Any, Tensor, Any] = kernels.backward(gate_up, row_weights, grad_act, gemms, makes_act, end)
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
    return torch.nn.functional.silu(gate).mul_(up).mul_(row_weights[:, None])


def backward(gate_up: Tensor, row_weights: Tensor, grad_act: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up, float32, and of row_weights: a sum over a row.

    Args:
        gate_up, row_weights: as in `forward`.
        grad_act: `[num_rows, ffn_hidden]`, any float dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    grad_act = grad_act.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_weights = (silu * up).mul_(grad_act).sum(dim=1)
    weighted = grad_act * row_weights[:, None]
    grad = torch.empty_like(gate_up, dtype=torch.float32)
    grad_gate, grad_up = grad.chunk(2, dim=1)
    torch.mul(weighted, silu, out=grad_up)
    slope = torch.sigmoid(-gate).mul_(gate).add_(1).mul_(sigmoid)  # of silu
    torch.mul(weighted.mul_(up), slope, out=grad_gate)
    return grad, grad_weights
