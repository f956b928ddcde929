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

TIMEOUT_SECS = 120.0
EXIT_USAGE = 2  # as argparse


class Ranks:
    """All ranks of this run. Every method but `say` and the properties is collective.

    Attributes:
        group: what `EPCommunicator` takes.
        transport: of the benchmark's own messages.
        launcher: the command that this run was started with, as far as it is known.
    """

    def __init__(self) -> None:
        self.group = fp4comm.world_group()
        self.transport: Transport = make_transport(self.group, timeout_secs=TIMEOUT_SECS)
        self.launcher = {
            "loopback": "python",
            "mpi": f"mpirun -n {self.num_ranks} python",
            "process_group": f"torchrun --nproc-per-node {self.num_ranks}",
        }[self.transport.name]

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def num_ranks(self) -> int:
        return self.transport.num_ranks

    def say(self, text: str = "") -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Entry (or row) r of the int64 tensor `counts` goes to rank r; entry r of the result came from it."""
        return self.transport.all_to_all(counts.reshape(self.num_ranks, -1)).reshape(counts.shape)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.exchange_counts(torch.zeros(self.num_ranks, dtype=torch.int64))

    def any(self, condition: bool) -> bool:
        """Whether `condition` holds on one of the ranks."""
        return bool(self.exchange_counts(torch.full((self.num_ranks,), int(condition))).any())

    def gather(self, value: Any) -> list[Any]:
        """What each rank passed (anything that JSON can hold), in rank order, on every rank."""
        return [json.loads(data) for data in self.transport.all_gather_bytes(json.dumps(value).encode())]

    def require_none(self, problem: str | None, exit_code: int) -> None:
        """Ends the run on all ranks if one of them has a problem; rank 0 prints each problem once."""
        problems = dict.fromkeys(text for text in self.gather(problem) if text is not None)
        if problems:
            self.leave("\n".join(problems), exit_code)

    def leave(self, message: str, exit_code: int) -> NoReturn:
        """Ends the run on all ranks, which must all call this."""
        if self.rank == 0:
            print(f"error: {message}", file=sys.stderr, flush=True)
        self.close()
        sys.exit(exit_code)

    def close(self) -> None:
        """Waits for all ranks, then frees the transport and torch's process group."""
        self.barrier()  # a rank that ends early may take the others with it
        self.transport.close()
        if self.transport.name == "process_group":
            dist.destroy_process_group()


def abort(group: Any) -> NoReturn:
    """Ends this rank at once after an error that the others don't know of, and with it the whole job."""
    sys.stderr.flush()
    if hasattr(group, "Abort"):
        group.Abort(1)
    os._exit(1)
