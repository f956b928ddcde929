"""What the benchmarks share: timing loops and their statistics, the record of a run, tables and JSON lines."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fp4comm
from fp4comm.backends import cpu

ROOT = Path(__file__).resolve().parent.parent
Times = dict[str, float]  # seconds by name of the interval


@dataclass(frozen=True)
class Summary:
    """Statistics of samples, in their unit."""

    median: float
    p95: float
    minimum: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """p95 is the smallest sample that 95 % of the samples do not exceed."""
        if not samples:
            raise ValueError("no samples")
        ordered = sorted(samples)
        count = len(ordered)
        median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        return cls(median, ordered[math.ceil(0.95 * count) - 1], ordered[0], count)


@dataclass(frozen=True)
class Budget:
    """How long to measure: first `warmup_secs`, then `secs` or, if given, exactly `repeats` rounds."""

    warmup_secs: float
    secs: float
    repeats: int | None = None

    @classmethod
    def add_options(
        cls, parser: argparse.ArgumentParser, cpu: tuple[float, float], gpu: tuple[float, float], per: str = ""
    ) -> None:
        """Adds the options that `of` reads; the defaults of (warmup_secs, secs) are for one of what `per` names."""
        parser.set_defaults(budget={"cpu": cpu, "cuda": gpu})
        for index, (option, use) in enumerate((("--warmup-secs", "before measuring"), ("--secs", "time to measure"))):
            default = f"default {cpu[index]:g}, on a GPU {gpu[index]:g}{per}"
            parser.add_argument(option, type=non_negative, help=f"{use}, {default}")
        parser.add_argument("--repeats", type=positive, help="rounds to measure, instead of --secs")

    @classmethod
    def of(cls, options: argparse.Namespace, device: str = "cpu", count: int = 1) -> Budget:
        """What the options say for the device; on a GPU the default is for each of `count` cases."""
        warmup_secs, secs = (value * (1 if device == "cpu" else count) for value in options.budget[device])
        return cls(
            warmup_secs if options.warmup_secs is None else options.warmup_secs,
            secs if options.secs is None else options.secs,
            options.repeats,
        )


MIN_ROUNDS = 3


def measure(
    variants: Mapping[str, Callable[[int], Times]],
    budget: Budget,
    *,
    prepare: Callable[[int], None] = lambda index: None,
    decide: Callable[[bool], bool] = lambda go_on: go_on,
) -> dict[str, list[Times]]:
    """Runs all variants in turn, round after round, so that a slow phase of the machine meets all of them alike.

    Args:
        variants: by name what to run; each gets the number of the round and returns what it measured.
        budget: how long.
        prepare: called before each round with its number.
        decide: whether to do one more round, given this process's wish: where ranks come to one decision.

    Returns:
        By name the times of each round, without the warm-up.
    """
    names = list(variants)
    times: dict[str, list[Times]] = {name: [] for name in names}
    index = 0

    def rounds(secs: float, least: int, most: float, keep: bool) -> None:
        nonlocal index
        done, end = 0, time.perf_counter() + secs
        while decide(done < most and (done < least or time.perf_counter() < end)):
            prepare(index)
            shift = index % len(names)
            for name in names[shift:] + names[:shift]:
                sample = variants[name](index)
                if keep:
                    times[name].append(sample)
            index, done = index + 1, done + 1

    rounds(budget.warmup_secs, 1, math.inf, keep=False)
    if budget.repeats is None:
        rounds(budget.secs, MIN_ROUNDS, math.inf, keep=True)
    else:
        rounds(0.0, budget.repeats, budget.repeats, keep=True)
    return times


class Scratch:
    """Memory by use that is kept from call to call, with room to grow: no page faults once it has its size."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def rows(self, use: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """`[num_rows, width]`, filled with small numbers when it grows."""
        key, size = (use, dtype), num_rows * width
        if key not in self._memory or self._memory[key].numel() < size:
            period = torch.arange(1, 4097, device=self.device).remainder(251).to(dtype)
            self._memory[key] = period.repeat(-(-size * 5 // 4 // 4096) + 1)
        return self._memory[key][:size].view(num_rows, width)


def environment(module: str, launcher: str = "python", **more: object) -> dict[str, object]:
    """The record of a run: machine, versions, date and the command that repeats it."""
    return {
        "record": "run",
        "benchmark": module,
        "command": shlex.join([*launcher.split(), "-m", f"benchmarks.{module}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "isa": cpu.isa(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "fp4comm": fp4comm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **more,
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the sources, with a + if files differ from it; empty outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "fp4comm", "csrc", "benchmarks")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Columns as wide as needed, two spaces apart; the first `num_left` are aligned to the left."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def number(value: float | None) -> str:
    """`value` with three significant digits but at most three decimals; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), 3)}f}"


def write_json_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object per line; what was there is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of `write_json_lines`."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def summary_record(samples: Sequence[float]) -> dict[str, float | int]:
    """Statistics of `samples` as plain data."""
    return asdict(Summary.of(samples))


def positive(text: str) -> int:
    """Option type: an integer above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def non_negative(text: str) -> float:
    """Option type: a number of at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def list_of(convert: Callable[[str], Any], accepted: Sequence[str] | None = None) -> Callable[[str], list[Any]]:
    """Option type: values separated by commas."""

    def parse(text: str) -> list[Any]:
        items = [item.strip() for item in text.split(",")]
        for item in items:
            if accepted is not None and item not in accepted:
                raise argparse.ArgumentTypeError(f"{item!r} is not one of {', '.join(accepted)}")
        return list(dict.fromkeys(convert(item) for item in items))

    parse.__name__ = "list"  # what argparse calls the type in its messages
    return parse
