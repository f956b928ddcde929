"""What the bandwidth benchmark times: each wire format, the plain dispatcher, the bare transport and a memory copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4comm import EPCommunicator, Precision

from .common import Budget, Scratch, Times, measure
from .gate import bf16_rows
from .per_choice import PerChoice, messages
from .ranks import Ranks
from .workload import DTYPES, Batch, Workload

PER_CHOICE = "bf16/choice"  # the plain dispatcher in reports
STAGES = ("pack", "wire", "unpack")
NUM_CHECK_TOKENS = 16  # few, so that the fixed cost of the checks shows


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


class Round:
    """The routes of the current round; tells the variants what to send."""

    def __init__(self, ranks: Ranks, workload: Workload) -> None:
        self.ranks, self.workload = ranks, workload
        self.totals: list[list[int]] = []

    def prepare(self, index: int) -> None:
        """Makes the routes of round `index` and counts their rows."""
        config, rank = self.workload.config, self.ranks.rank
        self.batch: Batch = self.workload.batch(rank, index)
        rows = config.rows_to_rank(self.batch.topk_idx)
        choices = self.batch.topk_idx[self.batch.topk_idx >= 0] // config.num_local_experts
        per_rank = torch.bincount(choices, minlength=config.num_ranks)
        self.rows_to_rank: list[int] = rows.tolist()
        self.rows_from_rank: list[int] = self.ranks.exchange_counts(rows).tolist()
        self.totals.append([n for sent in (rows, per_rank) for n in (int(sent.sum()), int(sent.sum() - sent[rank]))])

    def mean_rows(self) -> Rows:
        """Averages over all ranks and rounds so far."""
        means = [sum(column) / len(self.totals) for column in zip(*self.totals, strict=True)]
        gathered = self.ranks.gather(means)
        return Rows(*(sum(column) / len(gathered) for column in zip(*gathered, strict=True)))


class Clock:
    """Times intervals that all ranks enter together."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.times: Times = {}

    @contextmanager
    def interval(self, name: str) -> Iterator[None]:
        self.ranks.barrier()
        start = time.perf_counter()
        yield
        self.times[name] = time.perf_counter() - start

    def take(self) -> Times:
        """What was timed since the last call."""
        times, self.times = self.times, {}
        return times


class WireVariant:
    """Dispatch and combine of fp4comm with one wire format on both legs."""

    def __init__(
        self, ranks: Ranks, workload: Workload, wire: str, current: Round, scratch: Scratch, check_inputs: bool = True
    ) -> None:
        config = workload.config
        self.comm = EPCommunicator(
            ranks.group,
            num_experts=config.num_experts,
            hidden=config.hidden,
            precision=Precision(wire, wire, wire, wire),
            check_inputs=check_inputs,
        )
        self.config, self.current, self.scratch = config, current, scratch
        self.x = workload.x(ranks.rank)
        self.clock = Clock(ranks)

    def __call__(self, index: int) -> Times:
        config, comm = self.config, self.comm
        batch = self.current.batch
        routes: dict[str, Any] = {"topk_idx": batch.topk_idx, "topk_weights": batch.topk_weights}
        routes["layout"] = config.layout
        if config.is_cached:
            routes = {"handle": comm.dispatch(self.x, **routes)[1]}
            comm.traffic.clear()
        out = "fp8" if config.output == "fp8" else DTYPES[config.output]
        with self.clock.interval("dispatch"):
            received, handle = comm.dispatch(self.x, **routes, out=out)
        num_rows = sum(received.num_rows_per_expert) if config.layout == "expert" else len(received.topk_idx)
        del received
        dtype = torch.float32 if config.output == "fp32" else torch.bfloat16
        y = self.scratch.rows("y", num_rows, config.hidden, dtype)
        with self.clock.interval("combine"):
            comm.combine(y, handle)
        return self.clock.take()

    def by_stage(self, index: int) -> Times:
        """The same with the stages timed, each after a barrier, so that none waits for another rank's earlier stage."""
        self.comm.stage_hook = self.clock.interval
        times = self(index)
        self.comm.stage_hook = None
        return times


def per_choice_variant(ranks: Ranks, workload: Workload, current: Round, scratch: Scratch) -> Callable[[int], Times]:
    """The plain dispatcher."""
    config = workload.config
    baseline = PerChoice(ranks.transport, config.num_experts, config.layout == "expert")
    x, clock = bf16_rows(workload.x(ranks.rank)), Clock(ranks)

    def run(index: int) -> Times:
        batch = current.batch
        with clock.interval("dispatch"):
            recv_x, routes = baseline.dispatch(x, batch.topk_idx, batch.topk_weights)
        num_rows = len(recv_x)
        del recv_x
        y = scratch.rows("y", num_rows, config.hidden, torch.bfloat16)
        with clock.interval("combine"):
            baseline.combine(y, routes)
        return clock.take()

    return run


def raw_variant(
    ranks: Ranks, workload: Workload, wire: str, current: Round, scratch: Scratch
) -> Callable[[int], Times]:
    """The bare transport with messages of the same sizes."""
    config, clock = workload.config, Clock(ranks)

    def run(index: int) -> Times:
        for leg, send_rows, recv_rows in (
            ("dispatch", current.rows_to_rank, current.rows_from_rank),
            ("combine", current.rows_from_rank, current.rows_to_rank),
        ):
            width = config.row_bytes(wire, leg)
            outgoing = messages(scratch.rows("send", sum(send_rows), width, torch.uint8), send_rows)
            incoming = messages(scratch.rows("receive", sum(recv_rows), width, torch.uint8), recv_rows)
            with clock.interval(leg):
                ranks.transport.exchange(outgoing, incoming)
        return clock.take()

    return run


def copy_variant(ranks: Ranks, workload: Workload, current: Round, scratch: Scratch) -> Callable[[int], Times]:
    """A memory copy of the rows in BF16, on all ranks at once."""
    width, clock = workload.config.bf16_row_bytes, Clock(ranks)

    def run(index: int) -> Times:
        source = scratch.rows("send", sum(current.rows_to_rank), width, torch.uint8)
        target = scratch.rows("receive", sum(current.rows_to_rank), width, torch.uint8)
        with clock.interval("copy"):
            target.copy_(source)
        return clock.take()

    return run


def measure_case(ranks: Ranks, workload: Workload, wires: list[str], budget: Budget) -> CaseTimes:
    """Times all variants of one case: two thirds of the time for whole calls, the rest for their stages."""
    current, scratch = Round(ranks, workload), Scratch()
    wire_variants = {wire: WireVariant(ranks, workload, wire, current, scratch) for wire in wires}
    variants: dict[str, Callable[[int], Times]] = {**wire_variants}
    variants[PER_CHOICE] = per_choice_variant(ranks, workload, current, scratch)
    variants |= {f"raw {wire}": raw_variant(ranks, workload, wire, current, scratch) for wire in wires}
    variants["copy"] = copy_variant(ranks, workload, current, scratch)

    def rounds(variants: dict[str, Callable[[int], Times]], budget: Budget) -> dict[str, dict[str, list[float]]]:
        times = measure(variants, budget, prepare=current.prepare, decide=ranks.any)
        return maximum_over_ranks(ranks, times)

    whole = rounds(variants, replace(budget, secs=budget.secs * 2 / 3))
    rows = current.mean_rows()
    by_stage: dict[str, Callable[[int], Times]] = {wire: variant.by_stage for wire, variant in wire_variants.items()}
    stages = rounds(by_stage, Budget(0.0, budget.secs / 3, budget.repeats))
    for variant in wire_variants.values():
        variant.comm.close()
    return CaseTimes(whole, stages, rows)


def measure_checks(ranks: Ranks, workload: Workload, wire: str, budget: Budget) -> dict[str, dict[str, list[float]]]:
    """The same few tokens with `check_inputs` off and on, along new routes and, for dispatch, along cached ones."""
    config = replace(workload.config, num_tokens=NUM_CHECK_TOKENS, is_cached=True)
    small = replace(workload, config=config)
    current, scratch = Round(ranks, small), Scratch()
    variants = {
        name: WireVariant(ranks, small, wire, current, scratch, check_inputs=name == "on") for name in ("off", "on")
    }
    short = Budget(0.2, min(budget.secs, 2.0), budget.repeats)
    times = measure(variants, short, prepare=current.prepare, decide=ranks.any)
    for variant in variants.values():
        variant.comm.close()
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
