"""Transports: how bytes travel between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import InvalidArgument
from .base import Transport
from .loopback import LoopbackTransport

__all__ = ["LoopbackTransport", "Transport", "make_transport"]

_ACCEPTED_GROUPS = "None, an mpi4py intracommunicator, a torch ProcessGroup or a one-dimensional DeviceMesh"


def make_transport(group: Any, name: str = "auto", timeout_secs: float = 300.0) -> Transport:
    """The transport called `name` over `group`.

    Args:
        group: None (one process), an mpi4py communicator, a torch ProcessGroup, a one-dimensional DeviceMesh, or a
            `Transport` of the user's own, which is taken as it is.
        name: "auto" takes what the group is made for; "loopback", "mpi" and "process_group" insist on one.
        timeout_secs: how long an exchange may wait for a rank.

    Raises:
        InvalidArgument: an unknown name, or one that does not go with the group.
        NotAvailable: the transport needs a package that is not installed.
    """
    if isinstance(group, Transport):
        return group
    names = ("auto", "loopback", "mpi", "process_group")
    if name not in names:
        raise InvalidArgument(f"transport is {name!r}; accepted: {', '.join(map(repr, names))}")
    if not timeout_secs > 0:
        raise InvalidArgument(f"timeout_secs is {timeout_secs!r}; accepted: a number of seconds above 0")
    suited = _transport_for(group)
    if name not in ("auto", suited):
        raise InvalidArgument(f"transport is {name!r}, but a group of type {type(group).__name__} goes with {suited!r}")
    if suited == "loopback":
        return LoopbackTransport(timeout_secs)
    if suited == "mpi":
        from .mpi import MPITransport  # here, since mpi4py is optional

        return MPITransport(group, timeout_secs)
    from .process_group import ProcessGroupTransport

    return ProcessGroupTransport(group.get_group() if hasattr(group, "get_group") else group, timeout_secs)


def _transport_for(group: Any) -> str:
    if group is None:
        return "loopback"
    if hasattr(group, "Get_rank") and hasattr(group, "Alltoallv"):
        return "mpi"
    if getattr(group, "ndim", None) == 1 and hasattr(group, "get_group"):
        return "process_group"
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return "process_group"
    shape = f" with {group.ndim} dimensions" if hasattr(group, "ndim") else ""
    raise InvalidArgument(f"group is a {type(group).__name__}{shape}; accepted: {_ACCEPTED_GROUPS}")
