"""Device backends: modules with the same functions, each for the tensors of one kind of device."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..errors import InvalidArgument, NotAvailable
from . import cpu
from .rows import Arrivals, BufferRows, PeerRows, Rows

__all__ = ["Arrivals", "BufferRows", "PeerRows", "Rows", "backend_for", "raise_deferred"]


_cuda: ModuleType | None = None  # once it has been imported


def backend_for(tensor: Tensor | None) -> ModuleType:
    """The backend for the device of `tensor`; the CPU's for None.

    Raises:
        NotAvailable: no backend takes tensors of that device, or it needs a package that is not installed.
        InvalidArgument: it is not the current CUDA device.
    """
    device = None if tensor is None else tensor.device
    if device is None or device.type == "cpu":
        return cpu
    if device.type != "cuda":
        raise NotAvailable(f"tensor is on device {str(device)!r}; there is a backend for: 'cpu', 'cuda'")
    current = torch.cuda.current_device()
    if device.index != current:
        accepted = f"the current CUDA device, cuda:{current} (see torch.cuda.device)"
        raise InvalidArgument(f"tensor is on {device}; accepted: {accepted}")
    return _cuda or _import_cuda(device)


def _import_cuda(device: torch.device) -> ModuleType:
    global _cuda
    try:
        from . import cuda  # here, since CuPy is optional
    except ImportError as error:
        raise NotAvailable(
            f"tensor is on {device}, and kernels for it need CuPy ({error}); install it with: "
            f"pip install 'fp4comm[cuda{(torch.version.cuda or '12').split('.')[0]}]'"
        ) from error
    _cuda = cuda
    return cuda


def raise_deferred() -> None:
    """Raises what kernels have found wrong so far in calls that did not wait for them.

    Raises:
        InvalidArgument: `topk_idx` had numbers that are no experts.
        TransportError: received rows were not what their sender sent.
    """
    if _cuda is not None:
        _cuda.raise_deferred()
