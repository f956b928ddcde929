"""The ranks of a benchmark, however they were launched: barriers, agreement and gathering of values."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

import fp4comm
from fp4comm.errors import Fp4CommError, InvalidArgument, NotAvailable
from fp4comm.transport import Transport, make_transport

from .common import write_json_lines
from .device import CPU, choose_device

TIMEOUT_SECS = 120.0
GPU_TIMEOUT_SECS = 60.0
BETWEEN_GPUS = ("nccl", "peer")
TRANSPORTS = ("loopback", "mpi", "process_group", *BETWEEN_GPUS)
EXIT_USAGE = 2  # as argparse


class Ranks:
    """All ranks of this run. Every method but `say` and the properties is collective.

    Attributes:
        group: what `EPCommunicator` takes.
        control: the transport of the benchmark's own messages, in host memory.
        transports: those to measure, by name.
        transport: that of the baseline and of the bare messages: NCCL between GPUs.
        device: where the measured rows lie; the CPU until `use_device`.
        launcher: the command that this run was started with, as far as it is known.
    """

    def __init__(self) -> None:
        self.group = fp4comm.world_group()
        suited = "loopback" if self.group is None else "mpi" if hasattr(self.group, "Abort") else "process_group"
        self.control: Transport = make_transport(self.group, suited, timeout_secs=TIMEOUT_SECS)
        self.transports = {self.control.name: self.control}
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

    @property
    def suited_transport(self) -> str:
        """What `EPCommunicator` must be told so that rows lie on the device of the run: not "auto" if GPUs lie idle."""
        return self.control.name if self.device.type == "cpu" else "auto"

    def use_device(self, wanted: str, names: Sequence[str] | None = None) -> None:
        """Takes the GPUs if `wanted` ("auto", "cpu" or "cuda") says so and every rank has one.

        Args:
            wanted: see above.
            names: the transports to measure, in that order; None = all that there are.
        """
        problem, device = None, CPU
        try:
            device = choose_device(wanted)
        except ValueError as error:
            problem = str(error)
        self.require_none(problem, EXIT_USAGE)
        found: dict[str, Transport] = {}
        if not self.any(device.type == "cpu"):
            found, problem = self._between_gpus(names)
            if not found and wanted == "cuda":
                self.leave(f"--device cuda: {problem}; accepted: a GPU per rank", EXIT_USAGE)
        if found:
            self.transports, self.device = found, device
            self.transport = found.get("nccl") or next(iter(found.values()))
        missing = [name for name in names or () if name not in self.transports]
        if missing:
            why = f" ({problem})" if problem else ""
            accepted = ", ".join(self.transports)
            self.leave(f"--transports {','.join(missing)}: not available here{why}; accepted: {accepted}", EXIT_USAGE)
        self.transports = {name: self.transports[name] for name in names or self.transports}

    def _between_gpus(self, names: Sequence[str] | None) -> tuple[dict[str, Transport], str]:
        """The transports between GPUs by name, and why others are not among them. NCCL, the baseline's, is tried first:
        it tells whether every rank has a GPU of its own."""
        if self.num_ranks == 1:
            alone = make_transport(self.group, "auto")
            if alone.device is None:
                return {alone.name: alone}, ""
            alone.close()
            return {}, f"transport {alone.name} carries rows on {alone.device}"
        found: dict[str, Transport] = {}
        problem = ""
        for name in BETWEEN_GPUS:
            if name != "nccl" and names is not None and name not in names:
                continue
            try:
                found[name] = make_transport(self.group, name, timeout_secs=GPU_TIMEOUT_SECS)
            except NotAvailable as error:  # on all ranks
                problem = str(error)
            except InvalidArgument as error:  # on all ranks: they share GPUs
                return {}, str(error)
        return found, problem

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
        for transport in (*self.transports.values(), self.transport, self.control):
            transport.close()
        if self.control.name == "process_group":
            dist.destroy_process_group()


def abort(group: Any) -> NoReturn:
    """Ends this rank at once after an error that the others don't know of, and with it the whole job."""
    sys.stderr.flush()
    if hasattr(group, "Abort"):
        group.Abort(1)
    os._exit(1)


def run_with_torch(
    module: str, options: argparse.Namespace, run: Callable[[Ranks, argparse.Namespace], list[dict[str, Any]]]
) -> None:
    """The main program of a benchmark whose baseline stands on torch.distributed: runs it and writes its records."""
    ranks = Ranks()
    if ranks.control.name != "process_group":
        accepted = f"torchrun --nproc-per-node N -m benchmarks.{module}"
        ranks.leave(f"benchmarks.{module} needs torch.distributed; accepted: {accepted}", EXIT_USAGE)
    try:
        ranks.use_device(options.device)
        records = run(ranks, options)
        if options.json and ranks.rank == 0:
            write_json_lines(options.json, records)
        ranks.close()
    except Fp4CommError as error:  # all ranks raise it together
        ranks.leave(str(error), EXIT_USAGE)
    except Exception:  # the other ranks don't know of it and would wait
        traceback.print_exc()
        abort(ranks.group)
