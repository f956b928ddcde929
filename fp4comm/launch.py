"""Finds out how this process was started, so that one program runs under mpirun, under torchrun and alone."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

# Open MPI, MPICH and Intel MPI, and every launcher that speaks PMIx
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def world_group() -> Any:
    """The group of all processes that were started together. Collective.

    Under torchrun (which sets RANK and MASTER_ADDR) that is torch.distributed's default group, initialised if it is not
    yet, with gloo and, where there are GPUs, NCCL; under mpirun it is mpi4py's COMM_WORLD; for a process on its own it
    is None. The processes of a machine take its GPUs in turn as their current CUDA device, unless torch.distributed was
    initialised before.

    Returns:
        What `EPCommunicator` takes as `group`.

    Raises:
        NotAvailable: started by mpirun, but mpi4py or its MPI library is missing.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        _take_gpu(dist.get_node_local_rank(fallback_rank=0))
        with_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if with_nccl else "gloo")
        return dist.group.WORLD
    if any(name in os.environ for name in _MPI_VARIABLES):
        from .transport.mpi import load_mpi

        mpi = load_mpi()
        on_machine = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
        _take_gpu(on_machine.Get_rank())
        on_machine.Free()
        return mpi.COMM_WORLD
    return None


def _take_gpu(place: int) -> None:
    """Makes the GPU with the number of this process's place on its machine the current one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(place % torch.cuda.device_count())
