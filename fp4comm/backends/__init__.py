"""Device backends: modules with the same functions, each for the tensors of one kind of device."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch import Tensor

from ..errors import NotAvailable, require
from . import cpu
from .rows import Rows

__all__ = ["Rows", "backend_for", "raise_deferred"]


def backend_for(tensor: Tensor | None) -> ModuleType:
    """The backend for the device of `tensor`; the CPU's for None.

    Raises:
        NotAvailable: no backend takes tensors of that device, or it needs a package that is not installed.
        InvalidArgument: it is not the current CUDA device.
    """
    if tensor is None or tensor.device.type == "cpu":
        return cpu
    if tensor.device.type != "cuda":
        raise NotAvailable(f"tensor is on device {str(tensor.device)!r}; there is a backend for: 'cpu', 'cuda'")
    try:
        from . import cuda  # here, since CuPy is optional
    except ImportError as error:
        raise NotAvailable(
            f"tensor is on {tensor.device}, and kernels for it need CuPy ({error}); install it with: "
            f"pip install 'fp4comm[cuda{(torch.version.cuda or '12').split('.')[0]}]'"
        ) from error
    require(
        tensor.device.index == torch.cuda.current_device(),
        "tensor",
        f"on {tensor.device}",
        f"the current CUDA device, cuda:{torch.cuda.current_device()} (see torch.cuda.device)",
    )
    return cuda


def raise_deferred() -> None:
    """Raises what kernels have found wrong so far in calls that did not wait for them.

    Raises:
        InvalidArgument: `topk_idx` had numbers that are no experts.
        TransportError: received rows were not what their sender sent.
    """
    cuda = sys.modules.get(f"{__name__}.cuda")
    if cuda is not None:
        cuda.raise_deferred()
