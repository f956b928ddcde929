"""Puts the figures of `benchmarks/results/NAME.jsonl` into the documents, between the markers of a table called NAME.

    python -m benchmarks.tables            # rewrites README.md and docs/*.md
    python -m benchmarks.tables --check    # says which are out of date, exit code 1 if any is

A table is whatever lies between `<!-- table:NAME -->` and `<!-- /table -->`, each on a line of its own. NAME:2 takes
only the first two configurations of a run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .common import ROOT, number, read_json_lines
from .workload import Config

RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(?m)^<!-- table:(?P<name>\S+) -->\n(?P<body>.*?)^<!-- /table -->$", re.DOTALL)
Record = dict[str, Any]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, all columns but the first aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def bandwidth_table(run: Record, records: Sequence[Record]) -> str:
    """Both legs by wire format, a table per configuration."""
    header = ["wire", "bytes sent per token", "dB", "dispatch ms", "speed-up", "combine ms", "speed-up", "BF16-eq GB/s"]
    legs = [record for record in records if record["record"] == "leg"]
    tables = []
    for config in unique(record["config"] for record in legs):
        of_config = {(record["wire"], record["leg"]): record for record in legs if record["config"] == config}
        wires = unique(wire for wire, _ in of_config)
        rows = [bandwidth_row(of_config[wire, "dispatch"], of_config[wire, "combine"]) for wire in wires]
        tables.append(f"{Config(**config)}:\n\n{markdown(header, rows)}")
    where = f"{run['ranks']} ranks on {run['cores']} cores of {run['cpu']}, transport {run['transport']}, {run['isa']}"
    return "\n".join(tables) + f"\n{provenance(run, where)}\n"


def bandwidth_row(dispatch: Record, combine: Record) -> list[str]:
    """A wire format's line."""
    return [
        dispatch["wire"],
        f"{dispatch['sent_bytes_per_token']:,.0f}",
        "exact" if dispatch["is_exact"] else number(dispatch["sqnr_db"]),
        number(1e3 * dispatch["seconds"]["median"]),
        number(dispatch["speedup_over_bf16"]),
        number(1e3 * combine["seconds"]["median"]),
        number(combine["speedup_over_bf16"]),
        number(dispatch["bf16_equivalent_gbps"]),
    ]


def gpu_bandwidth_table(run: Record, records: Sequence[Record]) -> str:
    """Both legs by wire format, with their ratios to BF16 rows, one per rank and one per choice of an expert."""
    leg_header = ["us", "graph us", "alone us", "x bf16", "x choice"]
    header = ["wire", "MB sent", "dB", *(f"{leg} {column}" for leg in ("dispatch", "combine") for column in leg_header)]
    legs = [record for record in records if record["record"] == "leg"]
    tables = []
    for config in unique(record["config"] for record in legs):
        of_config = {(record["wire"], record["leg"]): record for record in legs if record["config"] == config}
        rows = [
            gpu_bandwidth_row(of_config[wire, "dispatch"], of_config[wire, "combine"])
            for wire in unique(wire for wire, _ in of_config)
        ]
        copy = next(record for record in records if record["record"] == "copy" and record["config"] == config)
        tables.append(
            f"{Config(**config)}:\n\n{markdown(header, rows)}\n"
            f"A device copy of the BF16 rows, one per rank: {number(1e6 * copy['seconds']['median'])} us.\n"
        )
    where = f"{run['ranks']} ranks, {run['gpu']} each, transport {run['transport']}"
    legend = (
        f"Device time of a call among {run['calls']} in a row, among as many in a CUDA graph, and of one alone with "
        "its launches from Python.\n"
        "x bf16, x choice: how many times as fast as BF16 rows, one per rank (bf16) and one per choice (bf16/choice).\n"
    )
    return "\n".join(tables) + f"\n{legend}\n{gpu_provenance(run, where)}\n"


def gpu_bandwidth_row(dispatch: Record, combine: Record) -> list[str]:
    """A wire format's line: device times of calls in a row, and of one call on an idle device."""
    cells = [
        dispatch["wire"],
        number(dispatch["sent_bytes"] / 1e6),
        "exact" if dispatch["is_exact"] else number(dispatch["sqnr_db"]),
    ]
    for leg in (dispatch, combine):
        times = (leg.get(key) for key in ("seconds", "graph_seconds", "alone_seconds"))
        cells += [number(None if time is None else 1e6 * time["median"]) for time in times]
        cells += [number(leg["speedup_over_bf16"]), number(leg["speedup_over_per_choice"])]
    return cells


def gpu_codec_table(run: Record, records: Sequence[Record]) -> str:
    """Device time of every conversion, and its share of a device copy of as many bytes."""
    rows = [
        [
            record["name"],
            number(1e6 * record["seconds"]["median"]),
            "-" if record["is_latency"] else number(record["gbps"] / 1e3),
            "-" if record["is_latency"] else f"{100 * record['share_of_copy']:.0f} %",
        ]
        for record in records
        if record["record"] == "conversion"
    ]
    where = f"{run['gpu']}, {run['rows']} rows of {run['hidden']}"
    table = markdown(["conversion", "us", "TB/s", "of a device copy"], rows)
    return f"{table}\n{gpu_provenance(run, where)}\n"


def gpu_provenance(run: Record, where: str) -> str:
    """`provenance` with what else is at work on a GPU."""
    versions = f"driver {run['driver']}, CUDA {run['cuda']}, CuPy {run['cupy']}, NCCL {run['nccl']}"
    return provenance(run, f"{where}, {versions}")


def codec_table(run: Record, records: Sequence[Record]) -> str:
    """Speed of every conversion."""
    rows = [
        [
            record["name"],
            number(record["gelems"]),
            number(record["gbps"]),
            f"{100 * record['share_of_copy']:.0f} %",
        ]
        for record in records
        if record["record"] == "conversion"
    ]
    table = markdown(["conversion", "Gelem/s", "GB/s", "of a memory copy"], rows)
    where = f"One core of {run['cpu']}, {run['isa']}, {run['rows']} rows of {run['hidden']}, {run['cache']}"
    return f"{table}\n{provenance(run, where)}\n"


def provenance(run: Record, where: str) -> str:
    """Where, when and how the figures came about."""
    return f"{where}; {run['date']}, fp4comm {run['fp4comm']}, torch {run['torch']}. Command: `{run['command']}`"


TABLES: dict[tuple[str, str], Callable[[Record, Sequence[Record]], str]] = {
    ("bandwidth", "cpu"): bandwidth_table,
    ("bandwidth", "cuda"): gpu_bandwidth_table,
    ("codec", "cpu"): codec_table,
    ("codec", "cuda"): gpu_codec_table,
}


def make_table(name: str, results: Path) -> str:
    """The markdown of table `name`.

    Raises:
        ValueError: there are no such results.
    """
    name, _, count = name.partition(":")
    path = results / f"{name}.jsonl"
    if not path.exists():
        raise ValueError(f"table {name!r}: there is no {path.name} in {results.name}/")
    run, *records = read_json_lines(path)
    if count:
        chosen = unique(record["config"] for record in records if "config" in record)[: int(count)]
        records = [record for record in records if record.get("config") in chosen]
    return TABLES[run["benchmark"], run.get("device", "cpu")](run, records)


def with_tables(text: str, results: Path) -> str:
    """`text` with all its tables made anew."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- table:{match['name']} -->\n\n{make_table(match['name'], results)}\n<!-- /table -->"

    return TABLE.sub(replace, text)


def unique(values: Any) -> list[Any]:
    """The different values in the order of their first occurrence."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.tables", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    state, outdated = "out of date" if options.check else "rewritten", []
    for path in [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]:
        text = path.read_text()
        try:
            new_text = with_tables(text, RESULTS)
        except ValueError as error:
            sys.exit(f"error: {path.name}: {error}")
        if new_text != text:
            outdated.append(path)
            if not options.check:
                path.write_text(new_text)
    print("\n".join(f"{path.name}: {state}" for path in outdated) or "up to date")
    sys.exit(1 if outdated and options.check else 0)


if __name__ == "__main__":
    main()
