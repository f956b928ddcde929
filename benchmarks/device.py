"""The device that a benchmark runs on: its choice, its description, and intervals of its own time."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable

import torch

from fp4comm import FP8Tensor
from fp4comm.errors import require

CPU = torch.device("cpu")
NOMINAL_CYCLES_PER_US = 2000  # of a GPU, for pauses whose exact length does not matter


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Adds --device, which `choose_device` reads."""
    choices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", choices=choices, default="auto", help="auto (default): a GPU if there is one")


def choose_device(wanted: str) -> torch.device:
    """The device that --device asks for: this process's current GPU, or the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device; accepted: auto, cpu")
    return torch.device("cuda", torch.cuda.current_device())


def require_gpus(option: str, value: object, device: torch.device) -> None:
    """Checks that an option without a meaning on a CPU is not given there, as on all ranks alike.

    Raises:
        InvalidArgument: it is given.
    """
    require(value is None or device.type != "cpu", option, "given, but rows lie on the CPU", "with rows on GPUs only")


def gpu_facts(device: torch.device) -> dict[str, object]:
    """What the record of a run says of its GPUs; only the device's type for the CPU."""
    if device.type == "cpu":
        return {"device": "cpu"}
    import cupy

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": "cuda",
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "sm": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cupy": cupy.__version__,
        "nccl": _nccl_version(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        return answer.splitlines()[0].strip()
    except (OSError, IndexError, subprocess.SubprocessError):
        return "unknown"


def _nccl_version() -> str:
    """Of the NCCL that the transport uses, which is CuPy's."""
    try:
        from cupy.cuda import nccl

        code = int(nccl.get_version())
    except (ImportError, AttributeError, RuntimeError):
        return "none"
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def pause_gpu(microseconds: float) -> None:
    """Keeps the current stream busy for about that long, so that the host gets ahead of it as in a running program."""
    torch.cuda._sleep(int(microseconds * NOMINAL_CYCLES_PER_US))


def gpu_seconds(
    function: Callable[[], object], head_start_us: float = 0.0, before: Callable[[], None] = lambda: None
) -> float:
    """Device time between events around what `function` enqueues; returns when the device is done.

    Args:
        function: what to time.
        head_start_us: for how long the device is kept busy first, so that it need not wait for the host; with 0 the
            time from an idle device, launches from the host included.
        before: called once the device is idle, for ranks that start together.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before()
    if head_start_us:
        pause_gpu(head_start_us)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def on_device(x: torch.Tensor | FP8Tensor, device: torch.device) -> torch.Tensor | FP8Tensor:
    """`x` there; itself if it is there already."""
    if isinstance(x, FP8Tensor):
        return FP8Tensor(x.data.to(device), x.scales.to(device))
    return x.to(device)
