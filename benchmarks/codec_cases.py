"""The conversions that the codec benchmark runs, each with its bytes and its comparison with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4comm import _cpu
from fp4comm.backends import Rows, cpu
from fp4comm.formats import Kind
from fp4comm.reference import codec as oracle

NUM_RANKS, NUM_TOPK, NUM_LOCAL_EXPERTS = 4, 8, 64  # of the routes in the fused loops
FIRST_GROUP = 200  # rows of the group of the column-wise conversions that is compared: a full tile and a partial one
NAMES = {
    Kind.F32: "FP32",
    Kind.BF16: "BF16",
    Kind.F16: "FP16",
    Kind.FP8: "FP8",
    Kind.FP8_E8M0: "FP8 (E8M0)",
    Kind.MXFP4: "MXFP4",
}
FLOATS = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16, Kind.F16: torch.float16}
Codes = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Case:
    """One conversion.

    Attributes:
        name: what it is called in the table.
        num_elements: numbers converted; one that goes to several ranks counts once, one that several experts get as
            often as they get it.
        num_bytes: read and written, each once.
        run: does it.
        check: what is wrong with the result, given that it has run; None = nothing.
    """

    name: str
    num_elements: int
    num_bytes: int
    run: Callable[[], None]
    check: Callable[[], str | None]

    def problem(self) -> str | None:
        """Runs the conversion and compares some rows of the result with the oracle."""
        self.run()
        return self.check()


class Rowsets:
    """Rows of every kind with the same random numbers, made when first asked for."""

    def __init__(self, num_rows: int, hidden: int, seed: int) -> None:
        self.num_rows, self.hidden = num_rows, hidden
        self.generator = torch.Generator().manual_seed(seed)
        self._rows: dict[object, Rows] = {}

    def source(self, kind: Kind) -> Rows:
        """Numbers of that kind."""
        if kind not in self._rows:
            rows = empty_rows(kind, self.num_rows, self.hidden)
            if kind == Kind.F32:
                rows.data.normal_(generator=self.generator)
                rows.data.mul_(torch.randn(self.num_rows, 1, generator=self.generator).exp_())
            else:
                cpu.convert_rows(self.source(Kind.F32), rows)
            self._rows[kind] = rows
        return self._rows[kind]

    def fp8_any_scales(self) -> Rows:
        """FP8 with scales that are no powers of two."""
        if "any" not in self._rows:
            fp8 = self.source(Kind.FP8)
            assert fp8.scales is not None
            factors = torch.rand(fp8.scales.shape, generator=self.generator) + 0.5
            self._rows["any"] = Rows(Kind.FP8, fp8.data, fp8.scales * factors)
        return self._rows["any"]

    def target(self, kind: Kind, num_rows: int | None = None) -> Rows:
        """Memory for a result; conversions to the same kind share it."""
        num_rows = self.num_rows if num_rows is None else num_rows
        key = "target", kind
        if key not in self._rows or len(self._rows[key]) < num_rows:
            self._rows[key] = empty_rows(kind, num_rows, self.hidden)
            self._rows[key].data.view(torch.uint8).zero_()  # pages of its own before anything is timed
        rows = self._rows[key]
        return Rows(kind, rows.data[:num_rows], None if rows.scales is None else rows.scales[:num_rows])


def empty_rows(kind: Kind, num_rows: int, hidden: int, device: torch.device | None = None) -> Rows:
    """Uninitialised rows next to each other."""

    def empty(width: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=device)

    if kind in FLOATS:
        return Rows(kind, empty(hidden, FLOATS[kind]))
    if kind == Kind.FP8:
        return Rows(kind, empty(hidden), empty(-(-hidden // 128), torch.float32))
    widths = (hidden, -(-hidden // 128)) if kind == Kind.FP8_E8M0 else (hidden // 2, hidden // 32)
    return Rows(kind, *map(empty, widths))


def all_cases(num_rows: int, hidden: int, seed: int) -> Iterator[Case]:
    """The conversions in the order of the table."""
    rowsets = Rowsets(num_rows, hidden, seed)
    yield from encodings(rowsets)
    for src, dst in (
        *((Kind.MXFP4, kind) for kind in (Kind.BF16, Kind.F16, Kind.F32, Kind.FP8, Kind.FP8_E8M0)),
        *((Kind.BF16, kind) for kind in (Kind.FP8, Kind.FP8_E8M0)),
        *((kind, Kind.BF16) for kind in (Kind.FP8, Kind.FP8_E8M0)),
    ):
        yield conversion(rowsets, rowsets.source(src), dst)
    yield conversion(rowsets, rowsets.source(Kind.MXFP4), Kind.BF16, ", Hadamard", hadamard=True)
    yield from columns(rowsets)
    yield from fused(rowsets)


def encodings(rowsets: Rowsets) -> Iterator[Case]:
    """Everything to MXFP4."""
    sources = [(rowsets.source(kind), "") for kind in (Kind.FP8, Kind.BF16, Kind.F16, Kind.F32)]
    sources.insert(1, (rowsets.fp8_any_scales(), " (any scales)"))
    for source, remark in sources:
        for mode in ("even", "floor", "rceil"):
            yield conversion(rowsets, source, Kind.MXFP4, f", {mode}", remark, scale_mode=mode)
        yield conversion(rowsets, source, Kind.MXFP4, ", stochastic", remark, stochastic=True)
        yield conversion(rowsets, source, Kind.MXFP4, ", Hadamard", remark, hadamard=True)


def conversion(rowsets: Rowsets, src: Rows, dst_kind: Kind, suffix: str = "", remark: str = "", **how: Any) -> Case:
    """`convert_rows` from each row to the row of the same index."""
    dst = rowsets.target(dst_kind)
    options = native_options(**how)
    rows = sample(len(src))
    return Case(
        f"{NAMES[src.kind]}{remark} -> {NAMES[dst_kind]}{suffix}",
        len(src) * src.hidden,
        num_bytes(src) + num_bytes(dst),
        lambda: cpu.convert_rows(src, dst, options=options),
        lambda: difference(codes(dst, rows), convert(src, rows, dst_kind, **how)),
    )


def columns(rowsets: Rowsets) -> Iterator[Case]:
    """Row-wise to column-wise, in groups as experts have them: padded to 128 rows, as FP8 GEMMs want, and ragged."""
    sizes = group_sizes(rowsets.num_rows)
    padded = [128 * -(-size // 128) for size in sizes]
    while sum(padded) > rowsets.num_rows:
        padded.pop()
    for src_kind in (Kind.MXFP4, Kind.FP8):
        src = rowsets.source(src_kind)
        convert_columns = oracle.mxfp4_to_fp8_columns if src_kind == Kind.MXFP4 else oracle.fp8_to_fp8_columns
        for remark, groups in (("", padded or sizes), (", ragged", sizes)):
            name = f"{NAMES[src_kind]} -> FP8 columns{remark}"
            yield column_case(name, src, groups, cpu.fp8_columns, convert_columns)
    src = rowsets.source(Kind.MXFP4)
    yield column_case("MXFP4 -> MXFP4 columns", src, sizes, cpu.mxfp4_columns, oracle.mxfp4_to_mxfp4_columns)


def column_case(
    name: str, src: Rows, sizes: list[int], convert: Callable[..., tuple[Tensor, Tensor]], wanted: Callable[..., Codes]
) -> Case:
    """Times the bare loop, into memory that a whole call has made; compares the first group."""
    assert src.scales is not None
    src = Rows(src.kind, src.data[: sum(sizes)], src.scales[: sum(sizes)])
    assert src.scales is not None
    data, scales = convert(src, None, sizes)
    counts = torch.tensor(sizes, dtype=torch.int64)
    strides = (src.data.stride(0), src.scales.stride(0) * src.scales.element_size())
    rows = _cpu.Rows(src.kind, src.data.data_ptr(), strides[0], src.scales.data_ptr(), strides[1])

    def run() -> None:
        common = (rows, src.hidden, 0, counts.data_ptr(), len(sizes), data.data_ptr(), scales.data_ptr())
        if convert is cpu.mxfp4_columns:
            _cpu.mxfp4_columns(*common, native_options())
        else:
            _cpu.fp8_columns(*common)

    def check() -> str | None:
        expected = wanted(*codes(src, torch.arange(sizes[0])))
        got = tuple(to_numpy(part.flatten()[: want.size]) for part, want in zip((data, scales), expected, strict=True))
        return difference(got, tuple(want.ravel() for want in expected))

    return Case(name, len(src) * src.hidden, num_bytes(src) + data.nbytes + scales.nbytes, run, check)


def group_sizes(num_rows: int) -> list[int]:
    """Uneven groups with about 256 rows each."""
    sizes = [min(FIRST_GROUP, num_rows)]
    while sum(sizes) < num_rows:
        sizes.append(min(num_rows - sum(sizes), 160 + 97 * len(sizes) % 192))
    return sizes


def fused(rowsets: Rowsets) -> Iterator[Case]:
    """The loops of dispatch and combine, with the row maps of random routes."""
    num_tokens, hidden = max(rowsets.num_rows // 3, 1), rowsets.hidden
    num_experts = NUM_RANKS * NUM_LOCAL_EXPERTS
    topk_idx = torch.rand(num_tokens, num_experts, generator=rowsets.generator).topk(NUM_TOPK).indices
    token_rows, _, pairs = cpu.route(topk_idx, num_experts, NUM_RANKS)
    assert pairs is not None
    pair_tokens, pair_rows = pairs
    arriving = topk_idx[token_rows[:, 0] >= 0]  # as many come from all ranks as all go to one
    local = torch.where(arriving < NUM_LOCAL_EXPERTS, arriving, -1).to(torch.int32)
    counts = torch.bincount(local[local >= 0], minlength=NUM_LOCAL_EXPERTS)
    expert_rows, slot_rows, _ = cpu.expert_layout(local, counts, 1)
    weights = torch.rand(slot_rows.shape, generator=rowsets.generator)
    for kind in (Kind.BF16, Kind.FP8):
        src, wire = rowsets.source(kind), wire_rows(Kind.MXFP4, len(pair_rows), hidden)
        yield mapped(f"pack by rank: {NAMES[kind]} -> MXFP4", src, wire, pair_tokens, pair_rows)
    src = filled_wire_rows(rowsets, Kind.MXFP4, len(pair_rows))
    for kind in (Kind.BF16, Kind.FP8):
        yield mapped(
            f"unpack by expert: MXFP4 -> {NAMES[kind]}", src, rowsets.target(kind, len(expert_rows)), expert_rows
        )
    experts = rowsets.source(Kind.BF16)
    for kind in (Kind.BF16, Kind.MXFP4):
        target = wire_rows(kind, len(slot_rows), hidden)
        yield summed(f"weighted sum of experts: BF16 -> {NAMES[kind]}", experts, target, slot_rows, weights)
    for kind in (Kind.BF16, Kind.FP8_E8M0, Kind.MXFP4):
        src = filled_wire_rows(rowsets, kind, len(pair_rows))
        yield summed(f"sum over ranks: {NAMES[kind]} -> BF16", src, rowsets.target(Kind.BF16, num_tokens), token_rows)


def mapped(name: str, src: Rows, dst: Rows, src_row: Tensor, dst_row: Tensor | None = None) -> Case:
    """`convert_rows` with row maps; a source row counts once, however often it is used."""
    i = sample(len(src_row))
    num_sources = len(torch.unique(src_row))
    return Case(
        name,
        (len(src_row) if dst_row is None else num_sources) * src.hidden,
        num_bytes(src, num_sources) + num_bytes(dst, len(src_row)),
        lambda: cpu.convert_rows(src, dst, src_row=src_row, dst_row=dst_row),
        lambda: difference(codes(dst, i if dst_row is None else dst_row[i]), convert(src, src_row[i], dst.kind)),
    )


def summed(name: str, src: Rows, dst: Rows, src_row: Tensor, weights: Tensor | None = None) -> Case:
    """`sum_rows`; its elements are the terms."""
    i = sample(len(src_row))
    num_terms = int((src_row >= 0).sum())

    def check() -> str | None:
        used = torch.unique(src_row[i].clamp(min=0))
        terms = torch.where(src_row[i] >= 0, torch.searchsorted(used, src_row[i].clamp(min=0)), -1)
        factors = None if weights is None else weights[i].numpy()
        total = oracle.weighted_sum(numbers(src, used), terms.numpy(), factors)
        return difference(codes(dst, i), encode(dst.kind, total))

    return Case(
        name,
        num_terms * src.hidden,
        num_bytes(src, num_terms) + num_bytes(dst, len(src_row)),
        lambda: cpu.sum_rows(src, dst, src_row, weights),
        check,
    )


def wire_rows(kind: Kind, num_rows: int, hidden: int) -> Rows:
    """Rows as they lie in a message: numbers and scales of a row next to each other, with room for its routing."""
    layout = cpu.row_layout(kind, hidden, NUM_TOPK)
    buffer = torch.zeros(num_rows, layout.row_bytes, dtype=torch.uint8)
    scales = buffer[:, layout.scale_offset : layout.scale_offset + layout.scale_bytes]
    return Rows(kind, buffer[:, : layout.data_bytes], scales if layout.scale_bytes else None)


def filled_wire_rows(rowsets: Rowsets, kind: Kind, num_rows: int) -> Rows:
    """Such rows with random numbers."""
    rows = wire_rows(kind, num_rows, rowsets.hidden)
    cpu.convert_rows(rowsets.source(Kind.BF16), rows, src_row=torch.arange(num_rows) % rowsets.num_rows)
    return rows


# --- the oracle on rows


def native_options(scale_mode: str = "even", stochastic: bool = False, hadamard: bool = False) -> cpu.Options:
    return cpu.options(scale_mode, stochastic, hadamard)


def sample(num_rows: int) -> Tensor:
    """Indices of a few rows at both ends."""
    return torch.tensor(sorted({*range(min(num_rows, 16)), *range(max(num_rows - 8, 0), num_rows)}))


def to_numpy(x: Tensor) -> NDArray[Any]:
    """Codes, bit patterns or float32 numbers as the oracle takes them."""
    views = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return x.contiguous().view(views.get(x.dtype, x.dtype)).numpy()


def codes(rows: Rows, index: Tensor) -> Codes:
    """The bytes of some rows: numbers and, where the kind has them, scales."""
    data = rows.data[index]
    if rows.kind in FLOATS:
        return (to_numpy(data.view(torch.uint8).view(FLOATS[rows.kind])),)
    assert rows.scales is not None
    return to_numpy(data), to_numpy(rows.scales[index])


def numbers(rows: Rows, index: Tensor) -> oracle.F32:
    """The numbers of some rows."""
    data, *scales = codes(rows, index)
    decoders: dict[Kind, Callable[..., oracle.F32]] = {
        Kind.F32: lambda x: x,
        Kind.BF16: oracle.widen_bf16,
        Kind.F16: oracle.widen_fp16,
        Kind.FP8: oracle.decode_fp8,
        Kind.FP8_E8M0: lambda q, s: oracle.decode_fp8(q, oracle.e8m0_scales(s)),
        Kind.MXFP4: oracle.decode_mxfp4,
    }
    return decoders[rows.kind](data, *scales)


def encode(kind: Kind, x: oracle.F32, **how: Any) -> Codes:
    """Numbers as rows of a kind."""
    if kind == Kind.MXFP4:
        return oracle.encode_mxfp4(x, **how)
    if kind == Kind.FP8:
        return oracle.encode_fp8(x)
    if kind == Kind.FP8_E8M0:
        return oracle.fp8_to_e8m0(*oracle.encode_fp8(x))
    return ({Kind.F32: lambda x: x, Kind.BF16: oracle.round_bf16, Kind.F16: oracle.round_fp16}[kind](x),)


def convert(src: Rows, index: Tensor, dst_kind: Kind, **how: Any) -> Codes:
    """What the rows become as rows of another kind."""
    if src.kind == Kind.MXFP4 and dst_kind in (Kind.FP8, Kind.FP8_E8M0):
        data, scales = oracle.mxfp4_to_fp8(*codes(src, index))
        return (data, scales) if dst_kind == Kind.FP8 else oracle.fp8_to_e8m0(data, scales)
    if src.kind == Kind.MXFP4 and how.get("hadamard"):
        return encode(dst_kind, oracle.decode_mxfp4(*codes(src, index), hadamard=True))
    if how.get("stochastic"):
        how = {**how, "row_index": index.numpy()}
    return encode(dst_kind, numbers(src, index), **how)


def difference(got: Codes, wanted: Codes) -> str | None:
    """How two results differ, if they do."""
    for what, a, b in zip(("numbers", "scales"), got, wanted, strict=False):
        if a.shape != b.shape or not np.array_equal(a.view(np.uint8), np.ascontiguousarray(b).view(np.uint8)):
            return f"the {what} differ from the oracle's"
    return None


def num_bytes(rows: Rows, num_rows: int | None = None) -> int:
    """Bytes of numbers and scales of so many rows, of all by default."""
    width = rows.data.shape[1] * rows.data.element_size()
    if rows.scales is not None:
        width += rows.scales.shape[1] * rows.scales.element_size()
    return width * (len(rows) if num_rows is None else num_rows)
