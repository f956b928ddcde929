"""The experts of a MoE layer, forward and backward, in every recipe and in plain PyTorch: time and memory.

    torchrun --nproc-per-node 2 -m benchmarks.moe_layer
    torchrun --nproc-per-node 2 -m benchmarks.moe_layer --shape all --json moe.jsonl --plot moe.png
    torchrun --nproc-per-node 1 -m benchmarks.moe_layer --shape qwen3-30b-a3b --tokens 4096 --recipes bf16,fp4
    torchrun --nproc-per-node 2 -m benchmarks.moe_layer --hidden 256 --width 128 --experts 8 --topk 2 --tokens 64

Plain PyTorch sorts BF16 rows by expert, a row for each choice, sends them by `all_to_all_single` and multiplies by
`torch._grouped_mm`. All have the same weights, tokens and routes, and are timed in turn in the same rounds; a time is
the maximum over the ranks, on GPUs the device's. In a "step" the experts' weights are quantized anew; in forward, and
in forward with backward, they are as they were. Memory is measured for one kind of experts after the other, with
nothing of the others on the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import moe_report
from .common import Budget, environment, list_of, measure, positive, write_json_lines
from .device import add_device_option, gpu_facts
from .host_layers import Sizes
from .hosts import Inputs, make_workload, slowest
from .moe_shapes import DTYPE, add_shape_options, announce, parse_shapes
from .moe_variants import PLAIN, RECIPES, check, make_variants
from .ranks import Ranks, run_with_torch


def run(ranks: Ranks, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures and prints; returns the records."""
    about = {"ranks": ranks.num_ranks, "shapes": list(options.shapes), "calls": options.calls}
    records = [environment("moe_layer", ranks.launcher, **about, **gpu_facts(ranks.device))]
    for name, sizes in options.shapes.items():
        announce(ranks, name, sizes)
        found = measure_shape(ranks, sizes, options)
        records += [{**record, "shape": name} for record in found]
        ranks.say(moe_report.text(records[-len(found) :]) + "\n")
        if options.json and ranks.rank == 0:
            write_json_lines(options.json, records)  # a later shape may end the process
    if options.plot and ranks.rank == 0:
        from .moe_plot import plot  # here, since matplotlib is slow to import

        plot(records, options.plot)
    return records


def measure_shape(ranks: Ranks, sizes: Sizes, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of all kinds of experts of one shape."""
    workload = make_workload(sizes, ranks.num_ranks, 0.0)
    inputs = Inputs.of(workload, ranks.rank, ranks.device, DTYPE)
    variants, layers = make_variants(ranks, inputs, sizes, options.recipes, options.calls)
    about = {"config": str(workload.config), "width": sizes.width, "kept_bytes": None}
    facts: dict[str, dict[str, Any]]
    facts = {name: {**about, "sqnr_db": decibels} for name, decibels in check(variants).items()}
    for name, variant in variants.items():
        facts[name] |= {**variant.memory(), "kernel_seconds": moe_report.kernel_seconds(variant)}
    own = measure(variants, Budget.of(options, ranks.device.type), decide=ranks.any)
    times = {name: slowest(ranks.gather(samples)) for name, samples in own.items()}
    num_tokens = sizes.num_tokens * ranks.num_ranks
    for layer in layers:
        layer.close()
    return [
        {**moe_report.variant_record(name, samples, times[PLAIN], num_tokens), **facts[name]}
        for name, samples in times.items()
    ]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.moe_layer", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add_device_option(parser)
    add_shape_options(parser)
    add(
        "--recipes", type=list_of(str, RECIPES), default=list(RECIPES), help=f"with commas, default {','.join(RECIPES)}"
    )
    add("--calls", type=positive, default=3, help="in a row, for a time on GPUs, default %(default)s")
    add("--json", type=Path, metavar="FILE", help="where to write all figures as JSON lines")
    add("--plot", type=Path, metavar="FILE", help="picture of where the time of a step goes: .png, .svg or .pdf")
    Budget.add_options(parser, cpu=(1.0, 10.0), gpu=(0.3, 6.0), per=" per shape")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; `shapes` are the sizes to measure by name."""
    parser = make_parser()
    options = parse_shapes(parser, arguments)
    if options.plot and find_spec("matplotlib") is None:  # before anything is measured
        parser.error("--plot needs matplotlib; install it with: pip install matplotlib")
    return options


def main() -> None:
    run_with_torch("moe_layer", parse(), run)


if __name__ == "__main__":
    main()
