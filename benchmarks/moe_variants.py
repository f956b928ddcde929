"""The experts that `benchmarks.moe_layer` measures, with the time and the memory of their passes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from fp4comm.moe import GroupedExperts, MoELayer

from .clocks import make_clock
from .common import Times
from .host_layers import Sizes
from .hosts import Inputs, sqnr_db
from .ranks import Ranks

PLAIN = "torch bf16"
RECIPES = ("bf16", "fp8_flow", "fp4", "fp4_all")


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
        y = y[inverse(by_expert)]  # a gather keeps its index for backward, index_copy all rows
        y = all_to_all_single_autograd(y, sent, received, self.group)
        y = y[inverse(order)].view(*topk_idx.shape, -1)
        return (y * topk_weights.to(y.dtype)[..., None]).sum(dim=1)

    def _experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)


def inverse(order: Tensor) -> Tensor:
    """Where each row went."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


class Variant:
    """Experts of one kind and their clock."""

    def __init__(self, ranks: Ranks, experts: Any, comm: Any, inputs: Inputs, num_calls: int) -> None:
        self.experts, self.comm, self.inputs, self.device = experts, comm, inputs, ranks.device
        self.clock = make_clock(ranks, num_calls)

    def __call__(self, index: int) -> Times:
        self.clock.call("step", self.step)  # first: it makes the operands of the others
        self.clock.call("training", self.training)
        self.clock.call("forward", self.forward)
        self.release()
        return self.clock.take()

    def run(self, x: Tensor, weights: Tensor) -> Tensor:
        more = () if self.comm is None else (self.comm,)
        y: Tensor = self.experts(x, self.inputs.topk_idx, weights, *more)
        return y

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Tokens and routing weights, which get gradients."""
        x, weights = (tensor.detach().requires_grad_() for tensor in (self.inputs.x, self.inputs.topk_weights))
        return x, weights

    def forward(self) -> Tensor:
        """Without gradients."""
        with torch.no_grad():
            return self.run(self.inputs.x, self.inputs.topk_weights)

    def training(self) -> tuple[Tensor, ...]:
        """Forward and backward; result and gradients."""
        self.free_gradients()
        x, weights = self.leaves()
        y = self.run(x, weights)
        y.backward(self.inputs.gradient)
        return y.detach(), x.grad, weights.grad, *(p.grad for p in self.experts.parameters())

    def step(self) -> tuple[Tensor, ...]:
        """The same after the weights have changed."""
        self.forget_operands()
        return self.training()

    def forget_operands(self) -> None:
        if isinstance(self.experts, GroupedExperts):
            self.experts.forget_operands()

    def free_gradients(self) -> None:
        for parameter in self.experts.parameters():
            parameter.grad = None

    def release(self) -> None:
        """Frees what only this variant needs, so that the next one finds the memory."""
        self.forget_operands()
        self.free_gradients()

    def memory(self) -> dict[str, int]:
        """Bytes of a training pass beyond what lies on the device before it, weights and their operands; none on a CPU.

        kept_bytes: what forward leaves for backward, beside its result. peak_bytes: the most during forward and
        backward, without the gradients of weights; peak_with_gradients_bytes: with them. All other variants must have
        been released. Buffers of the communicator are there before.
        """
        if self.device.type == "cpu":
            return {}
        self.training()  # makes operands, grows buffers
        self.free_gradients()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x, weights = self.leaves()
        with allocations(self.device) as events:
            y = self.run(x, weights)
            torch.cuda.synchronize()
            kept = torch.cuda.memory_allocated() - before - y.nbytes
            y.backward(self.inputs.gradient)
            torch.cuda.synchronize()
        with_gradients = torch.cuda.max_memory_allocated() - before
        gradients = [p.grad.untyped_storage().data_ptr() for p in self.experts.parameters() if p.grad is not None]
        self.release()
        peak = peak_bytes(events, gradients)
        return {"kept_bytes": kept, "peak_bytes": peak, "peak_with_gradients_bytes": with_gradients}


@contextmanager
def allocations(device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """What torch's allocator does meanwhile, in order; the list is filled at the end."""
    events: list[dict[str, Any]] = []
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    try:
        yield events
        events += torch.cuda.memory._snapshot()["device_traces"][device.index]
    finally:
        torch.cuda.memory._record_memory_history(None)


def peak_bytes(events: Sequence[dict[str, Any]], left_out: Sequence[int]) -> int:
    """The most bytes that were allocated at once, without the blocks at the addresses `left_out` at the end."""
    last = {event["addr"]: at for at, event in enumerate(events) if event["action"] == "alloc"}
    ignored = {last[address] for address in left_out if address in last}
    sizes: dict[int, int] = {}
    allocated = peak = 0
    for at, event in enumerate(events):
        if event["action"] == "alloc" and at not in ignored:
            sizes[event["addr"]] = event["size"]
            allocated += event["size"]
            peak = max(peak, allocated)
        elif event["action"] == "free_requested":  # before these events or in them
            allocated -= sizes.pop(event["addr"], 0)
    return peak


def make_layer(ranks: Ranks, sizes: Sizes, recipe: str, **options: Any) -> MoELayer:
    """A layer of that shape; options are further arguments of it."""
    shape = {"hidden": sizes.hidden, "ffn_hidden": sizes.width, "dtype": sizes.dtype}
    counts = {"num_experts": sizes.num_experts, "num_topk": sizes.num_topk}
    where = {"device": ranks.device, "transport": ranks.suited_transport}
    return MoELayer(ranks.group, recipe=recipe, **{**shape, **counts, **where, **options})


def make_variants(
    ranks: Ranks, inputs: Inputs, sizes: Sizes, recipes: Sequence[str], num_calls: int
) -> tuple[dict[str, Variant], list[MoELayer]]:
    """By name, plain PyTorch first; all share the weights of the first recipe."""
    variants: dict[str, Variant] = {}
    layers: list[MoELayer] = []
    for recipe in recipes:
        layer = make_layer(ranks, sizes, recipe, device="meta" if layers else ranks.device)
        if layers:
            layer.experts.gate_up, layer.experts.down = layers[0].experts.gate_up, layers[0].experts.down
        else:
            layer.experts.reset_parameters(seed=1)
            plain = PlainExperts(ranks.group, layer.experts, sizes.num_experts)
            variants[PLAIN] = Variant(ranks, plain, None, inputs, num_calls)
        layers.append(layer)
        variants[recipe] = Variant(ranks, layer.experts, layer.comm, inputs, num_calls)
    return variants, layers


def check(variants: dict[str, Variant]) -> dict[str, list[float | None]]:
    """By name how far result and gradients are from plain PyTorch's, in decibels; of weights those of two experts."""

    def results(variant: Variant) -> list[Tensor]:
        *rows, gate_up, down = variant.training()
        few = [*rows, gate_up[:2].clone(), down[:2].clone()]
        del gate_up, down
        variant.release()
        return few

    expected = results(variants[PLAIN])
    pairs = {name: zip(results(variant), expected, strict=True) for name, variant in variants.items()}
    return {name: [sqnr_db(*pair) for pair in each] for name, each in pairs.items()}
