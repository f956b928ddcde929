"""The codec benchmark on a GPU: device time of every conversion, beside a device copy of as many bytes.

A case passes if its result equals the CPU's to the bit. It is then timed as a batch of calls, in one CUDA graph where
it can be captured, so that the gaps between launches don't count; cases that are small beside the L2 cache take turns
among several sets of inputs and outputs. "alone" is one call on an idle device, with its launch from Python.
A case that fails is reported and the others go on, since device time is dear.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .common import Budget, Times, environment, format_table, measure, number, summary_record
from .cuda_cases import all_cases
from .cuda_data import Data
from .cuda_jobs import GpuCase, Job
from .device import CPU, gpu_facts, gpu_seconds

ROWS, HIDDEN = 32768, 7168
COLUMNS = ("conversion", "us", "p95", "TB/s", "copy TB/s", "% of copy", "alone us", "launches")
L2_SHARE = 4  # the sets of a case are together at least so many times the L2 cache
LEAST_SETS = 3  # if one set is not
BATCH_BYTES = 3 << 30  # moved by a batch: about a millisecond
MOST_CALLS = 32
NUM_ALONE = 10
GRAPH_HEAD_START_US = 150.0
CALL_HEAD_START_US = 60.0  # per call: how long Python takes at most to enqueue one
Record = dict[str, Any]


class Loop:
    """A batch of calls of functions that do the same on different memory, in turn.

    Args:
        functions: what to call.
        num_calls: in a batch.
        in_graph: whether to capture the batch; without success it is enqueued call by call.
    """

    def __init__(self, functions: Sequence[Callable[[], None]], num_calls: int, in_graph: bool) -> None:
        self.functions, self.num_calls = functions, num_calls
        for function in functions:
            function()  # compiles, and lets the allocator find its sizes
        torch.cuda.synchronize()
        self.graph = self._capture() if in_graph else None

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._call_all()
        except RuntimeError as error:
            print(f"no graph: {error}", file=sys.stderr)
            torch.cuda.synchronize()
            return None
        graph.replay()
        return graph

    def _call_all(self) -> None:
        for index in range(self.num_calls):
            self.functions[index % len(self.functions)]()

    def seconds(self) -> float:
        """Device time of one call, the mean of a batch."""
        if self.graph is not None:
            return gpu_seconds(self.graph.replay, GRAPH_HEAD_START_US) / self.num_calls
        return gpu_seconds(self._call_all, CALL_HEAD_START_US * self.num_calls) / self.num_calls

    def alone(self) -> tuple[float, float]:
        """Device time of a call on an idle device, and the host's time to enqueue it."""
        host: list[float] = []

        def call() -> None:
            start = time.perf_counter()
            self.functions[0]()
            host.append(time.perf_counter() - start)

        return gpu_seconds(call), host[0]


class Copy:
    """A device copy that reads and writes as many bytes in all as asked, in memory that grows with the cases."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: tuple[Tensor, ...] = ()

    def functions(self, num_bytes: int, num_sets: int) -> list[Callable[[], None]]:
        """Copies in as many different places."""
        half = num_bytes // 2
        step = -(-half // 4096) * 4096
        if not self.memory or len(self.memory[0]) < num_sets * step:
            self.memory = ()  # free before the larger ones
            self.memory = tuple(
                torch.randint(256, (num_sets * step,), dtype=torch.uint8, device=self.device) for _ in range(2)
            )
        source, target = self.memory

        def copy(start: int) -> None:
            target[start : start + half].copy_(source[start : start + half])

        return [functools.partial(copy, index * step) for index in range(num_sets)]


class Bench:
    """Checks and measures cases.

    Args:
        device: the GPU.
        num_rows, hidden: size of the timed problem.
        check_rows: of the checked problem; as many as num_rows: what is timed is what has been checked.
        seed: of the data.
        budget: of each case.
    """

    def __init__(
        self, device: torch.device, num_rows: int, hidden: int, check_rows: int, seed: int, budget: Budget
    ) -> None:
        self.device, self.budget = device, budget
        self.checked = Data(device, check_rows, hidden, seed)
        self.expected = Data(CPU, check_rows, hidden, seed, self.checked)
        self.new_data = lambda index: Data(device, num_rows, hidden, seed + 1 + index)
        self.sets: list[Data] = [self.checked] if check_rows == num_rows else []
        self.copy = Copy(device)
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def problem(self, case: GpuCase) -> str | None:
        """How the result differs from the CPU's, if it does."""
        got = case.build(self.checked)
        got.run()
        torch.cuda.synchronize()
        wanted = case.build(self.expected)
        wanted.run()
        return difference(got.outputs(), wanted.outputs(), case.max_error)

    def measure(self, case: GpuCase) -> Record:
        """The record of a case that is right."""
        job, num_sets = self._job(case, 0), 1
        if job.num_bytes < L2_SHARE * self.l2_bytes:
            num_sets = min(max(LEAST_SETS, -(-L2_SHARE * self.l2_bytes // job.num_bytes)), 8)
        jobs = [job, *(self._job(case, index) for index in range(1, num_sets))]
        num_calls = min(max(4, BATCH_BYTES // job.num_bytes), MOST_CALLS)
        num_calls = -(-num_calls // num_sets) * num_sets
        launches = count_launches(job.run)
        convert = Loop([one.run for one in jobs], num_calls, case.in_graph)
        copies = self.copy.functions(job.num_bytes, num_sets)
        loops = {"convert": convert, **{how: Loop(copies, num_calls, how == "graph") for how in ("graph", "calls")}}

        def timed(loop: Loop) -> Callable[[int], Times]:
            return lambda index: {"secs": loop.seconds()}

        times = measure({name: timed(loop) for name, loop in loops.items()}, self.budget)
        alone = [convert.alone() for _ in range(NUM_ALONE)]
        seconds, *of_copy = (summary_record([sample["secs"] for sample in samples]) for samples in times.values())
        copy_seconds = min(of_copy, key=lambda summary: summary["median"])  # the better way to launch it
        return {
            **conversion_record(case, job, seconds, copy_seconds),
            "alone_seconds": summary_record([device for device, _ in alone]),
            "host_seconds": summary_record([host for _, host in alone]),
            "launches": launches,
            "sets": num_sets,
            "calls": num_calls,
            "graph": convert.graph is not None,
        }

    def _job(self, case: GpuCase, index: int) -> Job:
        while len(self.sets) <= index:
            self.sets.append(self.new_data(len(self.sets)))
        return case.build(self.sets[index])


def conversion_record(case: GpuCase, job: Job, seconds: dict[str, Any], copy_seconds: dict[str, Any]) -> Record:
    """What follows from bytes and times."""
    return {
        "record": "conversion",
        "name": case.name,
        "is_latency": case.is_latency,
        "elements": job.num_elements,
        "bytes": job.num_bytes,
        "seconds": seconds,
        "copy_seconds": copy_seconds,
        "gelems": job.num_elements / seconds["median"] / 1e9,
        "gbps": job.num_bytes / seconds["median"] / 1e9,
        "copy_gbps": job.num_bytes / copy_seconds["median"] / 1e9,
        "share_of_copy": copy_seconds["median"] / seconds["median"],
    }


def difference(got: Sequence[Tensor], wanted: Sequence[Tensor], max_error: float = 0.0) -> str | None:
    """Which of the results differ, if any: in a bit, or by more than `max_error` of the norm."""
    if len(got) != len(wanted):
        return f"{len(got)} results instead of {len(wanted)}"
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        here = one.cpu().contiguous()
        if here.shape != other.shape or here.dtype.itemsize != other.dtype.itemsize:
            return f"result {index} is {here.dtype} {list(here.shape)}, on the CPU {other.dtype} {list(other.shape)}"
        if max_error:
            error = float((here.double() - other.double()).norm() / other.double().norm())
            if not error <= max_error:
                return f"result {index} differs from the CPU's by {error:.1e} of its norm"
            continue
        a, b = (part.reshape(-1).view(torch.uint8) for part in (here, other.contiguous()))
        if not torch.equal(a, b):
            wrong = torch.nonzero(a != b).flatten()
            first = int(wrong[0])
            return (
                f"result {index} differs from the CPU's in {len(wrong)} of {len(a)} bytes, "
                f"first at {first}: {int(a[first]):#04x} instead of {int(b[first]):#04x}"
            )
    return None


def count_launches(function: Callable[[], None]) -> int:
    """Kernels of fp4comm that a call launches."""
    from fp4comm.backends import cuda_compile

    before = cuda_compile.num_launches
    function()
    return cuda_compile.num_launches - before


def table_row(record: Record) -> list[str]:
    """A line of the table."""
    seconds = record["seconds"]
    is_latency = record["is_latency"]
    return [
        record["name"],
        number(1e6 * seconds["median"]),
        number(1e6 * seconds["p95"]),
        "-" if is_latency else number(record["gbps"] / 1e3),
        "-" if is_latency else number(record["copy_gbps"] / 1e3),
        "-" if is_latency else f"{100 * record['share_of_copy']:.0f}",
        number(1e6 * record["alone_seconds"]["median"]),
        f"{record['launches']}{'' if record['graph'] else ' *'}",
    ]


def run(options: argparse.Namespace, device: torch.device) -> tuple[list[Record], list[str]]:
    """Checks, measures and prints all cases that were asked for; returns the records and what went wrong."""
    rows, hidden = options.rows or ROWS, options.hidden or HIDDEN
    cases = [case for case in all_cases() if options.only in case.name]
    if not cases:
        names = "; ".join(case.name for case in all_cases())
        sys.exit(f"error: --only {options.only!r} names no conversion; accepted: a part of one of: {names}")
    record = environment("codec", rows=rows, hidden=hidden, cache="out of cache", **gpu_facts(device))
    print(environment_text(record), flush=True)
    bench = Bench(device, rows, hidden, options.check_rows or rows, options.seed, Budget.of(options, "cuda"))
    records, problems = [record], []
    for case in cases:
        try:
            problem = bench.problem(case)
            if problem is None:
                records.append(bench.measure(case))
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            problems.append(f"{case.name}: {problem}")
            print(f"error: {problems[-1]}", file=sys.stderr, flush=True)
            records.append({"record": "failure", "name": case.name, "problem": problem})
    measured = [record for record in records if record["record"] == "conversion"]
    print(format_table(COLUMNS, [table_row(record) for record in measured]))
    print("\nMedians of device time. Bytes are counted once in and once out; the copy moves as many in the same run.")
    print("* launched call by call, not from a CUDA graph. alone: one call on an idle device, with its launch.")
    return records, problems


def environment_text(run: Record) -> str:
    """What measured where."""
    return (
        f"fp4comm {run['fp4comm']} ({run['commit'] or 'no commit'}), {run['date']}: {run['command']}\n"
        f"{run['gpu']}, driver {run['driver']}, CUDA {run['cuda']}, torch {run['torch']}, CuPy {run['cupy']}; "
        f"{run['rows']} rows x {run['hidden']}\n"
    )
