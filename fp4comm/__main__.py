"""`python -m fp4comm`: what fp4comm finds on this machine, and what it would use.

Under mpirun or torchrun rank 0 prints it for all ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import sys
import traceback
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import __version__
from .agreement import name_ranks
from .backends import backend_for, cpu
from .errors import Fp4CommError, counted
from .launch import world_group
from .transport import make_transport
from .transport.mpi import load_mpi
from .transport.nccl import load_nccl

TIMEOUT_SECS = 20.0  # of an exchange
LONGEST_SECS = 60.0  # MPI waits for a rank that ended before it joined, without end and where nothing can interrupt it
Findings = dict[str, str]  # by subject


def report(of_ranks: Sequence[Findings]) -> str:
    """A line for what rank 0 has found of each subject, and below it one for what others have found instead."""
    lines = []
    for subject, first in of_ranks[0].items():
        others = defaultdict(list)
        for rank, findings in enumerate(of_ranks):
            if findings[subject] != first:
                others[findings[subject]].append(rank)
        lines.append(f"{subject:18} {first}")
        lines += [f"  {name_ranks(ranks):16} {finding}" for finding, ranks in others.items()]
    return "\n".join(lines)


def find() -> Findings:
    """What this process finds by itself."""
    isas = ", ".join(cpu.supported_isas())
    return {
        "fp4comm": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "cpu kernels": f"{cpu.isa()} (this machine runs: {isas})",
        "gpu": _gpu(),
        "mpi": _mpi(),
        "nccl": _nccl(),
        "torch.distributed": "gloo" if dist.is_available() and dist.is_gloo_available() else "not available",
    }


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


def _transport(group: Any) -> str:
    try:
        transport = make_transport(group, timeout_secs=TIMEOUT_SECS)
    except (Fp4CommError, RuntimeError) as error:  # NCCL's are RuntimeErrors
        return f"none: {error}"
    where = "the device of the tensors" if transport.device is None else transport.device
    transport.close()
    return f"{transport.name}, {counted(transport.num_ranks, 'rank')}, rows on {where}"


def _gather(group: Any, own: Findings) -> tuple[int, list[Findings]]:
    """This process's rank, and what all ranks have found: in host memory, which needs least of what may be missing."""
    suited = "loopback" if group is None else "mpi" if hasattr(group, "Abort") else "process_group"
    control = make_transport(group, suited, timeout_secs=TIMEOUT_SECS)
    of_ranks = [json.loads(findings) for findings in control.all_gather_bytes(json.dumps(own).encode())]
    control.close()
    return control.rank, of_ranks


def main() -> None:
    own: Findings = {}
    faulthandler.dump_traceback_later(LONGEST_SECS, exit=True)
    try:
        own = find()
        group = world_group()
        rank, of_ranks = _gather(group, own | {"transport here": _transport(group)})
    except Exception as error:  # maybe on this rank alone
        if not isinstance(error, Fp4CommError):
            traceback.print_exc()
        print(report([own | {"transport here": f"none: {error}"}]), flush=True)
        sys.stderr.flush()
        os._exit(1)  # at once: at the end of Python MPI would wait for the other ranks, which wait for this one
    faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        print(report(of_ranks))
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
