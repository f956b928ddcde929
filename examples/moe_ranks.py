"""The processes that were started together: their device, and the sums over them that data parallelism needs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4comm import InvalidArgument, NotAvailable, world_group

DEVICES = ("auto", "cpu", "cuda")


class Ranks:
    """All processes of a run.

    Attributes:
        group: what `EPCommunicator` takes.
        rank, size: of this process, and of all.
        device: the CPU until `use_device`.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.device = group, torch.device("cpu")
        self._is_mpi = hasattr(group, "Allreduce")
        if group is None:
            self.rank, self.size = 0, 1
        elif self._is_mpi:
            self.rank, self.size = group.Get_rank(), group.Get_size()
        else:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def started(cls, program: str) -> Ranks:
        """Those of this run; ends the program if the launcher's package is missing."""
        try:
            return cls(world_group())
        except NotAvailable as error:
            sys.exit(f"{program}: {error}")

    def use_device(self, wanted: str) -> None:
        """Takes a GPU if `wanted`, one of `DEVICES`, says so and every process has one to itself, and CuPy.

        Raises:
            InvalidArgument: "cuda", and not every process has one.
        """
        on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))  # which torchrun sets
        has_one = torch.cuda.is_available() and torch.cuda.device_count() >= on_machine
        lacks = not has_one or importlib.util.find_spec("cupy") is None
        lacks = bool(self.sum(torch.tensor([int(lacks)])).item())
        if lacks and wanted == "cuda":
            raise InvalidArgument("--device is cuda; accepted: it where every process has a GPU to itself, and CuPy")
        if wanted != "cpu" and not lacks:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def launcher(self) -> str:
        """The beginning of the command line that started them."""
        if self.group is None:
            return "python"
        return f"mpirun -n {self.size} python" if self._is_mpi else f"torchrun --nproc-per-node {self.size}"

    @property
    def on_host(self) -> str:
        """The transport of the launcher, for CPU tensors."""
        return "loopback" if self.group is None else "mpi" if self._is_mpi else "process_group"

    @property
    def transport(self) -> str:
        """What `EPCommunicator` is given for tokens on the device."""
        return "auto" if self.device.type == "cuda" else self.on_host

    def command_line(self, program: str) -> str:
        """The command that was given, as it reads on any machine: without --resume and folders of this one."""
        arguments = [part for argument in sys.argv[1:] for part in argument.split("=", 1)]
        if "--resume" in arguments:
            place = arguments.index("--resume")
            has_file = not "".join(arguments[place + 1 : place + 2]).startswith("--")
            del arguments[place : place + 1 + has_file]
        shown = [Path(argument).name if Path(argument).is_absolute() else argument for argument in arguments]
        return f"{self.launcher} examples/{program} {shlex.join(shown)}".strip()

    @property
    def machine(self) -> str:
        """What it computes on."""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)} per rank"
        return f"{processor()}, {os.cpu_count()} logical cores"

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over the ranks, the same bits on all of them."""
        return self.sum_(values.clone())

    def sum_(self, values: Tensor) -> Tensor:
        """As `sum`, in place of `values`, which must be contiguous."""
        if self.size > 1 and self._is_mpi:
            host = values.cpu()
            total = torch.empty_like(host)
            self.group.Allreduce(host.numpy(), total.numpy())
            values.copy_(total)
        elif self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def agree(self, number: int) -> bool:
        """Whether all ranks have passed the same number, below 2**48; the same answer on all of them."""
        mean_is_another = self.sum(torch.tensor([number])).item() != self.size * number
        return self.sum(torch.tensor([int(mean_is_another)])).item() == 0

    def share(self, batch: Tensor, dim: int = 0) -> Tensor:
        """The entries of a batch that are this rank's, along `dim`."""
        return batch[(slice(None),) * dim + (slice(self.rank, None, self.size),)]

    def print(self, text: str) -> None:
        """Prints once, not once per rank."""
        if self.rank == 0:
            print(text, flush=True)

    @contextlib.contextmanager
    def printing_once(self) -> Iterator[None]:
        """Meanwhile only one rank prints: one usage message is enough."""
        nowhere = io.StringIO()
        with contextlib.ExitStack() as stack:
            if self.rank > 0:
                stack.enter_context(contextlib.redirect_stderr(nowhere))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            yield

    def share_cores(self, wanted: int) -> None:
        """Sets the threads of this process: `wanted`, or its share of the cores if that is 0."""
        torch.set_num_threads(wanted or max(1, (os.cpu_count() or 1) // self.size))

    def wait(self) -> None:
        """Returns when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def processor() -> str:
    """What kind of processor this is."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
