"""Dispatch and combine with each wire format: time, bytes, bandwidth and accuracy on this machine's ranks.

    mpirun -n 4 python -m benchmarks.bandwidth --tokens 1024 --wires bf16,fp8,mxfp4
    torchrun --nproc-per-node 4 -m benchmarks.bandwidth
    python -m benchmarks.bandwidth                                # one rank, no communication
    mpirun -n 2 python -m benchmarks.bandwidth --standard --latency                  # one case after the other
    mpirun -n 2 python -m benchmarks.bandwidth --standard --sms 8,16,32              # on GPUs: few multiprocessors

Every format over every transport first passes a correctness gate. Then all that do, the plain dispatcher, the raw
transport and a memory copy are timed in turn in the same rounds, each round with new routes. A time is the maximum
over the ranks.
Where every rank has a GPU, all of that happens there, and times are device times.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from fp4comm import InvalidArgument
from fp4comm.errors import counted
from fp4comm.transport.mpi import load_mpi

from . import report
from .common import Budget, environment, list_of, non_negative, positive, write_json_lines
from .device import add_device_option, gpu_facts, require_gpus
from .gate import Gate
from .ranks import EXIT_USAGE, TRANSPORTS, Ranks, abort
from .timing import measure_case, measure_checks
from .workload import WIRE_BITS, Config, Trace, Variant, Workload

EXIT_WRONG = 1
NUM_TOKENS = {"cpu": 512, "cuda": 8192}  # per rank
STANDARD: tuple[dict[str, Any], ...] = (
    {"layout": "rank", "input": "fp8", "cached": True},
    {"layout": "rank", "input": "bf16", "cached": True},
    {"layout": "expert", "input": "fp8", "cached": True},
    {"layout": "expert", "input": "bf16", "cached": True},
    {"layout": "rank", "input": "fp8"},
    {"layout": "expert", "input": "bf16"},
    {"layout": "rank", "input": "bf16", "capacity": True},
    {"layout": "rank", "input": "fp8", "capacity": True},
)
HALF_SIZE = STANDARD[0]  # is also measured with half as many tokens
LATENCY_TOKENS = (1, 8, 32, 128, 512)
LATENCY: tuple[dict[str, Any], ...] = (
    {"layout": "rank", "input": "bf16", "cached": True},
    {"layout": "rank", "input": "bf16", "capacity": True},
)
LATENCY_WIRES = ("bf16", "mxfp4")
SMS = STANDARD[0]
SMS_WIRE = "mxfp4"


@dataclass(frozen=True)
class Case:
    """Some tokens with routes, and what moves them."""

    workload: Workload
    variants: list[Variant]


class Parser(argparse.ArgumentParser):
    """Says what is wrong once, on rank 0, and ends all ranks: they all get the same options."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__("benchmarks.bandwidth", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
        self.ranks = ranks

    def error(self, message: str) -> NoReturn:
        self.ranks.leave(f"{message}\n{self.format_usage()}", EXIT_USAGE)

    def print_help(self, file: Any = None) -> None:
        self.ranks.say(self.format_help())


def make_parser(ranks: Ranks) -> Parser:
    parser = Parser(ranks)
    add = parser.add_argument
    add_device_option(parser)
    add("--standard", action="store_true", help="cached and new routes, both layouts, FP8 and BF16, one case each")
    add("--latency", action="store_true", help=f"{', '.join(map(str, LATENCY_TOKENS))} tokens per rank, BF16")
    add(
        "--sms", type=list_of(positive), help="multiprocessors, several with commas, for MXFP4 over peer if it is there"
    )
    default = f"default {NUM_TOKENS['cpu']}, on GPUs {NUM_TOKENS['cuda']}"
    add("--tokens", type=list_of(positive), help=f"per rank; several sizes with commas, {default}")
    add("--hidden", type=positive, help="default 7168")
    add("--topk", type=positive, help="experts per token, default 8")
    add("--experts", type=positive, help="default 256")
    add("--wires", type=list_of(str, list(WIRE_BITS)), default=["bf16", "fp8", "mxfp4"], help="also fp32")
    add("--transports", type=list_of(str, TRANSPORTS), help="default: all that carry rows between these ranks")
    add("--layout", choices=("rank", "expert"), default="expert", help="of the received rows, default %(default)s")
    add("--input", choices=("bf16", "fp8", "fp32"), default="bf16", help="format of the tokens, default %(default)s")
    add("--out", choices=("bf16", "fp8", "fp32"), help="format of the received rows, default that of the input")
    add("--skew", type=non_negative, default=0.0, help="exponent of Zipf's law of the experts' popularity, default 0")
    add("--trace", type=Path, metavar="FILE", help="npz file with real tokens and routes to replay")
    add("--cached", action="store_true", help="dispatch along routes that a handle knows already")
    add("--capacity", action="store_true", help="with num_max_tokens_per_rank: on GPUs the host never waits")
    add("--calls", type=positive, default=10, help="in a row, for a time on GPUs, default %(default)s")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="where to write all figures as JSON lines")
    Budget.add_options(parser, cpu=(3.0, 15.0), gpu=(0.3, 7.0), per=" per case")
    return parser


def make_workload(options: argparse.Namespace, num_ranks: int, num_tokens: int) -> Workload:
    """The case that the options ask for.

    Raises:
        ValueError: options that exclude each other, or a trace that can't be used.
    """
    trace = Trace.load(options.trace) if options.trace else None
    sizes = {"hidden": 7168, "topk": 8, "experts": 256}
    if trace is not None:
        sizes = dict(zip(sizes, (trace.x.shape[1], trace.topk_idx.shape[1], trace.num_experts), strict=True))
        given = [f"--{name}" for name in sizes if getattr(options, name) is not None] + ["--skew"] * bool(options.skew)
        if given:
            raise ValueError(f"{', '.join(given)} with --trace: the trace has its own")
    sizes = {name: getattr(options, name) or size for name, size in sizes.items()}
    if sizes["experts"] % num_ranks or sizes["topk"] > sizes["experts"]:
        raise ValueError(
            f"{sizes['experts']} experts, --topk {sizes['topk']} on {counted(num_ranks, 'rank')}; "
            "accepted: experts a multiple of the number of ranks, and at least as many as --topk"
        )
    config = Config(
        num_ranks,
        num_tokens,
        sizes["hidden"],
        sizes["topk"],
        sizes["experts"],
        options.layout,
        options.input,
        options.out or options.input,
        options.skew,
        options.cached,
        options.trace.name if options.trace else "",
        options.seed,
        options.capacity,
    )
    return Workload(config, trace)


def make_cases(ranks: Ranks, options: argparse.Namespace) -> list[Case]:
    """All that the options ask for, each configuration once; the same on all ranks.

    Raises:
        ValueError: as `make_workload`.
    """
    suites = [f"--{name}" for name in ("standard", "latency", "sms") if getattr(options, name)]
    if suites and (options.cached or options.capacity or options.trace):
        raise ValueError(f"{suites[0]} with --cached, --capacity or --trace: the cases have their own")
    cases: dict[Config, Case] = {}

    def add(changes: dict[str, Any], num_tokens: int, variants: list[Variant]) -> None:
        changed = argparse.Namespace(**{**vars(options), **changes})
        workload = make_workload(changed, ranks.num_ranks, num_tokens)
        case = cases.setdefault(workload.config, Case(workload, []))
        case.variants.extend(variant for variant in variants if variant not in case.variants)

    def over_all(wires: Sequence[str]) -> list[Variant]:
        return [Variant(transport, wire) for transport in ranks.transports for wire in wires]

    for num_tokens in options.tokens or [NUM_TOKENS[ranks.device.type]]:
        for case in STANDARD if options.standard else () if suites else ({},):
            add(case, num_tokens, over_all(options.wires))
        if options.sms:
            transport = "peer" if "peer" in ranks.transports else next(iter(ranks.transports))
            add(SMS, num_tokens, [Variant(transport, SMS_WIRE, num_sms) for num_sms in options.sms])
        if options.standard:
            add(HALF_SIZE, max(1, num_tokens // 2), over_all(options.wires))
    for case in LATENCY if options.latency else ():
        for num_tokens in LATENCY_TOKENS:
            add(case, num_tokens, over_all(LATENCY_WIRES))
    return list(cases.values())


def run(ranks: Ranks, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures and prints every case; returns the records."""
    cases, problem = [], None
    try:
        cases = make_cases(ranks, options)
        require_gpus("--sms", options.sms, ranks.device)
    except ValueError as error:
        problem = str(error)
    ranks.require_none(problem, EXIT_USAGE)
    records = [environment("bandwidth", ranks.launcher, ranks=ranks.num_ranks, transport=", ".join(ranks.transports))]
    records[0] |= {"mpi": mpi_library() if ranks.control.name == "mpi" else "", **gpu_facts(ranks.device)}
    if records[0]["device"] == "cuda":
        records[0] |= {"calls": options.calls, "control": ranks.control.name}
    ranks.say(report.environment_text(records[0]))
    budget = Budget.of(options, ranks.device.type, len(cases))
    share = Budget(budget.warmup_secs / len(cases), budget.secs / len(cases), budget.repeats)
    for case in cases:
        records += measure_and_print(ranks, case, options, share)
        save(options, ranks, records)
    for transport in ranks.transports:
        variant = Variant(transport, options.wires[-1])
        checks = measure_checks(ranks, cases[0].workload, variant, budget, options.calls)
        records.append(report.checks_record(variant, checks))
        ranks.say("\n" + report.checks_text(records[-1]))
    ranks.say(report.notes(records[0]))
    return records


def measure_and_print(ranks: Ranks, case: Case, options: argparse.Namespace, budget: Budget) -> list[dict[str, Any]]:
    """The records of one case: of the variants that pass the gate, and of the failures of the others."""
    config = case.workload.config
    gate, sqnr, problems = Gate(ranks, case.workload), {}, []
    for variant in case.variants:
        problem, ratios = gate.check(variant)
        found = ranks.problems(problem)
        problems += found
        if not found:
            sqnr[variant] = ratios
    baseline = ranks.problems(gate.check_per_choice())
    failures = [{"record": "failure", "config": asdict(config), "problem": text} for text in problems + baseline]
    for failure in failures:
        ranks.say(f"error: {failure['problem']}: not measured, {config}")
    if baseline or not sqnr:
        return failures
    times = measure_case(ranks, case.workload, list(sqnr), budget, options.calls)
    records = report.case_records(config, times, sqnr, ranks.transport.name)
    ranks.say("\n" + report.case_text(config, records))
    return [*records, *failures]


def save(options: argparse.Namespace, ranks: Ranks, records: Sequence[dict[str, Any]]) -> None:
    """Writes what there is so far: a later case may end the process."""
    if options.json and ranks.rank == 0:
        write_json_lines(options.json, records)


def mpi_library() -> str:
    """Name and version of the MPI library."""

    return str(load_mpi().Get_library_version()).splitlines()[0].split(",")[0].rstrip("\0")


def main() -> None:
    ranks = Ranks()
    torch.set_num_threads(1)  # as the kernels; ranks that share cores would wait for each other's threads
    try:
        with torch.no_grad():
            options = make_parser(ranks).parse_args()
            ranks.use_device(options.device, options.transports)
            if ranks.device.type == "cuda":
                torch.set_num_threads(8)  # for what the CPU does beside the GPUs
            records = run(ranks, options)
        save(options, ranks, records)
        if any(record["record"] == "failure" for record in records):
            ranks.leave("wrong results, see above", EXIT_WRONG)
        ranks.close()
    except InvalidArgument as error:  # all ranks raise it together
        ranks.leave(str(error), EXIT_USAGE)
    except Exception:  # the other ranks don't know of it and would wait
        traceback.print_exc()
        abort(ranks.group)


if __name__ == "__main__":
    main()
