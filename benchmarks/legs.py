"""All four legs, forward and backward, with each wire format over each transport: device time on this machine's ranks.

    torchrun --nproc-per-node 4 -m benchmarks.legs
    torchrun --nproc-per-node 2 -m benchmarks.legs --tokens 64 --hidden 256 --experts 8 --topk 2 --device cpu

`benchmarks.bandwidth` has more figures of dispatch and combine; here backward goes through autograd, as in training:
grad_combine is what follows from a dispatch, grad_dispatch from a combine. Routes are known. "raw" is the bare
all-to-all of the same bytes, over NCCL between GPUs. Results and gradients are compared with those of the first
variant. A time is the maximum over the ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .clocks import make_clock
from .common import (
    Budget,
    Scratch,
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
from .device import add_device_option, gpu_facts
from .gate import make_communicator
from .hosts import slowest, sqnr_db
from .ranks import Ranks, run_with_torch
from .timing import Round, raw_variant
from .workload import WIRE_BITS, Config, Variant, Workload

LEGS = ("dispatch", "combine", "grad_dispatch", "grad_combine")
SAME_BYTES = {leg: leg.removeprefix("grad_") for leg in LEGS}  # by leg the one with rows of that size and direction
LAYOUTS = ("rank", "expert")
HOW = ("alone", "host")  # further times of a call on a GPU
DTYPE = torch.bfloat16
Record = dict[str, Any]


class FourLegs:
    """One wire format over one transport."""

    def __init__(self, current: Round, variant: Variant, num_calls: int) -> None:
        ranks, config = current.ranks, current.workload.config
        self.comm = make_communicator(ranks, config, variant)
        self.clock = make_clock(ranks, num_calls)
        assert isinstance(current.x, Tensor)
        self.x = current.x.detach().requires_grad_()
        batch = current.batch
        received, self.handle = self.comm.dispatch(
            self.x.detach(), batch.topk_idx, batch.topk_weights, layout=config.layout, out=DTYPE
        )
        generator = torch.Generator().manual_seed(ranks.rank)
        self.upstream = torch.randn(self.x.shape, generator=generator).to(self.x)
        assert isinstance(received.x, Tensor)
        self.y = received.x.detach().clone().requires_grad_()

    def forward(self) -> Tensor:
        """The received rows."""
        rows = self.comm.dispatch(self.x, handle=self.handle, out=DTYPE)[0].x
        assert isinstance(rows, Tensor)
        return rows

    def __call__(self, index: int) -> Times:
        call, y, upstream = self.clock.call, self.y, self.upstream
        rows = call("dispatch", self.forward)
        call("grad_combine", lambda: torch.autograd.grad(rows, self.x, y.detach(), retain_graph=True))
        out = call("combine", lambda: self.comm.combine(y, self.handle))
        call("grad_dispatch", lambda: torch.autograd.grad(out, y, upstream, retain_graph=True))
        return self.clock.take()

    def results(self) -> dict[str, Tensor]:
        """What each leg brings."""
        rows = self.forward()
        out = self.comm.combine(self.y, self.handle)
        (grad_y,) = torch.autograd.grad(out, self.y, self.upstream)
        (grad_x,) = torch.autograd.grad(rows, self.x, self.y.detach())
        return {"dispatch": rows.detach(), "combine": out.detach(), "grad_dispatch": grad_y, "grad_combine": grad_x}


def measure_case(ranks: Ranks, config: Config, options: argparse.Namespace, budget: Budget) -> list[Record]:
    """The records of one configuration."""
    current, scratch = Round(ranks, Workload(config)), Scratch(ranks.device)
    current.prepare(0)
    names = [Variant(transport, wire) for transport in ranks.transports for wire in options.wires]
    legs = {variant: FourLegs(current, variant, options.calls) for variant in names}
    expected = legs[names[0]].results()
    noise = {}
    for variant, each in legs.items():
        found = each.results()
        noise[variant] = {leg: sqnr_db(found[leg], expected[leg]) for leg in LEGS}
    variants: dict[str, Callable[[int], Times]] = {str(variant): each for variant, each in legs.items()}
    for wire in options.wires:
        variants[f"raw {wire}"] = raw_variant(current, wire, scratch, options.calls)
    own = measure(variants, budget, decide=ranks.any)
    times = {name: slowest(ranks.gather(samples)) for name, samples in own.items()}
    rows = current.mean_rows()
    for each in legs.values():
        each.comm.close()
    records = []
    for variant in names:
        for leg in LEGS:
            row_bytes = config.row_bytes(variant.wire, SAME_BYTES[leg])
            record = leg_record(leg, times[str(variant)], times[f"raw {variant.wire}"])
            record |= {"transport": variant.transport, "wire": variant.wire, "sqnr_db": noise[variant][leg]}
            records.append(record | {"config": asdict(config), "sent_bytes": rows.remote * row_bytes})
    return records


def leg_record(leg: str, times: Sequence[Times], raw: Sequence[Times]) -> Record:
    """The times of one leg."""
    record: Record = {"record": "training_leg", "leg": leg, "seconds": summary_record([each[leg] for each in times])}
    record |= {
        f"{how}_seconds": summary_record([each[f"{leg}.{how}"] for each in times])
        for how in HOW
        if f"{leg}.{how}" in times[0]
    }
    return record | {"raw_seconds": summary_record([each[SAME_BYTES[leg]] for each in raw])}


def run(ranks: Ranks, options: argparse.Namespace) -> list[Record]:
    """Measures and prints; returns the records."""
    about = {"ranks": ranks.num_ranks, "transport": ", ".join(ranks.transports), "calls": options.calls}
    records: list[Record] = [environment("legs", ranks.launcher, **about, **gpu_facts(ranks.device))]
    configs = [
        Config(ranks.num_ranks, num, options.hidden, options.topk, options.experts, layout, is_cached=True)
        for num in options.tokens
        for layout in options.layouts
    ]
    budget = Budget.of(options, ranks.device.type, len(configs))
    share = Budget(budget.warmup_secs / len(configs), budget.secs / len(configs), budget.repeats)
    for config in configs:
        found = measure_case(ranks, config, options, share)
        ranks.say(text(config, found) + "\n")
        records += found
        if options.json and ranks.rank == 0:
            write_json_lines(options.json, records)  # a later case may end the process
    return records


def text(config: Config, records: Sequence[Record]) -> str:
    """What was measured of a configuration, for people: microseconds."""
    return f"{config}, us\n{format_table(*table(records), 2)}"


def table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a configuration, in microseconds."""
    keys = {"": "seconds", " alone": "alone_seconds"}
    keys = {name: key for name, key in keys.items() if key in records[0]}
    header = ["over", "wire", "MB sent", "dB", *(f"{leg}{name}" for name in keys for leg in LEGS)]
    rows = []
    for at in range(0, len(records), len(LEGS)):
        legs = records[at : at + len(LEGS)]
        noise = [leg["sqnr_db"] for leg in legs if leg["sqnr_db"] is not None]
        cells = [legs[0]["transport"], legs[0]["wire"], number(legs[0]["sent_bytes"] / 1e6)]
        cells += [number(min(noise)) if noise else "exact", *(us(leg[key]) for key in keys.values() for leg in legs)]
        rows.append([*cells, us(legs[0]["raw_seconds"]), us(legs[1]["raw_seconds"])])
    return [*header, "raw dispatch", "raw combine"], rows


def us(time: Record) -> str:
    """The median in microseconds."""
    return number(1e6 * time["median"])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.legs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add_device_option(parser)
    add("--tokens", type=list_of(positive), default=[4096, 8192], help="per rank, with commas, default 4096,8192")
    add("--hidden", type=positive, default=7168, help="default %(default)s")
    add("--topk", type=positive, default=8, help="experts per token, default %(default)s")
    add("--experts", type=positive, default=256, help="default %(default)s")
    wires = ["bf16", "fp8", "mxfp4"]
    add("--wires", type=list_of(str, list(WIRE_BITS)), default=wires, help=f"default {','.join(wires)}")
    add("--layouts", type=list_of(str, LAYOUTS), default=list(LAYOUTS), help=f"default {','.join(LAYOUTS)}")
    add("--calls", type=positive, default=10, help="in a row, for a time on GPUs, default %(default)s")
    add("--json", type=Path, metavar="FILE", help="where to write all figures as JSON lines")
    Budget.add_options(parser, cpu=(1.0, 10.0), gpu=(0.3, 4.0), per=" per case")
    return parser


def main() -> None:
    run_with_torch("legs", make_parser().parse_args(), run)


if __name__ == "__main__":
    main()
