"""Transports: how bytes travel between ranks."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch.distributed as dist

from ..errors import InvalidArgument, NotAvailable, require
from .base import Transport
from .loopback import LoopbackTransport

__all__ = ["MAX_BUFFER_BYTES", "LoopbackTransport", "Transport", "make_transport"]

_ACCEPTED_GROUPS = "None, an mpi4py intracommunicator, a torch ProcessGroup or a one-dimensional DeviceMesh"
_NAMES = ("auto", "loopback", "mpi", "process_group", "nccl", "peer")
_TIMEOUT_SECS, _PEER_TIMEOUT_SECS = 300.0, 60.0
MAX_BUFFER_BYTES = 4 << 30


def make_transport(
    group: Any, name: str = "auto", timeout_secs: float | None = None, max_buffer_bytes: int = MAX_BUFFER_BYTES
) -> Transport:
    """The transport called `name` over `group`. Collective.

    Args:
        group: None (one process), an mpi4py communicator, a torch ProcessGroup, a one-dimensional DeviceMesh, or a
            `Transport` of the user's own, which is taken as it is.
        name: "peer" takes any group of processes with GPUs on one machine that can map each other's memory; "nccl" any
            group of processes with a GPU each. "loopback", "mpi" and "process_group" insist on what the group is made
            for. "auto" takes peer, or else NCCL, if all ranks can use it (each has a GPU of its own as its current
            device, and CuPy; libnccl for NCCL) and the group is of MPI or of torch's NCCL; and else what the group is
            made for. For a single rank it takes loopback instead of these.
        timeout_secs: how long an exchange may wait for a rank; None = 60 with peer, whose waiting kernels occupy the
            device, and else 300.
        max_buffer_bytes: see `PeerTransport`.

    Raises:
        InvalidArgument: an unknown name, or one that does not go with the group.
        NotAvailable: the transport needs a package or a device that is not there.
    """
    if isinstance(group, Transport):
        return group
    if name not in _NAMES:
        raise InvalidArgument(f"transport is {name!r}; accepted: {', '.join(map(repr, _NAMES))}")
    require(
        timeout_secs is None or _is_time(timeout_secs),
        "timeout_secs",
        repr(timeout_secs),
        "a number of seconds above 0, or None",
    )
    suited = _transport_for(group)
    if name not in ("auto", suited) and not (name in ("nccl", "peer") and suited != "loopback"):
        what = f"a group of type {type(group).__name__} goes with {suited!r}"
        accepted = "'auto'" + (
            "; a group of several processes is started with mpirun or torchrun" if group is None else ""
        )
        raise InvalidArgument(f"transport is {name!r}, but {what}; accepted: {accepted}")
    if suited == "loopback":
        return LoopbackTransport()
    group = group.get_group() if hasattr(group, "get_group") else group
    secs = _TIMEOUT_SECS if timeout_secs is None else timeout_secs
    if suited == "mpi":
        from .mpi import MPITransport  # here, since mpi4py is optional

        on_host: Transport = MPITransport(group, secs)
        suits_gpus = True
    else:
        from .process_group import ProcessGroupTransport

        on_host = ProcessGroupTransport(group, secs)
        suits_gpus = "nccl" in dist.get_backend_config(group)
    try:
        return _between_gpus(on_host, name, suits_gpus, timeout_secs, max_buffer_bytes) or on_host
    except BaseException:
        on_host.close()
        raise


def _between_gpus(
    on_host: Transport, name: str, suits_gpus: bool, timeout_secs: float | None, max_buffer_bytes: int
) -> Transport | None:
    """The transport that takes the place of `on_host`; None = it stays."""
    if name == "auto" and not (suits_gpus and _each_has_a_gpu(on_host)):
        return None
    if name not in ("auto", "nccl", "peer"):
        return None
    if name == "auto" and on_host.num_ranks == 1:
        on_host.close()
        return LoopbackTransport()
    if name != "nccl":
        from .peer import PeerTransport

        try:
            secs = _PEER_TIMEOUT_SECS if timeout_secs is None else timeout_secs
            return PeerTransport(on_host, secs, max_buffer_bytes)
        except NotAvailable:  # on all ranks
            if name == "peer":
                raise
    from .nccl import NCCLTransport

    secs = _TIMEOUT_SECS if timeout_secs is None else timeout_secs
    transport = NCCLTransport(on_host.rank, on_host.num_ranks, on_host.all_gather_bytes, secs)
    on_host.close()
    return transport


def _is_time(secs: Any) -> bool:
    is_number = isinstance(secs, Real)
    return is_number and bool(secs > 0)  # NaN is not


def _each_has_a_gpu(transport: Transport) -> bool:
    from .nccl import own_device

    devices = transport.all_gather_bytes((own_device() or "").encode())
    return b"" not in devices and len(set(devices)) == len(devices)


def _transport_for(group: Any) -> str:
    if group is None:
        return "loopback"
    if hasattr(group, "Get_rank") and hasattr(group, "Alltoallv"):
        received = "MPI.COMM_NULL: this process is not in it, or it has been freed"
        require(bool(group), "group", received, "a communicator that this process is in")
        is_inter = getattr(group, "is_inter", False)
        require(not is_inter, "group", "an intercommunicator", "a communicator of the ranks that share the experts")
        return "mpi"
    if getattr(group, "ndim", None) == 1 and hasattr(group, "get_group"):
        return "process_group"
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return "process_group"
    is_outside = dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER
    require(not is_outside, "group", "one of torch that this process is not in", "one that it is in")
    shape = f" with {group.ndim} dimensions" if hasattr(group, "ndim") else ""
    raise InvalidArgument(f"group is a {type(group).__name__}{shape}; accepted: {_ACCEPTED_GROUPS}")
