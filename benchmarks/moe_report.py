"""What `benchmarks.moe_layer` has measured: its records, and their tables for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import torch

from .common import Times, format_table, number, summary_record
from .moe_variants import Variant

Record = dict[str, Any]
PASSES = ("forward", "training", "step")
MIB = 2.0**20
PARTS = {  # of a step on a GPU, by the names of kernels; the first that fits counts
    "packing": ("pack_tokens",),
    "exchange": (
        *("*nccl*", "sum_rows", "dot_rows", "meet", "*_slot", "*_slots", "exchange_numbers"),
        *("route_*", "read_rows", "count_experts", "place_rows"),
    ),
    "unpacking": ("expand_rows", "await_rows"),
    "rows": ("convert_rows", "quantize_rows", "expert_scales"),
    "columns": ("*_columns",),
    "weights": (),  # by the kernels of the two before, while operands are made of them
    "SwiGLU": ("swiglu_*", "*silu*"),
    "GEMMs": ("*gemm*", "*cutlass*", "*nvjet*", "*grouped_mm*", "*xmma*"),
    "rest": ("*",),
}
CONVERSIONS = ("packing", "unpacking", "rows", "columns", "weights")  # over peer with what they send and wait for


def part_of(kernel: str) -> str:
    """What a kernel is for."""
    name = kernel.lower()
    return next(part for part, patterns in PARTS.items() if any(fnmatchcase(name, each) for each in patterns))


def kernel_seconds(variant: Variant) -> dict[str, float]:
    """Device time of this rank's kernels in a step, by what they are for; empty on a CPU."""
    if variant.device.type == "cpu":
        return {}
    step = profiled(variant.step)
    seconds = profiled(variant.training)
    variant.release()
    seconds["weights"] = sum(max(0.0, step[part] - seconds[part]) for part in ("rows", "columns"))
    return seconds


def profiled(run: Callable[[], object]) -> dict[str, float]:
    """Device time of the kernels of the second of two runs, by what they are for."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in profile.key_averages():
        seconds[part_of(event.key)] += event.self_device_time_total / 1e6
    return seconds


def variant_record(name: str, times: Sequence[Times], plain: Sequence[Times], num_tokens: int) -> Record:
    """The times of one kind of experts."""
    seconds = {key: summary_record([sample[key] for sample in times]) for key in times[0]}
    reference = {which: summary_record([sample[which] for sample in plain])["median"] for which in PASSES}
    return {
        "record": "experts",
        "name": name,
        "seconds": seconds,
        "speedup_over_plain": {which: reference[which] / seconds[which]["median"] for which in PASSES},
        "tokens_per_second": num_tokens / seconds["step"]["median"],
    }


def by_shape(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """What was measured for each shape, with a title."""
    experts = [record for record in records if record["record"] == "experts"]
    titled = [(f"{record['shape']}, {record['config']}, width {record['width']}", record) for record in experts]
    return [(title, [record for _, record in group]) for title, group in groupby(titled, lambda pair: pair[0])]


def text(records: Sequence[Record]) -> str:
    """What was measured, for people."""
    parts = []
    for title, experts in by_shape(records):
        parts += [title, format_table(*times_table(experts))]
        if experts[0]["kernel_seconds"]:
            parts.append(f"{KERNELS}\n{format_table(*parts_table(experts))}")
    return "\n\n".join(parts)


KERNELS = "Kernels of a step, ms"


def times_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: accuracy, times, memory."""
    times = (column for time in ("forward ms", "with backward", "step ms") for column in (time, "x torch"))
    memory = {"kept MiB": "kept_bytes", "peak MiB": "peak_bytes"}
    rows = []
    for record in records:
        noise = [ratio for ratio in record["sqnr_db"] if ratio is not None]
        cells = [record["name"], number(min(noise)) if noise else "exact"]
        for which in PASSES:
            cells += [number(1e3 * record["seconds"][which]["median"]), number(record["speedup_over_plain"][which])]
        found = [record.get(key) for key in memory.values()]  # not known on a CPU
        rows.append([*cells, *(number(None if value is None else value / MIB) for value in found)])
    return ["experts", "dB", *times, *memory], rows


def parts_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: where the time of a step goes. Conversions have their share of the step beside them."""
    parts = list(records[0]["kernel_seconds"])
    rows = []
    for record in records:
        seconds, step = record["kernel_seconds"], record["seconds"]["step"]["median"]
        cells = [record["name"]]
        for part in parts:
            cells.append(number(1e3 * seconds[part]))
            if part in CONVERSIONS and seconds[part]:
                cells[-1] += f" ({percent(seconds[part] / step)})"
        rows.append([*cells, percent(sum(seconds[part] for part in CONVERSIONS) / step)])
    return ["experts", *parts, "conversions"], rows


def percent(share: float) -> str:
    """With one decimal."""
    return f"{100 * share:.1f} %"
