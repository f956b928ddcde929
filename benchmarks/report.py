"""Records and tables of the bandwidth benchmark."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fp4comm.errors import counted

from .common import format_table, number, summary_record
from .timing import KNOWN, NUM_CHECK_TOKENS, PER_CHOICE, STAGES, CaseTimes
from .workload import Config, Variant

LEGS = ("dispatch", "combine")
HOW = ("graph", "alone", "host")  # further times of a call on a GPU
COLUMNS = (
    *("wire", "B/row", "MB sent", "ms", "p95", "pack", "wire", "unpack", "raw"),
    *("logical", "remote", "bf16-eq", "x bf16", "dB"),
)
GPU_COLUMNS = (
    *("wire", "MB", "us", "graph", "alone", "pack", "wire", "unpack", "raw"),
    *("remote", "x bf16", "x choice", "dB"),
)
Record = dict[str, Any]


def case_records(
    config: Config, case: CaseTimes, sqnr: Mapping[Variant, Mapping[str, float | None]], baseline: str
) -> list[Record]:
    """One record per variant and leg, and one for the memory copy. `baseline` is the plain dispatcher's transport."""
    variants = (*sqnr, Variant(baseline, PER_CHOICE))
    records = [
        leg_record(config, case, variant, leg, sqnr.get(variant, {}).get(leg)) for leg in LEGS for variant in variants
    ]
    copy = case.whole["copy"]["copy"]
    median = summary_record(copy)["median"]
    copied = 2 * case.rows.all * config.bf16_row_bytes  # read and written
    records.append(
        {"record": "copy", "config": asdict(config), "seconds": summary_record(copy), "gbps": gbps(copied, median)}
    )
    return records


def leg_record(config: Config, case: CaseTimes, variant: Variant, leg: str, sqnr_db: float | None) -> Record:
    """All figures of one variant on one leg. Bytes, rows and GB/s are per rank."""
    rows, wire, is_plain = case.rows, variant.wire, variant.wire == PER_CHOICE
    name = wire if is_plain else str(variant)
    row_bytes = config.bf16_row_bytes if is_plain else config.row_bytes(wire, leg)
    sent, remote = (rows.choices, rows.remote_choices) if is_plain else (rows.all, rows.remote)
    seconds = {other: summary_record(times[leg]) for other, times in case.whole.items() if leg in times}
    median = seconds[name]["median"]
    stages = {} if is_plain else {stage: case.stages[name].get(f"{leg}.{stage}") for stage in STAGES}
    own = case.whole[name]

    def speedup_over(other: Variant | str) -> float | None:
        return seconds[str(other)]["median"] / median if str(other) in seconds else None

    return {
        "record": "leg",
        "config": asdict(config),
        "transport": variant.transport,
        "wire": wire,
        "num_sms": variant.num_sms,
        "leg": leg,
        "row_bytes": row_bytes,
        "rows": sent,
        "remote_rows": remote,
        "sent_bytes": remote * row_bytes,
        "sent_bytes_per_token": remote * row_bytes / config.num_tokens,
        "seconds": seconds[name],
        **{f"{how}_seconds": summary_record(own[f"{leg}.{how}"]) for how in HOW if f"{leg}.{how}" in own},
        **({"routing_seconds": routing_seconds(own)} if leg == "dispatch" and KNOWN in own else {}),
        "stage_seconds": {stage: summary_record(times) for stage, times in stages.items() if times},
        "raw_seconds": seconds.get(f"raw {wire}"),
        "logical_gbps": gbps(sent * row_bytes, median),
        "remote_gbps": gbps(remote * row_bytes, median),
        "bf16_equivalent_gbps": gbps(rows.all * config.bf16_row_bytes, median),
        "speedup_over_bf16": speedup_over(Variant(variant.transport, "bf16")),
        "speedup_over_nccl": speedup_over(Variant("nccl", wire)),
        "speedup_over_per_choice": speedup_over(PER_CHOICE),
        "sqnr_db": sqnr_db,
        "is_exact": not is_plain and sqnr_db is None,
    }


def routing_seconds(times: Mapping[str, Sequence[float]]) -> dict[str, float | int]:
    """What routes add to a dispatch, which otherwise knows them: device time in a graph where there is that."""
    suffix = ".graph" if f"{KNOWN}.graph" in times else ""
    pairs = zip(times[f"dispatch{suffix}"], times[f"{KNOWN}{suffix}"], strict=True)
    return summary_record([new - known for new, known in pairs])


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
    is_on_gpu, named = "alone_seconds" in first, len({record["transport"] for record in legs}) > 1
    header = tuple(GPU_COLUMNS if is_on_gpu else COLUMNS)
    for leg in LEGS:
        of_leg = [record for record in legs if record["leg"] == leg]
        table = [(gpu_leg_row if is_on_gpu else leg_row)(record) for record in of_leg]
        columns = header
        if named:
            columns = ("over", *header, "x nccl")
            table = [
                [record["transport"], *row, number(record["speedup_over_nccl"])]
                for record, row in zip(of_leg, table, strict=True)
            ]
        parts.append(f"{leg}\n{format_table(columns, table, 2 if named else 1)}")
    parts += [routing_text(legs)] if any("routing_seconds" in record for record in legs) else []
    copies = [record for record in mine if record["record"] == "copy"]
    copy = copies[0]
    parts.append(
        f"memory copy on all ranks at once of the same rows in BF16: {number(1e3 * copy['seconds']['median'])} ms, "
        f"{number(copy['gbps'])} GB/s per rank, read + write"
    )
    return "\n\n".join(parts)


def wire_name(record: Record) -> str:
    """The wire format, and what it may take of the device."""
    num_sms = record.get("num_sms")
    return f"{record['wire']}{'' if num_sms is None else f' {num_sms} SMs'}"


def routing_text(legs: Sequence[Record]) -> str:
    """What new routes cost."""
    costs = [
        f"{record['transport']} {wire_name(record)} {number(1e6 * record['routing_seconds']['median'])} us"
        for record in legs
        if "routing_seconds" in record
    ]
    return textwrap.fill(f"new routes add to a dispatch: {', '.join(costs)}", 120)


def leg_row(record: Record) -> list[str]:
    """A line of the table; times in ms."""

    def ms(summary: Mapping[str, float] | None, key: str = "median") -> str:
        return number(None if summary is None else 1e3 * summary[key])

    return [
        wire_name(record),
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

    def us(summary: Mapping[str, float] | None) -> str:
        return number(None if summary is None else 1e6 * summary["median"])

    return [
        wire_name(record),
        number(record["sent_bytes"] / 1e6),
        us(record["seconds"]),
        *(us(record.get(f"{how}_seconds")) for how in ("graph", "alone")),
        *(us(record["stage_seconds"].get(stage)) for stage in STAGES),
        us(record["raw_seconds"]),
        number(record["remote_gbps"]),
        number(record["speedup_over_bf16"]),
        number(record["speedup_over_per_choice"]),
        "exact" if record["is_exact"] else number(record["sqnr_db"]),
    ]


def checks_record(variant: Variant, times: Mapping[str, Mapping[str, Sequence[float]]]) -> Record:
    """What `check_inputs` costs."""
    return {
        "record": "check_inputs",
        "transport": variant.transport,
        "wire": variant.wire,
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
        f"check_inputs off -> on, {record['num_tokens']} tokens, {record['wire']} over {record['transport']}, "
        f"cached: {', '.join(costs)}"
    )


def environment_text(run: Record) -> str:
    """Who measured what where."""
    return "\n".join(
        [
            f"fp4comm {run['fp4comm']} ({run['commit'] or 'no commit'}), {run['date']}: {run['command']}",
            f"{counted(run['ranks'], 'rank')} on {run['cores']} cores of {run['cpu']}, "
            f"kernels {run['isa']}, {run['system']}",
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
    "us: device time of a call in a row of calls, the median over rounds of the slowest rank's.",
    "graph: of a call among as many in a CUDA graph, where the host has no part.",
    "alone: of a call on an idle device, with its launches from Python.",
    "pack, wire, unpack: device time in rounds of their own; a wait for the other ranks counts as wire. Over peer pack",
    "writes to the other ranks, and wire is but that wait, or, along cached routes, a part of unpack.",
    "raw: bare messages of the same sizes, over NCCL. dB: signal to noise, against no rounding, of the received rows,",
    "and of the result of both legs with experts that only scale. remote: GB/s to other ranks. x bf16, x nccl: how",
    "many times as fast as BF16 over the same transport, and as the same wire over NCCL.",
    f"{PER_CHOICE}: a plain dispatcher, one BF16 row per expert choice instead of one per rank, over NCCL; with cached",
    "routes it knows its routes, too.",
)
