"""The cases of the GPU codec benchmark: what is called on which data, and how many bytes that must move.

A case is built on any device, so the same case on the CPU is what a GPU's result is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fp4comm.backends import Rows
from fp4comm.formats import Kind

from .codec_cases import NAMES, num_bytes
from .cuda_data import NUM_EXPERTS, NUM_LOCAL_EXPERTS, NUM_RANKS, NUM_TOPK, Data, head, parts
from .cuda_expert_cases import expert_cases
from .cuda_jobs import GpuCase, Job

ALIGNMENT = 128  # of the experts' rows, for the routing kernels


def all_cases() -> Iterator[GpuCase]:
    """The cases in the order of the table."""
    yield from encodings()
    yield from decodings()
    yield from columns()
    yield from packing()
    yield from unpacking()
    yield from sums()
    yield from routing()
    yield from expert_cases()
    yield GpuCase("fill: writes alone", fill)


def fill(data: Data) -> Job:
    """Zeros into as many bytes as FP8 both ways has: what a case that hardly reads can reach beside a copy."""
    memory = torch.empty(2 * data.num_rows * data.hidden, dtype=torch.uint8, device=data.device)

    def run() -> None:
        memory.zero_()

    return Job(run, lambda: [memory], memory.numel(), memory.numel())


# --- rows


def encodings() -> Iterator[GpuCase]:
    """Everything to MXFP4."""
    for kind in (Kind.FP8, Kind.FP8_E8M0, Kind.BF16):
        yield conversion(kind, Kind.MXFP4)
    yield conversion(Kind.FP8, Kind.MXFP4, " (any scales)", any_scales=True)
    for kind in (Kind.FP8, Kind.BF16):
        yield conversion(kind, Kind.MXFP4, suffix=", rceil", scale_mode_name="rceil")
        yield conversion(kind, Kind.MXFP4, suffix=", stochastic", stochastic=True)
        yield conversion(kind, Kind.MXFP4, suffix=", Hadamard", hadamard=True)


def decodings() -> Iterator[GpuCase]:
    """From MXFP4, and between FP8 and BF16."""
    for kind in (Kind.FP8, Kind.FP8_E8M0, Kind.BF16):
        yield conversion(Kind.MXFP4, kind)
    yield conversion(Kind.MXFP4, Kind.BF16, suffix=", Hadamard", hadamard=True)
    for kind in (Kind.FP8, Kind.FP8_E8M0):
        yield conversion(Kind.BF16, kind)
    for kind in (Kind.FP8, Kind.FP8_E8M0):
        yield conversion(kind, Kind.BF16)
    yield conversion(Kind.BF16, Kind.BF16)


def conversion(
    src_kind: Kind, dst_kind: Kind, remark: str = "", suffix: str = "", any_scales: bool = False, **how: Any
) -> GpuCase:
    """`convert_rows` from each row to the row of the same index."""

    def build(data: Data) -> Job:
        src = data.fp8_any_scales() if any_scales else data.source(src_kind)
        dst, options = data.target(dst_kind), data.backend.options(**how)
        return Job(
            lambda: data.backend.convert_rows(src, dst, options=options),
            lambda: parts(dst),
            len(src) * src.hidden,
            num_bytes(src) + num_bytes(dst),
        )

    return GpuCase(f"{NAMES[src_kind]}{remark} -> {NAMES[dst_kind]}{suffix}", build)


# --- columns


def columns() -> Iterator[GpuCase]:
    """Row-wise to column-wise, as one group, for 32 experts with rows padded to 128, and for ragged groups."""
    for kind in (Kind.MXFP4, Kind.FP8_E8M0, Kind.FP8):
        for grouping in ("1 group", "32 experts", "32 ragged experts"):
            yield column_case(f"{NAMES[kind]} -> FP8 columns, {grouping}", kind, grouping, fp8_columns)
    yield column_case("MXFP4 -> FP8 columns, 32 experts, gathered", Kind.MXFP4, "32 experts", fp8_columns, True)
    for grouping in ("1 group", "32 experts"):
        name = f"MXFP4 -> FP8 rows + columns, {grouping}"
        yield column_case(name, Kind.MXFP4, grouping, fp8_rows_and_columns)
    name = "MXFP4 -> FP8 rows + columns, 32 experts, gathered"
    yield column_case(name, Kind.MXFP4, "32 experts", fp8_rows_and_columns, True)
    yield column_case("MXFP4 -> MXFP4 columns, 32 experts", Kind.MXFP4, "32 experts", mxfp4_columns)


def column_case(
    name: str, kind: Kind, grouping: str, convert: Callable[..., tuple[Tensor, ...]], gathered: bool = False
) -> GpuCase:
    """A conversion to columns, which allocates its result."""

    def build(data: Data) -> Job:
        sizes = group_sizes(data, grouping)
        src = head(data.source(kind), sum(sizes))
        src_row = data.permutation(sum(sizes)) if gathered else None
        result: list[Tensor] = []

        def run() -> None:
            result[:] = convert(data, src, src_row, sizes)

        count, tiles = sum(sizes), sum(-(-size // 128) for size in sizes)
        written = {
            fp8_columns: data.hidden * (count + 4 * tiles),
            fp8_rows_and_columns: data.hidden * (2 * count + 4 * tiles) + 4 * count * -(-data.hidden // 128),
            mxfp4_columns: data.hidden * sum(17 * -(-size // 32) for size in sizes),
        }[convert]
        moved = num_bytes(src) + written + (0 if src_row is None else src_row.nbytes)
        return Job(run, lambda: list(result), len(src) * src.hidden, moved)

    return GpuCase(name, build, in_graph=False)


def group_sizes(data: Data, grouping: str) -> list[int]:
    """Rows of each group."""
    if grouping == "1 group":
        return [data.num_rows]
    return data.expert_sizes(data.num_rows, 1 if "ragged" in grouping else 128)


def fp8_columns(data: Data, src: Rows, src_row: Tensor | None, sizes: list[int]) -> tuple[Tensor, ...]:
    return tuple(data.backend.fp8_columns(src, src_row, sizes))


def mxfp4_columns(data: Data, src: Rows, src_row: Tensor | None, sizes: list[int]) -> tuple[Tensor, ...]:
    return tuple(data.backend.mxfp4_columns(src, src_row, sizes))


def fp8_rows_and_columns(data: Data, src: Rows, src_row: Tensor | None, sizes: list[int]) -> tuple[Tensor, ...]:
    return tuple(data.backend.fp8_rows_and_columns(src, src_row, sizes))


# --- the fused loops of dispatch


def packing() -> Iterator[GpuCase]:
    """Tokens to the rows of messages for two ranks, and a gather of all rows."""
    for src_kind, wire_kind in (
        (Kind.FP8, Kind.MXFP4),
        (Kind.BF16, Kind.MXFP4),
        (Kind.BF16, Kind.FP8_E8M0),
        (Kind.BF16, Kind.BF16),
    ):
        yield packed(src_kind, wire_kind, with_meta=False)
    yield packed(Kind.FP8, Kind.MXFP4, with_meta=True)
    yield packed(Kind.BF16, Kind.MXFP4, with_meta=True)
    for kind in (Kind.FP8, Kind.BF16):
        yield gathered(kind, Kind.MXFP4)


def packed(src_kind: Kind, wire_kind: Kind, with_meta: bool) -> GpuCase:
    """`pack_tokens` of a quarter of the rows, each for up to two ranks."""

    def build(data: Data) -> Job:
        num_tokens, num_topk = max(data.num_rows // 4, 1), NUM_TOPK if with_meta else 0
        routes, src = data.routes(num_tokens), data.source(src_kind, num_tokens)
        wire = data.wire_target(wire_kind, len(routes.pair_rows), num_topk)
        plan, options = routes.plan, data.backend.options()

        def outputs() -> list[Tensor]:
            start = wire.layout.expert_offset
            experts = wire.buffer[:, start : start + 2 * num_topk]
            return [*parts(wire.rows), *([wire.weights, experts] if with_meta else [])]

        moved = num_bytes(src) + num_bytes(wire.rows) + routes.token_rows.nbytes + 6 * num_topk * len(wire.buffer)
        moved += routes.topk_idx.nbytes + routes.weights.nbytes if with_meta else 0
        return Job(
            lambda: data.backend.pack_tokens(src, wire, plan, routes.weights, NUM_EXPERTS, options),
            outputs,
            num_tokens * data.hidden,
            moved,
        )

    suffix = ", routing" if with_meta else ""
    return GpuCase(f"pack for 2 ranks: {NAMES[src_kind]} -> {NAMES[wire_kind]}{suffix}", build)


def gathered(src_kind: Kind, wire_kind: Kind) -> GpuCase:
    """`convert_rows` of all rows in random order."""

    def build(data: Data) -> Job:
        src, order = data.source(src_kind), data.permutation(data.num_rows)
        wire = data.wire_target(wire_kind, data.num_rows).rows
        return Job(
            lambda: data.backend.convert_rows(src, wire, src_row=order),
            lambda: parts(wire),
            len(src) * src.hidden,
            num_bytes(src) + num_bytes(wire) + order.nbytes,
        )

    return GpuCase(f"gather and pack: {NAMES[src_kind]} -> {NAMES[wire_kind]}", build)


def unpacking() -> Iterator[GpuCase]:
    """Received rows to the experts' rows."""
    for wire_kind, kind in (
        (Kind.MXFP4, Kind.BF16),
        (Kind.MXFP4, Kind.FP8),
        (Kind.FP8_E8M0, Kind.BF16),
        (Kind.FP8_E8M0, Kind.FP8),
        (Kind.BF16, Kind.BF16),
    ):
        yield expanded(f"unpack for experts: {NAMES[wire_kind]} -> {NAMES[kind]}", wire_kind, kind, "inverse")
    for kind in (Kind.BF16, Kind.FP8):
        yield expanded(f"unpack for experts, by gather: MXFP4 -> {NAMES[kind]}", Kind.MXFP4, kind, "gather")
    name = "unpack for experts, weighted: FP8 (E8M0) -> BF16"
    yield expanded(name, Kind.FP8_E8M0, Kind.BF16, "weighted")
    for kind in (Kind.BF16, Kind.FP8):
        yield expanded(f"unpack and permute: MXFP4 -> {NAMES[kind]}", Kind.MXFP4, kind, "permute")


def expanded(name: str, wire_kind: Kind, kind: Kind, how: str) -> GpuCase:
    """`expand_rows` of half as many received rows to their up to 8 experts, or ("permute") of all rows, each to one."""

    def build(data: Data) -> Job:
        num_received = data.num_rows if how == "permute" else max(data.num_rows // 2, 1)
        src = data.wire_source(wire_kind, num_received)
        if how == "permute":
            rows, weights = data.permutation(num_received), None
            slot_rows: Tensor | None = torch.argsort(rows)[:, None].contiguous()
        else:
            arrivals = data.arrivals(num_received)
            rows = arrivals.rows
            slot_rows = arrivals.slot_rows if how == "inverse" else None
            weights = arrivals.weights if how == "weighted" else None
        out, options = data.target(kind, len(rows)), data.backend.options()
        maps = sum(part.nbytes for part in (rows, slot_rows, weights) if part is not None)
        moved = num_bytes(src) + num_bytes(out) + maps
        return Job(
            lambda: data.backend.expand_rows(src, out, rows, slot_rows, weights, options),
            lambda: parts(out),
            len(rows) * data.hidden,
            moved,
        )

    return GpuCase(name, build)


# --- the fused loops of combine


def sums() -> Iterator[GpuCase]:
    """Sums over experts, over ranks, and dot products."""
    for kind in (Kind.BF16, Kind.MXFP4, Kind.FP8_E8M0):
        yield summed(f"weighted sum of 8 rows: BF16 -> {NAMES[kind]}", Kind.BF16, kind, eight_rows)
    for kind in (Kind.BF16, Kind.MXFP4):
        yield summed(f"weighted sum of local experts: BF16 -> {NAMES[kind]}", Kind.BF16, kind, local_experts)
    for kind in (Kind.BF16, Kind.FP8_E8M0, Kind.MXFP4):
        yield summed(f"sum over 2 ranks: {NAMES[kind]} -> BF16", kind, Kind.BF16, two_ranks)
    yield GpuCase("dot products: BF16 with MXFP4", dot_products)


Terms = tuple[Rows, Rows, Tensor, Tensor | None]


def summed(name: str, src_kind: Kind, dst_kind: Kind, terms: Callable[[Data, Kind, Kind], Terms]) -> GpuCase:
    """`sum_rows`; its elements are the terms."""

    def build(data: Data) -> Job:
        src, dst, src_row, weights = terms(data, src_kind, dst_kind)
        num_terms = int((src_row >= 0).sum())
        moved = num_bytes(src, num_terms) + num_bytes(dst) + src_row.nbytes
        moved += 0 if weights is None else weights.nbytes
        return Job(
            lambda: data.backend.sum_rows(src, dst, src_row, weights),
            lambda: parts(dst),
            num_terms * data.hidden,
            moved,
        )

    return GpuCase(name, build)


def eight_rows(data: Data, src_kind: Kind, dst_kind: Kind) -> Terms:
    """A quarter as many tokens, each with eight rows anywhere."""
    num_tokens = max(data.num_rows // 4, 1)
    src_row = data.permutation(NUM_TOPK * num_tokens).view(num_tokens, NUM_TOPK)
    src = data.source(src_kind, NUM_TOPK * num_tokens)
    return src, data.wire_target(dst_kind, num_tokens).rows, src_row, data.uniform("weights", num_tokens, NUM_TOPK)


def local_experts(data: Data, src_kind: Kind, dst_kind: Kind) -> Terms:
    """Half as many received tokens, each with the rows of its experts on one of two ranks."""
    num_received = max(data.num_rows // 2, 1)
    arrivals, weights = data.arrivals(num_received), data.uniform("weights", num_received, NUM_TOPK)
    src = data.source(src_kind, len(arrivals.rows))
    return src, data.wire_target(dst_kind, num_received).rows, arrivals.slot_rows, weights


def two_ranks(data: Data, src_kind: Kind, dst_kind: Kind) -> Terms:
    """A quarter as many tokens, each with the rows that have come back from two ranks."""
    num_tokens = max(data.num_rows // 4, 1)
    routes = data.routes(num_tokens)
    src = data.wire_source(src_kind, len(routes.pair_rows))
    return src, data.target(dst_kind, num_tokens), routes.token_rows, None


def dot_products(data: Data) -> Job:
    """`dot_rows` of all rows with rows that have arrived, in random order: the gradient of the routing weights."""
    y, arrived = data.source(Kind.BF16), data.wire_source(Kind.MXFP4, data.num_rows)
    order = data.permutation(data.num_rows)
    result: list[Tensor] = []

    def run() -> None:
        result[:] = [data.backend.dot_rows(y, arrived, b_row=order)]

    moved = num_bytes(y) + num_bytes(arrived) + order.nbytes + 4 * len(y)
    return Job(run, lambda: list(result), len(y) * data.hidden, moved)


# --- routing


def routing() -> Iterator[GpuCase]:
    """What new routes cost, besides the rows."""
    yield GpuCase("route: tokens to 2 ranks", route, is_latency=True)
    yield GpuCase("read routing, rank layout", lambda data: read_routing(data, None), is_latency=True)
    yield GpuCase("read routing, expert layout", lambda data: read_routing(data, ALIGNMENT), is_latency=True)


def route(data: Data) -> Job:
    """The plan of a quarter as many tokens."""
    num_tokens = max(data.num_rows // 4, 1)
    topk_idx = data.routes(num_tokens).topk_idx
    result: list[Tensor] = []

    def run() -> None:
        result[:] = data.backend.route(topk_idx, NUM_EXPERTS, NUM_RANKS)[:2]

    moved = topk_idx.nbytes + 8 * NUM_RANKS * (num_tokens + 2 + NUM_LOCAL_EXPERTS)
    return Job(run, lambda: list(result), topk_idx.numel(), moved)


def read_routing(data: Data, alignment: int | None) -> Job:
    """The routing of half as many received rows."""
    num_tokens = max(data.num_rows // 2, 1)
    wire, counts = data.message(num_tokens), data.routes(num_tokens).counts[0, 2:].tolist()
    num_rows = sum(-(-count // alignment) * alignment for count in counts) if alignment else None
    result: list[Tensor] = []

    def run() -> None:
        idx, weights, counts, experts, *_ = data.backend.read_routing(wire, NUM_LOCAL_EXPERTS, alignment, num_rows)
        result[:] = [idx, weights, counts, *(experts or ())]

    entries = len(wire.buffer) * NUM_TOPK
    moved = (6 + 8) * entries + (8 * entries + 12 * (num_rows or 0) if alignment else 0)
    return Job(run, lambda: list(result), entries, moved)
