"""Finds out how this process was started, so that one program runs under mpirun, under torchrun and alone."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

# Open MPI, MPICH and Intel MPI, and every launcher that speaks PMIx
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def world_group() -> Any:
    """The group of all processes that were started together.

    Under torchrun (which sets RANK and MASTER_ADDR) that is torch.distributed's default group, initialised with gloo
    if it is not yet; under mpirun it is mpi4py's COMM_WORLD; for a process on its own it is None.

    Returns:
        What `EPCommunicator` takes as `group`.

    Raises:
        NotAvailable: started by mpirun, but mpi4py or its MPI library is missing.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
        return dist.group.WORLD
    if any(name in os.environ for name in _MPI_VARIABLES):
        from .transport.mpi import load_mpi

        return load_mpi().COMM_WORLD
    return None
