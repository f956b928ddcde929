"""What the bandwidth benchmark times: wires over transports, a plain dispatcher, bare messages and a memory copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fp4comm import FP8Tensor

from .clocks import make_clock
from .common import Budget, Scratch, Times, measure
from .device import on_device
from .gate import bf16_rows, make_communicator
from .per_choice import PerChoice, Routes, messages
from .ranks import Ranks
from .workload import DTYPES, Batch, Variant, Workload

PER_CHOICE = "bf16/choice"  # the plain dispatcher in reports
KNOWN = "known"  # a dispatch along the routes of the one before it, with fixed capacity
STAGES = ("pack", "wire", "unpack")
NUM_CHECK_TOKENS = 16  # few, so that the fixed cost of the checks shows
NUM_GPU_ROUTES = 4  # sets of routes on a GPU, where making new ones takes far longer than a round


@dataclass(frozen=True)
class Rows:
    """Rows sent per rank and round, on average over ranks and rounds."""

    all: float
    remote: float
    choices: float  # rows of the plain dispatcher
    remote_choices: float


@dataclass(frozen=True)
class CaseTimes:
    """Per variant and interval ("dispatch", "dispatch.pack", ...) the maximum over ranks of each round, in seconds."""

    whole: dict[str, dict[str, list[float]]]
    stages: dict[str, dict[str, list[float]]]
    rows: Rows


@dataclass(frozen=True)
class Prepared:
    """The routes of one round."""

    batch: Batch
    rows_to_rank: list[int]
    rows_from_rank: list[int]
    totals: list[int]  # rows and remote rows; the same of the plain dispatcher


class Round:
    """The routes of the current round; tells the variants what to send. On a GPU a few sets of routes take turns."""

    def __init__(self, ranks: Ranks, workload: Workload) -> None:
        self.ranks, self.workload, self.device = ranks, workload, ranks.device
        self.totals: list[list[int]] = []
        self.index = 0
        self._kept: dict[int, Prepared] = {}

    @cached_property
    def x(self) -> Tensor | FP8Tensor:
        """This rank's tokens."""
        return on_device(self.workload.x(self.ranks.rank), self.device)

    def prepare(self, index: int) -> None:
        """Makes the routes of round `index` and counts their rows."""
        is_on_gpu = self.device.type == "cuda"
        self.index = index % NUM_GPU_ROUTES if is_on_gpu else index
        prepared = self._kept.get(self.index) or self._make()
        if is_on_gpu:
            self._kept[self.index] = prepared
        self.batch, self.rows_to_rank, self.rows_from_rank = (
            prepared.batch,
            prepared.rows_to_rank,
            prepared.rows_from_rank,
        )
        self.totals.append(prepared.totals)

    def _make(self) -> Prepared:
        config, rank = self.workload.config, self.ranks.rank
        batch = self.workload.batch(rank, self.index)
        rows = config.rows_to_rank(batch.topk_idx)
        if config.has_capacity and self.device.type == "cuda":
            rows = torch.full_like(rows, config.num_tokens)  # all messages have that size
        choices = batch.topk_idx[batch.topk_idx >= 0] // config.num_local_experts
        per_rank = torch.bincount(choices, minlength=config.num_ranks)
        totals = [n for sent in (rows, per_rank) for n in (int(sent.sum()), int(sent.sum() - sent[rank]))]
        from_rank: list[int] = self.ranks.exchange_counts(rows).tolist()
        return Prepared(batch.to(self.device), rows.tolist(), from_rank, totals)

    def mean_rows(self) -> Rows:
        """Averages over all ranks and rounds so far."""
        means = [sum(column) / len(self.totals) for column in zip(*self.totals, strict=True)]
        gathered = self.ranks.gather(means)
        return Rows(*(sum(column) / len(gathered) for column in zip(*gathered, strict=True)))


class WireVariant:
    """Dispatch and combine of fp4comm."""

    def __init__(
        self, current: Round, variant: Variant, scratch: Scratch, num_calls: int, check_inputs: bool | None = None
    ) -> None:
        self.config, self.current, self.scratch = current.workload.config, current, scratch
        self.comm = make_communicator(current.ranks, self.config, variant, check_inputs)
        self.clock = make_clock(current.ranks, num_calls)
        self._handles: dict[int, Any] = {}

    def __call__(self, index: int) -> Times:
        config, comm, x = self.config, self.comm, self.current.x
        routes = {"handle": self._handle()} if config.is_cached else self._new_routes()
        out = "fp8" if config.output == "fp8" else DTYPES[config.output]
        # where nothing waits for the device
        in_graph = (config.is_cached or config.has_capacity) and not comm.check_inputs
        received, handle = self.clock.call("dispatch", lambda: comm.dispatch(x, **routes, out=out), in_graph)
        num_rows = len(received.x.data)
        del received
        if config.has_capacity and not config.is_cached and comm.stage_hook is None:  # what the routes cost
            self.clock.call(KNOWN, lambda: comm.dispatch(x, handle=handle, out=out), in_graph)
        dtype = torch.float32 if config.output == "fp32" else torch.bfloat16
        y = self.scratch.rows("y", num_rows, config.hidden, dtype)
        self.clock.call("combine", lambda: comm.combine(y, handle), in_graph)
        return self.clock.take()

    def _new_routes(self) -> dict[str, Any]:
        batch = self.current.batch
        return {"topk_idx": batch.topk_idx, "topk_weights": batch.topk_weights, "layout": self.config.layout}

    def _handle(self) -> Any:
        """Of a dispatch along the current routes, which is not timed."""
        index = self.current.index
        handle = self._handles.get(index)
        if handle is None:
            handle = self.comm.dispatch(self.current.x, **self._new_routes())[1]
            self.comm.traffic.clear()
            self.clock.take()  # the stages of this dispatch
            if self.current.device.type == "cuda":
                self._handles[index] = handle
        return handle

    def by_stage(self, index: int) -> Times:
        """The same with the stages timed."""
        with self.clock.stages() as hook:
            self.comm.stage_hook = hook
            times = self(index)
            self.comm.stage_hook = None
        return times


def per_choice_variant(current: Round, scratch: Scratch, num_calls: int) -> Callable[[int], Times]:
    """The plain dispatcher; along known routes, if fp4comm has them too."""
    config, ranks = current.workload.config, current.ranks
    baseline = PerChoice(ranks.transport, config.num_experts, config.layout == "expert", ranks.device)
    x, clock = bf16_rows(current.x), make_clock(ranks, num_calls)
    known: dict[int, Routes] = {}

    def run(index: int) -> Times:
        batch, routes = current.batch, None
        if config.is_cached:
            routes = known.get(current.index) or baseline.route(batch.topk_idx, batch.topk_weights)
            known.clear() if current.device.type == "cpu" else known.update({current.index: routes})
        recv_x, routes = clock.call(
            "dispatch", lambda: baseline.dispatch(x, batch.topk_idx, batch.topk_weights, routes)
        )
        num_rows = len(recv_x)
        del recv_x
        y = scratch.rows("y", num_rows, config.hidden, torch.bfloat16)
        clock.call("combine", lambda: baseline.combine(y, routes))
        return clock.take()

    return run


def raw_variant(current: Round, wire: str, scratch: Scratch, num_calls: int) -> Callable[[int], Times]:
    """The bare transport with messages of the same sizes."""
    config, ranks = current.workload.config, current.ranks
    clock, transport = make_clock(ranks, num_calls), ranks.transport

    def send_rows(num_rows: int, width: int) -> Tensor:
        if ranks.device.type == "cuda":
            return transport.send_buffer((num_rows, width), ranks.device)
        return scratch.rows("send", num_rows, width, torch.uint8)

    def run(index: int) -> Times:
        for leg, to_rank, from_rank in (
            ("dispatch", current.rows_to_rank, current.rows_from_rank),
            ("combine", current.rows_from_rank, current.rows_to_rank),
        ):
            width = config.row_bytes(wire, leg)
            outgoing = messages(send_rows(sum(to_rank), width), to_rank)
            incoming = messages(scratch.rows("receive", sum(from_rank), width, torch.uint8), from_rank)
            clock.call(leg, partial(transport.exchange, outgoing, incoming))
        return clock.take()

    return run


def copy_variant(current: Round, scratch: Scratch, num_calls: int) -> Callable[[int], Times]:
    """A memory copy of the rows in BF16, on all ranks at once."""
    width, clock = current.workload.config.bf16_row_bytes, make_clock(current.ranks, num_calls)

    def run(index: int) -> Times:
        source = scratch.rows("send", sum(current.rows_to_rank), width, torch.uint8)
        target = scratch.rows("receive", sum(current.rows_to_rank), width, torch.uint8)
        clock.call("copy", lambda: target.copy_(source))
        return clock.take()

    return run


def measure_case(
    ranks: Ranks, workload: Workload, measured: Sequence[Variant], budget: Budget, num_calls: int = 1
) -> CaseTimes:
    """Times all variants of one case: two thirds of the time for whole calls, the rest for their stages."""
    current, scratch = Round(ranks, workload), Scratch(ranks.device)
    wire_variants = {str(variant): WireVariant(current, variant, scratch, num_calls) for variant in measured}
    variants: dict[str, Callable[[int], Times]] = {**wire_variants}
    variants[PER_CHOICE] = per_choice_variant(current, scratch, num_calls)
    for wire in dict.fromkeys(variant.wire for variant in measured):
        variants[f"raw {wire}"] = raw_variant(current, wire, scratch, num_calls)
    variants["copy"] = copy_variant(current, scratch, num_calls)

    def rounds(variants: dict[str, Callable[[int], Times]], budget: Budget) -> dict[str, dict[str, list[float]]]:
        times = measure(variants, budget, prepare=current.prepare, decide=ranks.any)
        return maximum_over_ranks(ranks, times)

    whole = rounds(variants, replace(budget, secs=budget.secs * 2 / 3))
    rows = current.mean_rows()
    by_stage: dict[str, Callable[[int], Times]] = {name: variant.by_stage for name, variant in wire_variants.items()}
    stages = rounds(by_stage, Budget(0.0, budget.secs / 3, budget.repeats))
    for variant in wire_variants.values():
        variant.comm.close()
    return CaseTimes(whole, stages, rows)


def measure_checks(
    ranks: Ranks, workload: Workload, variant: Variant, budget: Budget, num_calls: int = 1
) -> dict[str, dict[str, list[float]]]:
    """The same few tokens with `check_inputs` off and on, along new routes and, for dispatch, along cached ones."""
    config = replace(workload.config, num_tokens=NUM_CHECK_TOKENS, is_cached=True, has_capacity=False)
    current, scratch = Round(ranks, replace(workload, config=config)), Scratch(ranks.device)
    variants = {name: WireVariant(current, variant, scratch, num_calls, name == "on") for name in ("off", "on")}
    short = Budget(0.2, min(budget.secs, 2.0), budget.repeats)
    times = measure(variants, short, prepare=current.prepare, decide=ranks.any)
    for timed in variants.values():
        timed.comm.close()
    return maximum_over_ranks(ranks, times)


def maximum_over_ranks(ranks: Ranks, times: dict[str, list[Times]]) -> dict[str, dict[str, list[float]]]:
    """Per variant and interval the slowest rank's time of each round."""
    gathered: list[dict[str, list[Times]]] = ranks.gather(times)
    result = {}
    for name, own_rounds in times.items():
        result[name] = {
            interval: [max(rank[name][index][interval] for rank in gathered) for index in range(len(own_rounds))]
            for interval in own_rounds[0]
        }
    return result
