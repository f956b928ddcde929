"""Every conversion of the codec: elements and bytes per second, beside a memory copy of as many bytes.

    python -m benchmarks.codec                  # on the GPU, or else one core, arrays far larger than the caches
    python -m benchmarks.codec --device cpu
    python -m benchmarks.codec --small          # on one core, arrays that stay in the last-level cache
    python -m benchmarks.codec --isa scalar --only "BF16 -> MXFP4"

Every result is first compared: the CPU's with the oracle on some of its rows, the GPU's with all of the CPU's. Bytes
count once as they are read and once as they are written. On a GPU times are device times.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fp4comm.backends import cpu

from .codec_cases import Case, all_cases
from .common import (
    Budget,
    Times,
    environment,
    format_table,
    measure,
    number,
    positive,
    summary_record,
    write_json_lines,
)
from .device import add_device_option, choose_device

COLUMNS = ("conversion", "Gelem/s", "GB/s", "copy GB/s", "% of copy", "ms", "p95 ms")
LARGE, SMALL = (8192, 7168), (512, 1024)  # rows, hidden


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.codec", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add_device_option(parser)
    add("--rows", type=positive, help=f"default {LARGE[0]}, on a GPU 32768")
    add("--hidden", type=positive, help=f"a multiple of 32, default {LARGE[1]}")
    add("--small", action="store_true", help=f"{SMALL[0]} rows x {SMALL[1]}, on the CPU")
    add("--isa", choices=cpu.supported_isas(), help="kernels of the CPU to use, default the best of this machine")
    add("--check-rows", type=positive, help="of the problem that a GPU is checked on, default: the timed one")
    add("--only", default="", metavar="TEXT", help="only conversions whose name contains it")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="where to write all figures as JSON lines")
    Budget.add_options(parser, cpu=(0.1, 0.6), gpu=(0.05, 0.3), per=", per conversion")
    return parser


class Copy:
    """A memory copy that reads and writes as many bytes in all as asked."""

    def __init__(self, max_bytes: int) -> None:
        self.source = torch.ones(max_bytes // 2, dtype=torch.uint8)
        self.target = torch.ones(max_bytes // 2, dtype=torch.uint8)

    def run(self, num_bytes: int) -> None:
        self.target[: num_bytes // 2].copy_(self.source[: num_bytes // 2])


def measure_case(case: Case, copy: Copy, budget: Budget) -> dict[str, Any]:
    """The record of one conversion."""

    def convert(index: int) -> Times:
        start = time.perf_counter()
        case.run()
        return {"secs": time.perf_counter() - start}

    def copy_bytes(index: int) -> Times:
        start = time.perf_counter()
        copy.run(case.num_bytes)
        return {"secs": time.perf_counter() - start}

    times = measure({"convert": convert, "copy": copy_bytes}, budget)
    seconds, copy_seconds = (summary_record([sample["secs"] for sample in times[name]]) for name in ("convert", "copy"))
    return {
        "record": "conversion",
        "name": case.name,
        "elements": case.num_elements,
        "bytes": case.num_bytes,
        "seconds": seconds,
        "copy_seconds": copy_seconds,
        "gelems": case.num_elements / seconds["median"] / 1e9,
        "gbps": case.num_bytes / seconds["median"] / 1e9,
        "copy_gbps": case.num_bytes / copy_seconds["median"] / 1e9,
        "share_of_copy": copy_seconds["median"] / seconds["median"],
    }


def table_row(record: dict[str, Any]) -> list[str]:
    """A line of the table."""
    return [
        record["name"],
        number(record["gelems"]),
        number(record["gbps"]),
        number(record["copy_gbps"]),
        f"{100 * record['share_of_copy']:.0f}",
        number(1e3 * record["seconds"]["median"]),
        number(1e3 * record["seconds"]["p95"]),
    ]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks, measures and prints all conversions that were asked for; returns the records."""
    rows, hidden = SMALL if options.small else LARGE
    rows, hidden = options.rows or rows, options.hidden or hidden
    every_case = list(all_cases(rows, hidden, options.seed))
    cases = [case for case in every_case if options.only in case.name]
    if not cases:
        names = "; ".join(case.name for case in every_case)
        sys.exit(f"error: --only {options.only!r} names no conversion; accepted: a part of one of: {names}")
    record = environment("codec", rows=rows, hidden=hidden, cache="in cache" if options.small else "out of cache")
    print(
        f"fp4comm {record['fp4comm']} ({record['commit'] or 'no commit'}), {record['date']}: {record['command']}\n"
        f"{record['cpu']}, one core, kernels {record['isa']}, {rows} rows x {hidden}, {record['system']}\n"
    )
    for case in cases:
        if problem := case.problem():
            sys.exit(f"error: {case.name}: {problem}")
    copy = Copy(max((case.num_bytes for case in cases), default=0))
    records = [record, *(measure_case(case, copy, Budget.of(options)) for case in cases)]
    print(format_table(COLUMNS, [table_row(record) for record in records[1:]]))
    print("\nMedians. Bytes are counted once in and once out; the copy moves as many in the same run.")
    return records


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.hidden and options.hidden % 32:
        parser.error(f"argument --hidden: {options.hidden} is not a multiple of 32")
    if options.device == "auto" and (options.small or options.isa):
        options.device = "cpu"
    try:
        device = choose_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    if device.type == "cuda" and (options.small or options.isa):
        parser.error("--small and --isa go with --device cpu")
    torch.set_num_threads(1 if device.type == "cpu" else 8)  # 8 for comparisons
    if options.isa:
        cpu.set_isa(options.isa)
    problems: list[str] = []
    if device.type == "cuda":
        from . import cuda_codec

        with torch.no_grad():
            records, problems = cuda_codec.run(options, device)
    else:
        records = run(options)
    if options.json:
        write_json_lines(options.json, records)
    if problems:
        sys.exit("error: wrong on the GPU, not measured:\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
