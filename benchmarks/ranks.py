"""The ranks of a benchmark, however they were launched: barriers, agreement and gathering of values."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

import fp4comm
from fp4comm.transport import Transport, make_transport

from .device import CPU, choose_device

TIMEOUT_SECS = 120.0
EXIT_USAGE = 2  # as argparse


class Ranks:
    """All ranks of this run. Every method but `say` and the properties is collective.

    Attributes:
        group: what `EPCommunicator` takes.
        control: the transport of the benchmark's own messages, in host memory.
        transport: that of the measured rows; the same on the CPU.
        device: where the measured rows lie; the CPU until `use_device`.
        launcher: the command that this run was started with, as far as it is known.
    """

    def __init__(self) -> None:
        self.group = fp4comm.world_group()
        suited = "loopback" if self.group is None else "mpi" if hasattr(self.group, "Abort") else "process_group"
        self.control: Transport = make_transport(self.group, suited, timeout_secs=TIMEOUT_SECS)
        self.transport, self.device = self.control, CPU
        self.launcher = {
            "loopback": "python",
            "mpi": f"mpirun -n {self.num_ranks} python",
            "process_group": f"torchrun --nproc-per-node {self.num_ranks}",
        }[suited]

    @property
    def rank(self) -> int:
        return self.control.rank

    @property
    def num_ranks(self) -> int:
        return self.control.num_ranks

    def use_device(self, wanted: str) -> None:
        """Takes the GPUs if `wanted` ("auto", "cpu" or "cuda") says so and every rank has one."""
        problem, device = None, CPU
        try:
            device = choose_device(wanted)
        except ValueError as error:
            problem = str(error)
        self.require_none(problem, EXIT_USAGE)
        if self.any(device.type == "cpu"):
            return
        transport = make_transport(self.group, "auto", timeout_secs=TIMEOUT_SECS)
        if transport.device not in (None, device):
            carried, name = transport.device, transport.name
            transport.close()
            if wanted == "cuda":
                self.leave(f"--device cuda: transport {name} carries rows on {carried}: a GPU per rank", EXIT_USAGE)
            return
        self.transport, self.device = transport, device

    def say(self, text: str = "") -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Entry (or row) r of the int64 tensor `counts` goes to rank r; entry r of the result came from it."""
        return self.control.all_to_all(counts.reshape(self.num_ranks, -1)).reshape(counts.shape)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.exchange_counts(torch.zeros(self.num_ranks, dtype=torch.int64))

    def any(self, condition: bool) -> bool:
        """Whether `condition` holds on one of the ranks."""
        return bool(self.exchange_counts(torch.full((self.num_ranks,), int(condition))).any())

    def gather(self, value: Any) -> list[Any]:
        """What each rank passed (anything that JSON can hold), in rank order, on every rank."""
        return [json.loads(data) for data in self.control.all_gather_bytes(json.dumps(value).encode())]

    def problems(self, problem: str | None) -> list[str]:
        """The problems of all ranks, each once."""
        return list(dict.fromkeys(text for text in self.gather(problem) if text is not None))

    def require_none(self, problem: str | None, exit_code: int) -> None:
        """Ends the run on all ranks if one of them has a problem; rank 0 prints each problem once."""
        problems = self.problems(problem)
        if problems:
            self.leave("\n".join(problems), exit_code)

    def leave(self, message: str, exit_code: int) -> NoReturn:
        """Ends the run on all ranks, which must all call this."""
        if self.rank == 0:
            print(f"error: {message}", file=sys.stderr, flush=True)
        self.close()
        sys.exit(exit_code)

    def close(self) -> None:
        """Waits for all ranks, then frees the transports and torch's process group."""
        self.barrier()  # a rank that ends early may take the others with it
        self.transport.close()
        self.control.close()
        if self.control.name == "process_group":
            dist.destroy_process_group()


def abort(group: Any) -> NoReturn:
    """Ends this rank at once after an error that the others don't know of, and with it the whole job."""
    sys.stderr.flush()
    if hasattr(group, "Abort"):
        group.Abort(1)
    os._exit(1)
