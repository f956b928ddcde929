"""Runs of the benchmark programs in tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from launch import have_launcher, launch_command, run_command

from fp4comm.backends import cpu

QUICK = ["--repeats", "2", "--warmup-secs", "0", "--device", "cpu"]
TINY = ["--hidden", "256", "--topk", "2", "--experts", "8", *QUICK]


def run_main(module: Any, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[object]) -> None:
    """Runs a program in this process, and undoes what it sets for its process."""
    threads, isa = torch.get_num_threads(), cpu.isa()
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)
        cpu.set_isa(isa)


def run_on_two_ranks(launcher: str, arguments: Sequence[object], timeout: float = 90) -> tuple[int | None, str]:
    """Runs the bandwidth benchmark; its exit code and output."""
    if not have_launcher(launcher):
        pytest.skip(f"no {launcher} on this machine")
    command = [*launch_command(launcher, 2), "-m", "benchmarks.bandwidth", *map(str, arguments)]
    return run_command(command, timeout=timeout)
