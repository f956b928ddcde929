"""`python -m fp4comm`: what fp4comm finds on this machine, and what it would use."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist

from . import __version__
from .backends import backend_for, cpu
from .errors import Fp4CommError
from .launch import world_group
from .transport import make_transport
from .transport.mpi import load_mpi
from .transport.nccl import load_nccl


def report() -> str:
    """The findings, a line each."""
    isas = ", ".join(cpu.supported_isas())
    lines = [
        ("fp4comm", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
        ("torch", torch.__version__),
        ("cpu kernels", f"{cpu.isa()} (this machine runs: {isas})"),
        ("gpu", _gpu()),
        ("mpi", _mpi()),
        ("nccl", _nccl()),
        ("torch.distributed", "gloo" if dist.is_available() and dist.is_gloo_available() else "not available"),
        ("transport here", _transport()),
    ]
    return "\n".join(f"{name:18} {finding}" for name, finding in lines)


def _mpi() -> str:
    try:
        return str(load_mpi().Get_library_version()).splitlines()[0].split(",")[0].rstrip("\0")
    except Fp4CommError as error:
        return f"not available: {error}"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "not available: torch finds no CUDA device"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = f"{torch.cuda.device_count()} x {properties.name} (sm_{properties.major}{properties.minor})"
    try:
        backend_for(torch.empty(0, device="cuda"))
    except Fp4CommError as error:
        return f"{name}, without kernels: {error}"
    return name


def _nccl() -> str:
    try:
        return str(load_nccl().get_version())
    except Fp4CommError as error:
        return f"not available: {error}"


def _transport() -> str:
    try:
        transport = make_transport(world_group())
    except (Fp4CommError, RuntimeError) as error:  # NCCL's are RuntimeErrors
        return f"none: {error}"
    where = "the device of the tensors" if transport.device is None else transport.device
    transport.close()
    return f"{transport.name}, rank {transport.rank} of {transport.num_ranks}, rows on {where}"


if __name__ == "__main__":
    print(report())
