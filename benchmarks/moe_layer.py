"""The experts of a MoE layer, forward and backward, in every recipe and in plain PyTorch: time and memory.

    torchrun --nproc-per-node 2 -m benchmarks.moe_layer
    torchrun --nproc-per-node 2 -m benchmarks.moe_layer --shape qwen3-30b-a3b --tokens 4096
    torchrun --nproc-per-node 2 -m benchmarks.moe_layer --hidden 256 --width 128 --experts 8 --topk 2 --tokens 64

Plain PyTorch sorts BF16 rows by expert, a row for each choice, sends them by `all_to_all_single` and multiplies by
`torch._grouped_mm`. All have the same weights, tokens and routes, and are timed in turn in the same rounds; a time is
the maximum over the ranks, on GPUs the device's. In a "step" the experts' weights are quantized anew; in forward, and
in forward with backward, they are as they were.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from fp4comm.moe import GroupedExperts, MoELayer

from .clocks import make_clock
from .common import (
    Budget,
    Times,
    environment,
    format_table,
    measure,
    number,
    positive,
    summary_record,
)
from .device import add_device_option, gpu_facts
from .host_layers import Sizes
from .hosts import Inputs, make_workload, slowest, sqnr_db
from .ranks import Ranks, run_with_torch
from .workload import Workload

SHAPES = {  # hidden, width, experts, top-k
    "deepseek-v3": (7168, 2048, 256, 8),
    "deepseek-v2-lite": (2048, 1408, 64, 6),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
}
PLAIN = "torch bf16"
RECIPES = ("bf16", "fp8_flow", "fp4", "fp4_all")
PASSES = ("forward", "training", "step")
MIB = 2.0**20


class PlainExperts(nn.Module):
    """SwiGLU experts of this rank in BF16, by what torch has. Weights as those of `GroupedExperts`."""

    def __init__(self, group: Any, experts: GroupedExperts, num_experts: int) -> None:
        super().__init__()
        self.group, self.num_experts = group, num_experts
        self.gate_up, self.down = experts.gate_up, experts.down

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Results, the sums over experts. Collective."""
        size = dist.get_world_size(self.group)
        chosen = topk_idx.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts).view(size, -1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
        rows = all_to_all_single_autograd(x[order // topk_idx.shape[1]], received, sent, self.group)
        experts = torch.arange(theirs.shape[1], device=x.device).repeat(size)
        by_expert = experts.repeat_interleave(theirs.reshape(-1), output_size=sum(received)).argsort(stable=True)
        y = self._experts(rows[by_expert], theirs.sum(0).cumsum(0).int())
        y = torch.zeros_like(y).index_copy(0, by_expert, y)
        y = all_to_all_single_autograd(y, sent, received, self.group)
        y = y * topk_weights.reshape(-1)[order, None]
        return torch.zeros(x.shape, device=x.device).index_add(0, order // topk_idx.shape[1], y).to(x.dtype)

    def _experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)


class Variant:
    """Experts of one kind and their clock."""

    def __init__(self, ranks: Ranks, experts: Any, comm: Any, inputs: Inputs, num_calls: int) -> None:
        self.experts, self.comm, self.inputs, self.device = experts, comm, inputs, ranks.device
        self.clock = make_clock(ranks, num_calls)

    def __call__(self, index: int) -> Times:
        self.clock.call("forward", self.forward)
        self.clock.call("training", self.training)
        self.clock.call("step", self.step)
        return self.clock.take()

    def run(self, x: Tensor, weights: Tensor) -> Tensor:
        more = () if self.comm is None else (self.comm,)
        y: Tensor = self.experts(x, self.inputs.topk_idx, weights, *more)
        return y

    def forward(self) -> Tensor:
        """Without gradients."""
        with torch.no_grad():
            return self.run(self.inputs.x, self.inputs.topk_weights)

    def training(self) -> tuple[Tensor, ...]:
        """Forward and backward; result and gradients."""
        x, weights = (tensor.detach().requires_grad_() for tensor in (self.inputs.x, self.inputs.topk_weights))
        for parameter in self.experts.parameters():
            parameter.grad = None
        y = self.run(x, weights)
        y.backward(self.inputs.gradient)
        return y.detach(), x.grad, weights.grad, *(p.grad for p in self.experts.parameters())

    def step(self) -> tuple[Tensor, ...]:
        """The same after the weights have changed."""
        if isinstance(self.experts, GroupedExperts):
            self.experts.forget_operands()
        return self.training()

    def kept_bytes(self) -> int | None:
        """What a forward pass leaves on the device for backward, beside its result; None on a CPU."""
        if self.device.type == "cpu":
            return None
        x, weights = (tensor.detach().requires_grad_() for tensor in (self.inputs.x, self.inputs.topk_weights))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = self.run(x, weights)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before - y.nbytes


def make_variants(
    ranks: Ranks, inputs: Inputs, sizes: Sizes, num_calls: int
) -> tuple[dict[str, Variant], list[MoELayer]]:
    """By name; recipes share the weights of the first."""
    variants: dict[str, Variant] = {}
    layers: list[MoELayer] = []
    for recipe in RECIPES:
        layer = MoELayer(
            ranks.group,
            hidden=sizes.hidden,
            ffn_hidden=sizes.width,
            num_experts=sizes.num_experts,
            num_topk=sizes.num_topk,
            recipe=recipe,
            dtype=sizes.dtype,
            device="meta" if layers else ranks.device,
        )
        if layers:
            layer.experts.gate_up, layer.experts.down = layers[0].experts.gate_up, layers[0].experts.down
        else:
            layer.experts.reset_parameters(seed=1)
            variants[PLAIN] = Variant(
                ranks, PlainExperts(ranks.group, layer.experts, sizes.num_experts), None, inputs, num_calls
            )
        layers.append(layer)
        variants[recipe] = Variant(ranks, layer.experts, layer.comm, inputs, num_calls)
    return variants, layers


def check(variants: dict[str, Variant]) -> dict[str, list[float | None]]:
    """By name how far result and gradients are from plain PyTorch's, in decibels; of weights those of two experts."""

    def results(variant: Variant) -> list[Tensor]:
        *rows, gate_up, down = variant.training()
        return [*rows, gate_up[:2].clone(), down[:2].clone()]

    expected = results(variants[PLAIN])
    pairs = {name: zip(results(variant), expected, strict=True) for name, variant in variants.items()}
    return {name: [sqnr_db(*pair) for pair in each] for name, each in pairs.items()}


def run(ranks: Ranks, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures and prints; returns the records."""
    hidden, width, experts, topk = (
        getattr(options, name) or default
        for name, default in zip(("hidden", "width", "experts", "topk"), SHAPES[options.shape], strict=True)
    )
    dtype = torch.bfloat16
    sizes = Sizes(options.tokens, hidden, topk, experts, width, dtype)
    workload: Workload = make_workload(sizes, ranks.num_ranks, 0.0)
    inputs = Inputs.of(workload, ranks.rank, ranks.device, dtype)
    about = {"shape": options.shape, "config": str(workload.config), "width": width, "calls": options.calls}
    records = [environment("moe_layer", ranks.launcher, ranks=ranks.num_ranks, **about, **gpu_facts(ranks.device))]
    variants, layers = make_variants(ranks, inputs, sizes, options.calls)
    distances = check(variants)
    kept = {name: variant.kept_bytes() for name, variant in variants.items()}
    parts = {name: kernel_seconds(variant) for name, variant in variants.items()}
    own = measure(variants, Budget.of(options, ranks.device.type), decide=ranks.any)
    times = {name: slowest(ranks.gather(samples)) for name, samples in own.items()}
    for name, samples in times.items():
        records.append(variant_record(name, samples, times[PLAIN], sizes.num_tokens * ranks.num_ranks))
        records[-1] |= {"sqnr_db": distances[name], "kernel_seconds": parts[name], "kept_bytes": kept[name]}
    ranks.say(text(records))
    for layer in layers:
        layer.close()
    return records


PARTS = {  # of a step on a GPU, by what is in the names of kernels; the first that fits counts
    "GEMMs": ("gemm", "cutlass", "nvjet", "grouped_mm", "xmma"),
    "exchange": ("nccl", "pack_tokens", "convert_rows", "sum_rows", "dot_rows", "meet", "slot", "numbers", "rout"),
    "unpacking": ("expand_rows", "await_rows"),
    "columns": ("columns",),
    "SwiGLU": ("swiglu", "silu"),
    "rest": ("",),
}


def kernel_seconds(variant: Variant) -> dict[str, float]:
    """Device time of this rank's kernels in a step, by what they are for; empty on a CPU."""
    if variant.device.type == "cpu":
        return {}
    variant.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        variant.step()
        torch.cuda.synchronize()
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in profile.key_averages():
        part = next(part for part, names in PARTS.items() if any(name in event.key.lower() for name in names))
        seconds[part] += event.self_device_time_total / 1e6
    return seconds


def variant_record(name: str, times: Sequence[Times], plain: Sequence[Times], num_tokens: int) -> dict[str, Any]:
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


TIMES = ("forward ms", "with backward", "step ms")
COLUMNS = ("experts", "dB", *(column for time in TIMES for column in (time, "x torch")), "kept MiB")


def text(records: Sequence[dict[str, Any]]) -> str:
    """What was measured, for people."""
    first, *rest = records
    parts = [f"{first['config']}, width {first['width']}", format_table(COLUMNS, [row(record) for record in rest])]
    if rest[0]["kernel_seconds"]:
        table = format_table(("experts", *PARTS), [parts_row(record) for record in rest])
        parts.append(f"kernels of a step, ms\n{table}")
    return "\n\n".join(parts)


def row(record: dict[str, Any]) -> list[str]:
    """The line of one kind of experts."""
    noise = [ratio for ratio in record["sqnr_db"] if ratio is not None]
    cells = [record["name"], number(min(noise)) if noise else "exact"]
    for which in PASSES:
        cells += [number(1e3 * record["seconds"][which]["median"]), number(record["speedup_over_plain"][which])]
    kept = record["kept_bytes"]
    return [*cells, number(None if kept is None else kept / MIB)]


def parts_row(record: dict[str, Any]) -> list[str]:
    """The line of one kind of experts in the table of kernels."""
    return [record["name"], *(number(1e3 * record["kernel_seconds"][part]) for part in PARTS)]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.moe_layer", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add_device_option(parser)
    add("--shape", choices=tuple(SHAPES), default="deepseek-v3", help="of a published model, default %(default)s")
    for name, what in (("hidden", "width of a token"), ("width", "of an expert"), ("experts", "in all"), ("topk", "")):
        add(f"--{name}", type=positive, help=f"{what or 'experts of a token'}, default that of the shape")
    add("--tokens", type=positive, default=8192, help="per rank, default %(default)s")
    add("--calls", type=positive, default=3, help="in a row, for a time on GPUs, default %(default)s")
    add("--json", type=Path, metavar="FILE", help="where to write all figures as JSON lines")
    Budget.add_options(parser, cpu=(1.0, 10.0), gpu=(0.3, 6.0))
    return parser


def main() -> None:
    run_with_torch("moe_layer", make_parser().parse_args(), run)


if __name__ == "__main__":
    main()
