"""A host's own dispatcher beside fp4comm's adapters for it: time, bytes and accuracy of the same tokens on this
machine's ranks.

    torchrun --nproc-per-node 2 -m benchmarks.hosts --host transformers
    torchrun --nproc-per-node 2 -m benchmarks.hosts --host transformers --width 1536

Without --width the experts return their rows as they are, and what is timed is dispatch and combine. With it they are
the host's own, of that intermediate size. All dispatchers are timed in turn in the same rounds; a time is the maximum
over the ranks, on GPUs the device's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .clocks import make_clock
from .common import (
    Budget,
    Times,
    environment,
    format_table,
    measure,
    non_negative,
    number,
    positive,
    summary_record,
)
from .device import add_device_option, gpu_facts
from .host_layers import HOSTS, Dispatcher, Host, Sizes
from .ranks import Ranks, run_with_torch
from .workload import Config, Workload

PASSES = ("forward", "training")
COLUMNS = ("dispatcher", "MB sent", "of stock", "dB", "forward ms", "x stock", "with backward ms", "x stock")


@dataclass(frozen=True)
class Inputs:
    """What every dispatcher of a rank gets: tokens, their experts and weights, and the gradient of the result."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, workload: Workload, rank: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        batch = workload.batch(rank, 0).to(device)
        x = workload.x(rank)
        assert isinstance(x, Tensor)
        generator = torch.Generator().manual_seed(rank)
        gradient = torch.randn(x.shape, generator=generator).to(dtype)
        weights = batch.topk_weights / batch.topk_weights.sum(1, keepdim=True)
        return cls(x.to(device, dtype), batch.topk_idx.long(), weights, gradient.to(device))


@dataclass(frozen=True)
class Outcome:
    """What a dispatcher makes of the inputs."""

    y: Tensor
    x_gradient: Tensor
    weights_gradient: Tensor


class Variant:
    """A dispatcher and its clock."""

    def __init__(self, ranks: Ranks, dispatcher: Dispatcher, inputs: Inputs, num_calls: int) -> None:
        self.dispatcher, self.inputs = dispatcher, inputs
        self.clock = make_clock(ranks, num_calls)

    def __call__(self, index: int) -> Times:
        self.clock.call("forward", self.forward)
        self.clock.call("training", self.training)
        return self.clock.take()

    def forward(self) -> Tensor:
        """Without gradients."""
        inputs = self.inputs
        with torch.no_grad():
            return self.dispatcher(inputs.x, inputs.topk_idx, inputs.topk_weights)

    def training(self) -> Outcome:
        """Forward and backward."""
        inputs = self.inputs
        x, weights = (tensor.detach().requires_grad_() for tensor in (inputs.x, inputs.topk_weights))
        y = self.dispatcher(x, inputs.topk_idx, weights)
        y.backward(inputs.gradient)
        assert x.grad is not None
        assert weights.grad is not None
        return Outcome(y.detach(), x.grad, weights.grad)


def sqnr_db(found: Tensor, expected: Tensor) -> float | None:
    """Signal to noise of `found` in decibels; None if there is no noise."""
    error, signal = (tensor.double().square().sum().item() for tensor in (found - expected, expected))
    return None if error == 0 else 10 * torch.log10(torch.tensor(signal / error, dtype=torch.float64)).item()


def variant_record(name: str, times: Sequence[Times], stock: Sequence[Times], facts: dict[str, Any]) -> dict[str, Any]:
    """The figures of one dispatcher."""
    seconds = {key: summary_record([sample[key] for sample in times]) for key in times[0]}
    speedups = {
        which: summary_record([sample[which] for sample in stock])["median"] / seconds[which]["median"]
        for which in PASSES
    }
    return {"record": "dispatcher", "name": name, **facts, "seconds": seconds, "speedup_over_stock": speedups}


def check(host: Host, ranks: Ranks, inputs: Inputs) -> dict[str, dict[str, Any]]:
    """By dispatcher what a step sends, and how far its results are from the stock's."""
    row_bytes = inputs.x.shape[1] * inputs.x.element_size()
    num_local = host.sizes.num_experts // ranks.num_ranks
    remote = int((inputs.topk_idx // num_local != ranks.rank).sum())
    facts: dict[str, dict[str, Any]] = {}
    expected: Outcome | None = None
    for name, dispatcher in host.dispatchers.items():
        host.traffic(clear=True)
        outcome = Variant(ranks, dispatcher, inputs, 1).training()
        expected = expected or outcome
        own = host.traffic(clear=True)
        sent = {leg: own[leg] for leg in sorted(own)} if name != host.stock else {"all": 4 * remote * row_bytes}
        results = zip(*(vars(each).values() for each in (outcome, expected)), strict=True)
        facts[name] = {"sent_bytes": sent, "sqnr_db": [sqnr_db(found, wanted) for found, wanted in results]}
    return facts


def make_workload(sizes: Sizes, num_ranks: int, skew: float) -> Workload:
    """The tokens and routes of all ranks."""
    shape = (sizes.num_tokens, sizes.hidden, sizes.num_topk, sizes.num_experts)
    return Workload(Config(num_ranks, *shape, "expert", "bf16", "bf16", skew))


def run(ranks: Ranks, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures and prints; returns the records."""
    dtype = getattr(torch, options.dtype)
    sizes = Sizes(options.tokens, options.hidden, options.topk, options.experts, options.width, dtype)
    workload = make_workload(sizes, ranks.num_ranks, options.skew)
    inputs = Inputs.of(workload, ranks.rank, ranks.device, dtype)
    host = HOSTS[options.host](ranks.group, ranks.device, sizes)
    about = {"host": options.host, "version": host.version, "calls": options.calls, "config": str(workload.config)}
    shape = {"ranks": ranks.num_ranks, "width": options.width, "dtype": options.dtype}
    records = [environment("hosts", ranks.launcher, **about, **shape, **gpu_facts(ranks.device))]
    facts = check(host, ranks, inputs)
    variants = {name: Variant(ranks, each, inputs, options.calls) for name, each in host.dispatchers.items()}
    budget = Budget.of(options, ranks.device.type)
    own = measure(variants, budget, decide=ranks.any)
    times = {name: slowest(ranks.gather(samples)) for name, samples in own.items()}
    sent = ranks.gather({name: sum(fact["sent_bytes"].values()) for name, fact in facts.items()})
    mean = {name: sum(each[name] for each in sent) / len(sent) for name in facts}
    for name, samples in times.items():
        more = {**facts[name], "mean_sent_bytes": mean[name], "share_of_stock": mean[name] / mean[host.stock]}
        records.append(variant_record(name, samples, times[host.stock], more))
    ranks.say(text(records))
    host.close()
    return records


def slowest(of_ranks: Sequence[Sequence[Times]]) -> list[Times]:
    """The maximum over the ranks of each time of each round."""
    rounds = zip(*of_ranks, strict=True)
    return [{key: max(sample[key] for sample in samples) for key in samples[0]} for samples in rounds]


def text(records: Sequence[dict[str, Any]]) -> str:
    """What was measured, for people."""
    first, *rest = records
    experts = f"experts of width {first['width']}" if first["width"] else "experts that return their rows"
    title = f"{first['host']} {first['version']}, {first['config']}, {experts}, {first['dtype']}"
    return f"{title}\n\n{format_table(COLUMNS, [dispatcher_row(record) for record in rest])}"


def dispatcher_row(record: dict[str, Any]) -> list[str]:
    """A dispatcher's line."""
    noise = [ratio for ratio in record["sqnr_db"] if ratio is not None]
    cells = [
        record["name"],
        number(record["mean_sent_bytes"] / 1e6),
        number(record["share_of_stock"]),
        number(min(noise)) if noise else "exact",
    ]
    for which in PASSES:
        cells += [number(1e3 * record["seconds"][which]["median"]), number(record["speedup_over_stock"][which])]
    return cells


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.hosts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add_device_option(parser)
    add("--host", choices=tuple(HOSTS), required=True)
    add("--tokens", type=positive, default=8192, help="per rank, default %(default)s")
    add("--hidden", type=positive, default=4096, help="default %(default)s")
    add("--topk", type=positive, default=8, help="experts per token, default %(default)s")
    add("--experts", type=positive, default=128, help="default %(default)s")
    add("--width", type=int, default=0, help="intermediate size of experts; 0 (default): they return their rows")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default %(default)s")
    add("--skew", type=non_negative, default=0.0, help="exponent of Zipf's law of the experts' popularity, default 0")
    add("--calls", type=positive, default=10, help="in a row, for a time on GPUs, default %(default)s")
    add("--json", type=Path, metavar="FILE", help="where to write all figures as JSON lines")
    Budget.add_options(parser, cpu=(1.0, 10.0), gpu=(0.3, 4.0))
    return parser


def main() -> None:
    run_with_torch("hosts", make_parser().parse_args(), run)


if __name__ == "__main__":
    main()
