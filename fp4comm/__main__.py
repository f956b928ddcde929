"""`python -m fp4comm`: what fp4comm finds on this machine, and what it would use."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist

from . import __version__
from .backends import cpu
from .errors import Fp4CommError
from .launch import world_group
from .transport import make_transport
from .transport.mpi import load_mpi


def report() -> str:
    """The findings, a line each."""
    isas = ", ".join(cpu.supported_isas())
    lines = [
        ("fp4comm", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
        ("torch", torch.__version__),
        ("cpu kernels", f"{cpu.isa()} (this machine runs: {isas})"),
        ("mpi", _mpi()),
        ("torch.distributed", "gloo" if dist.is_available() and dist.is_gloo_available() else "not available"),
        ("transport here", _transport()),
    ]
    return "\n".join(f"{name:18} {finding}" for name, finding in lines)


def _mpi() -> str:
    try:
        return str(load_mpi().Get_library_version()).splitlines()[0].split(",")[0].rstrip("\0")
    except Fp4CommError as error:
        return f"not available: {error}"


def _transport() -> str:
    try:
        transport = make_transport(world_group())
    except Fp4CommError as error:
        return f"none: {error}"
    return f"{transport.name}, rank {transport.rank} of {transport.num_ranks}"


if __name__ == "__main__":
    print(report())
