"""A whole MoE layer with shared experts after the routed ones and beside them: what the overlap saves.

    torchrun --nproc-per-node 2 -m benchmarks.moe_overlap
    torchrun --nproc-per-node 2 -m benchmarks.moe_overlap --recipes bf16,fp4 --graph --json overlap.jsonl
    torchrun --nproc-per-node 1 -m benchmarks.moe_overlap --shape qwen3-30b-a3b --tokens 4096 --graph
    torchrun --nproc-per-node 2 -m benchmarks.moe_overlap --hidden 256 --width 128 --experts 8 --topk 2 --tokens 64

"without" is the layer without shared experts: router, exchange, routed experts. "after" and "beside" give the same
bits, which is checked. Weights' operands are as they were. All are timed in turn in the same rounds; a time is the
maximum over the ranks, on GPUs the device's. On a CPU there is nothing to overlap.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4comm.moe import MoELayer

from .clocks import make_clock
from .common import (
    Budget,
    Times,
    environment,
    format_table,
    list_of,
    measure,
    number,
    positive,
    summary_record,
    write_json_lines,
)
from .device import add_device_option, gpu_facts, require_gpus
from .host_layers import Sizes
from .hosts import slowest
from .moe_shapes import DTYPE, add_shape_options, announce, parse_shapes
from .moe_variants import RECIPES, make_layer
from .ranks import BETWEEN_GPUS, Ranks, run_with_torch

WITHOUT, AFTER, BESIDE = "without", "after", "beside"
OVERLAPPING = ("forward", "training", "forward.graph", "training.graph")
COLUMNS = {
    "forward": "forward",
    "with backward": "training",
    "forward, graph": "forward.graph",
    "with backward, graph": "training.graph",
    "with backward, alone": "training.alone",
    "launching it": "training.host",
}
Record = dict[str, Any]


class Variant:
    """The layer with its shared experts in one of the three ways, and its clock."""

    def __init__(
        self, ranks: Ranks, layer: MoELayer, way: str, inputs: tuple[Tensor, Tensor], options: argparse.Namespace
    ) -> None:
        self.layer, self.way, (self.x, self.gradient) = layer, way, inputs
        self.shared = None if way == WITHOUT else layer.shared
        self.clock, self.in_graph = make_clock(ranks, options.calls), options.graph

    def __call__(self, index: int) -> Times:
        self.prepare()
        self.clock.call("training", self.training, self.in_graph)
        self.clock.call("forward", self.forward, self.in_graph)
        return self.clock.take()

    def prepare(self) -> None:
        """Puts the layer that all three share into this way."""
        self.layer.shared, self.layer.overlap_shared = self.shared, self.way == BESIDE

    def forward(self) -> Tensor:
        """Without gradients."""
        with torch.no_grad():
            y: Tensor = self.layer(self.x)
            return y

    def training(self) -> tuple[Tensor, ...]:
        """Forward and backward; result and gradients."""
        with torch.enable_grad():  # a clock's graph is captured without
            x = self.x.detach().requires_grad_()
            y = self.layer(x)
            return y.detach(), *torch.autograd.grad(y, (x, *self.layer.parameters()), self.gradient)


def run(ranks: Ranks, options: argparse.Namespace) -> list[Record]:
    """Measures and prints; returns the records."""
    require_gpus("--sms", options.sms, ranks.device)
    about = {"ranks": ranks.num_ranks, "shapes": list(options.shapes), "calls": options.calls}
    records: list[Record] = [environment("moe_overlap", ranks.launcher, **about, **gpu_facts(ranks.device))]
    for name, sizes in options.shapes.items():
        announce(ranks, name, sizes)
        for recipe in options.recipes:
            with on_a_stream(ranks.device):
                found = measure_layer(ranks, sizes, recipe, options)
            records += [{**record, "shape": name} for record in found]
            if options.json and ranks.rank == 0:
                write_json_lines(options.json, records)  # a later layer may end the process
        ranks.say(f"{text(records[-3 * len(options.recipes) :])}\n")
    return records


@contextmanager
def on_a_stream(device: torch.device) -> Iterator[None]:
    """One that can be captured: autograd keeps a parameter to the stream that it has first met it on."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def measure_layer(ranks: Ranks, sizes: Sizes, recipe: str, options: argparse.Namespace) -> list[Record]:
    """The records of one recipe."""
    given = {"num_sms": options.sms, **({"transport": options.transport} if options.transport else {})}
    capacity = options.capacity or (sizes.num_tokens if options.graph else None)
    shared = options.shared
    layer = make_layer(ranks, sizes, recipe, num_shared_experts=shared, num_max_tokens_per_rank=capacity, **given)
    transport = layer.comm.transport
    layer.experts.reset_parameters(seed=1)
    generator = torch.Generator().manual_seed(ranks.rank)
    inputs = [torch.randn(sizes.num_tokens, sizes.hidden, generator=generator) for _ in range(2)]
    pair = inputs[0].to(ranks.device, DTYPE), inputs[1].to(ranks.device, DTYPE)
    variants = {way: Variant(ranks, layer, way, pair, options) for way in (WITHOUT, AFTER, BESIDE)}
    if ranks.any(not is_same(variants[AFTER], variants[BESIDE])):
        raise AssertionError(f"{recipe}: results of shared experts beside the routed ones are not those of them after")
    own = measure(variants, Budget.of(options, ranks.device.type), decide=ranks.any)
    times = {name: slowest(ranks.gather(samples)) for name, samples in own.items()}
    layer.close()
    about = {"recipe": recipe, "transport": transport, "shared": shared, "capacity": capacity, "num_sms": options.sms}
    about |= {key: getattr(sizes, key) for key in ("hidden", "width", "num_tokens", "num_experts", "num_topk")}
    seconds = {way: {key: summary_record([each[key] for each in times[way]]) for key in times[way][0]} for way in times}
    return [{"record": "layer", "way": way, **about, "seconds": seconds[way]} for way in variants]


def is_same(one: Variant, other: Variant) -> bool:
    """Whether results and gradients have the same bits."""
    results = []
    for variant in (one, other):
        variant.prepare()
        results.append(variant.training())
    return all(map(torch.equal, *results))


def text(records: Sequence[Record]) -> str:
    """What was measured of a shape, for people."""
    return f"{title(records[0])}\n{format_table(*table(records), 2)}"


def title(record: Record) -> str:
    """The shape."""
    experts = f"{record['num_topk']} of {record['num_experts']} experts and {record['shared']} shared"
    tokens = f"{record['num_tokens']} tokens x {record['hidden']}"
    room = f", room for {record['capacity']} tokens a rank" if record.get("capacity") else ""
    sms = f", {record['num_sms']} SMs for the exchange" if record.get("num_sms") else ""
    return f"{record['shape']}: {tokens}, {experts}, width {record['width']}{room}{sms}"


def table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: milliseconds, and beside a layer with overlap the part of the shared experts' time it hides."""
    kinds = {name: key for name, key in COLUMNS.items() if key in records[0]["seconds"]}
    overlapping = [key for key in OVERLAPPING if "training.alone" in records[0]["seconds"]]  # not on a CPU
    rows = []
    for at in range(0, len(records), 3):
        ways = [{key: each["seconds"][key]["median"] for key in kinds.values()} for each in records[at : at + 3]]
        for record, own in zip(records[at : at + 3], ways, strict=True):
            cells = [record["recipe"], record["way"], *(number(1e3 * own[key]) for key in kinds.values())]
            for place, key in enumerate(kinds.values(), 2):
                if record["way"] == BESIDE and key in overlapping:
                    cells[place] += f" ({100 * hidden_part(*(each[key] for each in ways)):.0f} % hidden)"
            rows.append(cells)
    return ["recipe", "shared experts", *kinds], rows


def hidden_part(without: float, after: float, beside: float) -> float:
    """Of what shared experts add to the time of the layer."""
    return (after - beside) / (after - without)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.moe_overlap", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add_device_option(parser)
    add_shape_options(parser)
    add("--recipes", type=list_of(str, RECIPES), default=["fp4"], help=f"with commas, of {','.join(RECIPES)}")
    add("--shared", type=positive, default=1, help="experts that every token goes to, default %(default)s")
    add("--graph", action="store_true", help="time CUDA graphs as well, with the fixed capacity that they need")
    add("--capacity", type=positive, metavar="TOKENS", help="`num_max_tokens_per_rank`; with --graph default as many")
    add("--sms", type=positive, help="multiprocessors for packing and unpacking (`num_sms`), default all")
    add("--transport", choices=BETWEEN_GPUS, help="between GPUs; default what `EPCommunicator` takes")
    add("--calls", type=positive, default=3, help="in a row, for a time on GPUs, default %(default)s")
    add("--json", type=Path, metavar="FILE", help="where to write all figures as JSON lines")
    Budget.add_options(parser, cpu=(1.0, 10.0), gpu=(0.3, 4.0), per=" per recipe")
    return parser


def main() -> None:
    run_with_torch("moe_overlap", parse_shapes(make_parser()), run)


if __name__ == "__main__":
    main()
