"""Records and tables of the bandwidth benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .common import format_table, number, summary_record
from .timing import NUM_CHECK_TOKENS, PER_CHOICE, STAGES, CaseTimes
from .workload import Config

LEGS = ("dispatch", "combine")
HOW = ("graph", "alone", "host")  # further times of a call on a GPU
COLUMNS = (
    *("wire", "B/row", "MB sent", "ms", "p95", "pack", "wire", "unpack", "raw"),
    *("logical", "remote", "bf16-eq", "x bf16", "dB"),
)
GPU_COLUMNS = (
    *("wire", "MB sent", "us", "p95", "graph", "alone", "host", "pack", "wire", "unpack", "raw"),
    *("remote", "x bf16", "x choice", "dB"),
)
Record = dict[str, Any]


def case_records(config: Config, case: CaseTimes, sqnr: Mapping[str, Mapping[str, float | None]]) -> list[Record]:
    """One record per variant and leg, and one for the memory copy."""
    records = [
        leg_record(config, case, wire, leg, sqnr.get(wire, {}).get(leg)) for leg in LEGS for wire in (*sqnr, PER_CHOICE)
    ]
    copy = case.whole["copy"]["copy"]
    median = summary_record(copy)["median"]
    copied = 2 * case.rows.all * config.bf16_row_bytes  # read and written
    records.append(
        {"record": "copy", "config": asdict(config), "seconds": summary_record(copy), "gbps": gbps(copied, median)}
    )
    return records


def leg_record(config: Config, case: CaseTimes, wire: str, leg: str, sqnr_db: float | None) -> Record:
    """All figures of one wire format on one leg. Bytes, rows and GB/s are per rank."""
    rows, is_plain = case.rows, wire == PER_CHOICE
    row_bytes = config.bf16_row_bytes if is_plain else config.row_bytes(wire, leg)
    sent, remote = (rows.choices, rows.remote_choices) if is_plain else (rows.all, rows.remote)
    seconds = {name: summary_record(variant[leg]) for name, variant in case.whole.items() if leg in variant}
    median = seconds[wire]["median"]
    stages = {} if is_plain else {stage: case.stages[wire].get(f"{leg}.{stage}") for stage in STAGES}
    own = case.whole[wire]
    return {
        "record": "leg",
        "config": asdict(config),
        "wire": wire,
        "leg": leg,
        "row_bytes": row_bytes,
        "rows": sent,
        "remote_rows": remote,
        "sent_bytes": remote * row_bytes,
        "sent_bytes_per_token": remote * row_bytes / config.num_tokens,
        "seconds": seconds[wire],
        **{f"{how}_seconds": summary_record(own[f"{leg}.{how}"]) for how in HOW if f"{leg}.{how}" in own},
        "stage_seconds": {stage: summary_record(times) for stage, times in stages.items() if times},
        "raw_seconds": seconds.get(f"raw {wire}"),
        "logical_gbps": gbps(sent * row_bytes, median),
        "remote_gbps": gbps(remote * row_bytes, median),
        "bf16_equivalent_gbps": gbps(rows.all * config.bf16_row_bytes, median),
        "speedup_over_bf16": seconds["bf16"]["median"] / median if "bf16" in seconds else None,
        "speedup_over_per_choice": seconds[PER_CHOICE]["median"] / median,
        "sqnr_db": sqnr_db,
        "is_exact": not is_plain and sqnr_db is None,
    }


def gbps(num_bytes: float, seconds: float) -> float:
    """10**9 bytes per second."""
    return num_bytes / seconds / 1e9


def case_text(config: Config, records: Sequence[Record]) -> str:
    """The tables of one case."""
    mine = [record for record in records if record.get("config") == asdict(config)]
    legs = [record for record in mine if record["record"] == "leg"]
    first = legs[0]
    rows_per_token, remote_per_token = (first[key] / config.num_tokens for key in ("rows", "remote_rows"))
    title = (
        f"{config}\n{rows_per_token:.2f} rows per token, {remote_per_token:.2f} of them to other ranks; "
        f"{first['seconds']['num_samples']} rounds"
    )
    parts = [title]
    for leg in LEGS:
        is_on_gpu = "alone_seconds" in first
        table = [(gpu_leg_row if is_on_gpu else leg_row)(record) for record in legs if record["leg"] == leg]
        parts.append(f"{leg}\n{format_table(GPU_COLUMNS if is_on_gpu else COLUMNS, table)}")
    copies = [record for record in mine if record["record"] == "copy"]
    copy = copies[0]
    parts.append(
        f"memory copy on all ranks at once of the same rows in BF16: {number(1e3 * copy['seconds']['median'])} ms, "
        f"{number(copy['gbps'])} GB/s per rank, read + write"
    )
    return "\n\n".join(parts)


def leg_row(record: Record) -> list[str]:
    """A line of the table; times in ms."""

    def ms(summary: Mapping[str, float] | None, key: str = "median") -> str:
        return number(None if summary is None else 1e3 * summary[key])

    return [
        record["wire"],
        f"{record['row_bytes']:,}",
        number(record["sent_bytes"] / 1e6),
        ms(record["seconds"]),
        ms(record["seconds"], "p95"),
        *(ms(record["stage_seconds"].get(stage)) for stage in STAGES),
        ms(record["raw_seconds"]),
        number(record["logical_gbps"]),
        number(record["remote_gbps"]),
        number(record["bf16_equivalent_gbps"]),
        number(record["speedup_over_bf16"]),
        "exact" if record["is_exact"] else number(record["sqnr_db"]),
    ]


def gpu_leg_row(record: Record) -> list[str]:
    """The same for a GPU; times in us."""

    def us(summary: Mapping[str, float] | None, key: str = "median") -> str:
        return number(None if summary is None else 1e6 * summary[key])

    return [
        record["wire"],
        number(record["sent_bytes"] / 1e6),
        us(record["seconds"]),
        us(record["seconds"], "p95"),
        *(us(record.get(f"{how}_seconds")) for how in HOW),
        *(us(record["stage_seconds"].get(stage)) for stage in STAGES),
        us(record["raw_seconds"]),
        number(record["remote_gbps"]),
        number(record["speedup_over_bf16"]),
        number(record["speedup_over_per_choice"]),
        "exact" if record["is_exact"] else number(record["sqnr_db"]),
    ]


def checks_record(wire: str, times: Mapping[str, Mapping[str, Sequence[float]]]) -> Record:
    """What `check_inputs` costs."""
    return {
        "record": "check_inputs",
        "wire": wire,
        "num_tokens": NUM_CHECK_TOKENS,
        **{f"{state}_seconds": {leg: summary_record(times[state][leg]) for leg in LEGS} for state in ("off", "on")},
    }


def checks_text(record: Record) -> str:
    """The same as a sentence."""
    costs = [
        f"{leg} {number(1e6 * record['off_seconds'][leg]['median'])} -> "
        f"{number(1e6 * record['on_seconds'][leg]['median'])} us"
        for leg in LEGS
    ]
    return (
        f"check_inputs off -> on, {record['num_tokens']} tokens per rank, {record['wire']}, cached routes: "
        f"{', '.join(costs)}"
    )


def environment_text(run: Record) -> str:
    """Who measured what where."""
    return "\n".join(
        [
            f"fp4comm {run['fp4comm']} ({run['commit'] or 'no commit'}), {run['date']}: {run['command']}",
            f"{run['ranks']} ranks on {run['cores']} cores of {run['cpu']}, kernels {run['isa']}, {run['system']}",
            *([gpu_text(run)] if run["device"] == "cuda" else []),
            f"transport {run['transport']}{', ' + run['mpi'] if run['mpi'] else ''}; "
            f"Python {run['python']}, torch {run['torch']}, NumPy {run['numpy']}",
        ]
    )


def gpu_text(run: Record) -> str:
    """The GPUs and what drives them."""
    return (
        f"{run['gpu']} each, driver {run['driver']}, CUDA {run['cuda']}, CuPy {run['cupy']}, NCCL {run['nccl']}; "
        f"{run['calls']} calls in a row"
    )


def notes(run: Record) -> str:
    """What the columns mean and what the figures do not tell."""
    is_on_gpu = run["device"] == "cuda"
    lines = ["", *(GPU_NOTES if is_on_gpu else NOTES)]
    if run["ranks"] > 1 and not is_on_gpu:
        lines.append("NOTE: if the ranks share a machine's memory, the wire is a memory copy, not a network.")
    if run["ranks"] > run["cores"]:
        lines.append(f"NOTE: {run['ranks']} ranks share {run['cores']} cores, for conversions and for copies alike.")
    if run["ranks"] == 1:
        lines.append("NOTE: one rank: nothing is sent, the rows stay where they were packed.")
    return "\n".join(lines)


NOTES = (
    "ms, p95: median and 95th percentile over rounds of the slowest rank's time; every round has new routes.",
    "pack, wire, unpack: medians in rounds of their own, with a barrier before each stage.",
    "raw: the bare transport with messages of the same sizes. dB: signal to noise, against no rounding, of the",
    "received rows, and of the result of both legs with experts that only scale.",
    "GB/s per rank: logical = all rows, own too; remote = rows to other ranks; bf16-eq = all rows, were they BF16.",
    f"{PER_CHOICE}: a plain dispatcher, one BF16 row per expert choice instead of one per rank, same transport.",
)
GPU_NOTES = (
    "us, p95: device time of a call in a row of calls, median and 95th percentile over rounds of the slowest rank's.",
    "graph: of a call among as many in a CUDA graph, where the host has no part.",
    "alone: of a call on an idle device, with its launches from Python. host: until that call returns to Python.",
    "pack, wire, unpack: device time in rounds of their own; a wait for the other ranks counts as wire.",
    "raw: the bare transport with messages of the same sizes. dB: signal to noise, against no rounding, of the",
    "received rows, and of the result of both legs with experts that only scale. remote: GB/s to other ranks.",
    f"{PER_CHOICE}: a plain dispatcher, one BF16 row per expert choice instead of one per rank, same transport;",
    "with cached routes it knows its routes, too.",
)
