"""Puts the figures of `benchmarks/results/NAME.jsonl` into the documents, between the markers of a table called NAME.

    python -m benchmarks.tables            # rewrites README.md and docs/*.md
    python -m benchmarks.tables --check    # says which are out of date, exit code 1 if any is

A table is whatever lies between `<!-- table:NAME -->` and `<!-- /table -->`, each on a line of its own. NAME:2 takes
only the first two configurations of a run, NAME:3-5 the third to the fifth. At least three configurations in a row
that differ in nothing but the number of tokens share a table.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fp4comm.errors import counted

from . import legs, moe_overlap, moe_report
from .common import ROOT, number, read_json_lines
from .hosts import dispatcher_row
from .report import wire_name
from .workload import Config

RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(?m)^<!-- table:(?P<name>\S+) -->\n(?P<body>.*?)^<!-- /table -->$", re.DOTALL)
MANY_SIZES = 3
LEGS = ("dispatch", "combine")
Record = dict[str, Any]
Pair = tuple[Record, Record]  # of dispatch and combine


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """A markdown table, all columns but the first `num_left` aligned to the right."""
    lines = [header, [*["---"] * num_left, *["---:"] * (len(header) - num_left)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pairs_of(legs: Sequence[Record]) -> list[Pair]:
    """Both legs of each variant of one configuration."""
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in legs:
        found.setdefault((record["transport"], record["wire"], record.get("num_sms")), {})[record["leg"]] = record
    return [(pair["dispatch"], pair["combine"]) for pair in found.values()]


def variant_table(header: Sequence[str], pairs: Sequence[Pair], row: Callable[[Record, Record], list[str]]) -> str:
    """A line per variant, which tells its transport if there are several."""
    rows = [row(*pair) for pair in pairs]
    if len({dispatch["transport"] for dispatch, _ in pairs}) < 2:
        return markdown(header, rows)
    rows = [[dispatch["transport"], *cells] for (dispatch, _), cells in zip(pairs, rows, strict=True)]
    return markdown(["transport", *header], rows, 2)


def bandwidth_table(run: Record, records: Sequence[Record]) -> str:
    """Both legs by wire format, a table per configuration."""
    header = ["wire", "bytes sent per token", "dB", "dispatch ms", "speed-up", "combine ms", "speed-up", "BF16-eq GB/s"]
    legs = [record for record in records if record["record"] == "leg"]
    tables = []
    for config in unique(record["config"] for record in legs):
        pairs = pairs_of([record for record in legs if record["config"] == config])
        tables.append(f"{Config(**config)}:\n\n{variant_table(header, pairs, bandwidth_row)}")
    where = f"{counted(run['ranks'], 'rank')} on {run['cores']} cores of {run['cpu']}"
    end = provenance(run, f"{where}, transport {run['transport']}, {run['isa']}")
    return "\n".join(tables) + f"\n{end}\n"


def bandwidth_row(dispatch: Record, combine: Record) -> list[str]:
    """A wire format's line."""
    return [
        wire_name(dispatch),
        f"{dispatch['sent_bytes_per_token']:,.0f}",
        "exact" if dispatch["is_exact"] else number(dispatch["sqnr_db"]),
        number(1e3 * dispatch["seconds"]["median"]),
        number(dispatch["speedup_over_bf16"]),
        number(1e3 * combine["seconds"]["median"]),
        number(combine["speedup_over_bf16"]),
        number(dispatch["bf16_equivalent_gbps"]),
    ]


def gpu_bandwidth_table(run: Record, records: Sequence[Record]) -> str:
    """Both legs by transport and wire format, with their ratios to BF16 rows, one per rank and one per choice."""
    legs = [record for record in records if record["record"] == "leg"]
    parts = []
    for configs in by_size(unique(record["config"] for record in legs)):
        mine = [record for record in legs if record["config"] in configs]
        full = [record for record in mine if record.get("num_sms") is None]
        if len(configs) >= MANY_SIZES:
            parts.append(size_table(configs, full))
        else:
            wires = [record for record in full if "/" not in record["wire"]]
            parts += [case_table(configs[0], full, records)] if wires else []
        limited = pairs_of([record for record in mine if record.get("num_sms") is not None])
        parts += [sms_table(configs[0], limited)] if limited else []
    where = f"{counted(run['ranks'], 'rank')}, {run['gpu']} each, transport {run['transport']}"
    others = "; x nccl: as the same wire over NCCL" if len({record["transport"] for record in legs}) > 1 else ""
    bf16 = "BF16 rows over the same transport" if others else "BF16 rows"
    legend = (
        f"Device time of a call among {run['calls']} in a row, among as many in a CUDA graph, and of one alone with "
        "its launches from Python.\n"
        f"x bf16, x choice: how many times as fast as {bf16}, one per rank (bf16) and one per choice "
        f"(bf16/choice){others}.\n"
    )
    return "\n".join(parts) + f"\n{legend}\n{gpu_provenance(run, where)}\n"


def by_size(configs: Sequence[Record]) -> list[list[Record]]:
    """Neighbours that differ in nothing but the number of tokens together if they are many, and others alone."""
    groups: list[list[Record]] = []
    for _, alike in groupby(configs, lambda config: {**config, "num_tokens": 0}):
        group = list(alike)
        groups += [group] if len(group) >= MANY_SIZES else [[config] for config in group]
    return groups


def case_table(config: Record, legs: Sequence[Record], records: Sequence[Record]) -> str:
    """All figures of one configuration."""
    pairs = pairs_of(legs)
    compared = len({record["transport"] for record in legs}) > 1
    leg_header = ["us", "graph us", "alone us", "x bf16", *(["x nccl"] if compared else []), "x choice"]
    header = ["wire", "MB sent", "dB", *(f"{leg} {column}" for leg in LEGS for column in leg_header)]
    copy = next(record for record in records if record["record"] == "copy" and record["config"] == config)
    table = variant_table(header, pairs, lambda dispatch, combine: gpu_bandwidth_row(dispatch, combine, compared))
    routes = [
        f"{dispatch['transport']} {dispatch['wire']} {us(dispatch['routing_seconds'])}"
        for dispatch, _ in pairs
        if "routing_seconds" in dispatch
    ]
    added = f"What new routes add to a dispatch, in us: {', '.join(routes)}.\n" if routes else ""
    return (
        f"{Config(**config)}:\n\n{table}\n"
        f"{added}A device copy of the BF16 rows, one per rank: {us(copy['seconds'])} us.\n"
    )


def us(time: Record | None) -> str:
    """The median in microseconds."""
    return number(None if time is None else 1e6 * time["median"])


def gpu_bandwidth_row(dispatch: Record, combine: Record, compared: bool) -> list[str]:
    """A variant's line: device times of calls in a row, and of one call on an idle device."""
    cells = [
        dispatch["wire"],
        number(dispatch["sent_bytes"] / 1e6),
        "exact" if dispatch["is_exact"] else number(dispatch["sqnr_db"]),
    ]
    for leg in (dispatch, combine):
        cells += [us(leg.get(key)) for key in ("seconds", "graph_seconds", "alone_seconds")]
        cells.append(number(leg["speedup_over_bf16"]))
        cells += [number(leg["speedup_over_nccl"])] if compared else []
        cells.append(number(leg["speedup_over_per_choice"]))
    return cells


def size_table(configs: Sequence[Record], legs: Sequence[Record]) -> str:
    """Times of several sizes."""
    has_routes = any("routing_seconds" in record for record in legs)
    columns = [f"{leg}{how} us" for leg in LEGS for how in ("", " graph", " alone")]
    header = ["tokens", "transport", "wire", *columns, *(["new routes us"] if has_routes else [])]
    rows = []
    for config in configs:
        for dispatch, combine in pairs_of([record for record in legs if record["config"] == config]):
            times = [us(leg.get(f"{how}seconds")) for leg in (dispatch, combine) for how in ("", "graph_", "alone_")]
            added = [us(dispatch.get("routing_seconds"))] if has_routes else []
            rows.append([f"{config['num_tokens']:,}", dispatch["transport"], dispatch["wire"], *times, *added])
    sizes = ", ".join(f"{config['num_tokens']:,}" for config in configs)
    title = str(Config(**configs[0])).replace(str(configs[0]["num_tokens"]), sizes, 1)
    return f"{title}:\n\n{markdown(header, rows, 3)}"


def sms_table(config: Record, pairs: Sequence[Pair]) -> str:
    """By the number of multiprocessors."""
    header = ["multiprocessors", *(f"{leg} {column}" for leg in LEGS for column in ("us", "graph us", "GB/s sent"))]
    rows = [
        [
            str(pair[0]["num_sms"]),
            *(text for leg in pair for text in (us(leg["seconds"]), us(leg.get("graph_seconds")), remote(leg))),
        ]
        for pair in pairs
    ]
    first = pairs[0][0]
    return f"{Config(**config)}, {first['wire']} over {first['transport']}:\n\n{markdown(header, rows)}"


def remote(leg: Record) -> str:
    """GB/s of rows to other ranks."""
    return number(leg["remote_gbps"])


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


def hosts_table(run: Record, records: Sequence[Record]) -> str:
    """A host's dispatcher and fp4comm's, in one layer."""
    header = ["dispatcher", "MB sent", "of stock", "dB", "forward ms", "x stock", "with backward ms", "x stock"]
    experts = f"experts of width {run['width']}" if run["width"] else "experts that return their rows"
    table = markdown(header, [dispatcher_row(record) for record in records])
    where = f"{run['host']} {run['version']}, {counted(run['ranks'], 'rank')}"
    end = gpu_provenance(run, f"{where}, {run['gpu']} each") if run["device"] == "cuda" else provenance(run, where)
    return f"{run['config']}, {experts}, {run['dtype']}:\n\n{table}\n{end}\n"


def moe_table(run: Record, records: Sequence[Record]) -> str:
    """Experts by recipe, and where the time of a step goes; for each shape."""
    parts = []
    for title, experts in moe_report.by_shape(records):
        parts.append(f"{title}:\n\n{markdown(*moe_report.times_table(experts))}")
        parts.append(f"{moe_report.KERNELS}:\n\n{markdown(*moe_report.parts_table(experts))}")
    where = f"{counted(run['ranks'], 'rank')}, {run['gpu']} each"
    return "\n".join(parts) + f"\n{gpu_provenance(run, where)}\n"


def overlap_table(run: Record, records: Sequence[Record]) -> str:
    """Layers with shared experts, for each shape."""
    layers = [list(group) for _, group in groupby(records, lambda record: str(record["shape"]))]
    parts = [f"{moe_overlap.title(each[0])}; ms:\n\n{markdown(*moe_overlap.table(each), 2)}" for each in layers]
    where = f"{counted(run['ranks'], 'rank')}, {run['gpu']} each"
    return "\n".join(parts) + f"\n{gpu_provenance(run, where)}\n"


def legs_table(run: Record, records: Sequence[Record]) -> str:
    """All four legs, for each configuration."""
    configs = [(Config(**config), list(group)) for config, group in groupby(records, lambda record: record["config"])]
    parts = [f"{config}; us:\n\n{markdown(*legs.table(group), 2)}" for config, group in configs]
    where = f"{counted(run['ranks'], 'rank')}, {run['gpu']} each"
    return "\n".join(parts) + f"\n{gpu_provenance(run, where)}\n"


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
    ("hosts", "cpu"): hosts_table,
    ("hosts", "cuda"): hosts_table,
    ("moe_layer", "cuda"): moe_table,
    ("moe_overlap", "cuda"): overlap_table,
    ("legs", "cuda"): legs_table,
    ("codec", "cuda"): gpu_codec_table,
}


def make_table(name: str, results: Path) -> str:
    """The markdown of table `name`.

    Raises:
        ValueError: there are no such results.
    """
    name, _, chosen = name.partition(":")
    path = results / f"{name}.jsonl"
    if not path.exists():
        raise ValueError(f"table {name!r}: there is no {path.name} in {results.name}/")
    run, *records = read_json_lines(path)
    for record in records:
        if record["record"] == "leg":
            record.setdefault("transport", run["transport"])  # older ones have a single transport
    if chosen:
        first, _, last = chosen.rpartition("-")
        configs = unique(record["config"] for record in records if "config" in record)
        configs = configs[int(first or 1) - 1 : int(last)]
        records = [record for record in records if record.get("config") in configs]
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
