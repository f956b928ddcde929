"""Device backends: modules with the same functions, each for the tensors of one kind of device."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from ..errors import NotAvailable
from . import cpu
from .rows import Rows

__all__ = ["Rows", "backend_for"]


def backend_for(tensor: Tensor | None) -> ModuleType:
    """The backend for the device of `tensor`; the CPU's for None.

    Raises:
        NotAvailable: no backend takes tensors of that device.
    """
    if tensor is None or tensor.device.type == "cpu":
        return cpu
    raise NotAvailable(f"tensor is on device {str(tensor.device)!r}; there is a backend for: 'cpu'")
