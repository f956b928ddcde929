"""Transports: how bytes travel between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import InvalidArgument
from .base import Transport
from .loopback import LoopbackTransport

__all__ = ["LoopbackTransport", "Transport", "make_transport"]

_ACCEPTED_GROUPS = "None, an mpi4py intracommunicator, a torch ProcessGroup or a one-dimensional DeviceMesh"
_NAMES = ("auto", "loopback", "mpi", "process_group", "nccl")


def make_transport(group: Any, name: str = "auto", timeout_secs: float = 300.0) -> Transport:
    """The transport called `name` over `group`. Collective.

    Args:
        group: None (one process), an mpi4py communicator, a torch ProcessGroup, a one-dimensional DeviceMesh, or a
            `Transport` of the user's own, which is taken as it is.
        name: "nccl" takes any group of processes with a GPU each. "loopback", "mpi" and "process_group" insist on what
            the group is made for. "auto" takes NCCL if all ranks can use it (each has a GPU of its own as its current
            device, CuPy and libnccl) and the group is of MPI or of torch's NCCL, and else what the group is made for;
            instead of NCCL with a single rank loopback.
        timeout_secs: how long an exchange may wait for a rank.

    Raises:
        InvalidArgument: an unknown name, or one that does not go with the group.
        NotAvailable: the transport needs a package or a device that is not there.
    """
    if isinstance(group, Transport):
        return group
    if name not in _NAMES:
        raise InvalidArgument(f"transport is {name!r}; accepted: {', '.join(map(repr, _NAMES))}")
    if not timeout_secs > 0:
        raise InvalidArgument(f"timeout_secs is {timeout_secs!r}; accepted: a number of seconds above 0")
    suited = _transport_for(group)
    if name not in ("auto", suited) and not (name == "nccl" and suited != "loopback"):
        raise InvalidArgument(f"transport is {name!r}, but a group of type {type(group).__name__} goes with {suited!r}")
    if suited == "loopback":
        return LoopbackTransport(timeout_secs)
    group = group.get_group() if hasattr(group, "get_group") else group
    if suited == "mpi":
        from .mpi import MPITransport  # here, since mpi4py is optional

        on_host: Transport = MPITransport(group, timeout_secs)
        may_use_nccl = True
    else:
        from .process_group import ProcessGroupTransport

        on_host = ProcessGroupTransport(group, timeout_secs)
        may_use_nccl = "nccl" in dist.get_backend_config(group)
    if name == "nccl" or (name == "auto" and may_use_nccl and _each_has_a_gpu(on_host)):
        from .nccl import NCCLTransport

        try:
            if on_host.num_ranks == 1 and name == "auto":
                return LoopbackTransport(timeout_secs)
            return NCCLTransport(on_host.rank, on_host.num_ranks, on_host.all_gather_bytes, timeout_secs)
        finally:
            on_host.close()
    return on_host


def _each_has_a_gpu(transport: Transport) -> bool:
    from .nccl import own_device

    devices = transport.all_gather_bytes((own_device() or "").encode())
    return b"" not in devices and len(set(devices)) == len(devices)


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
