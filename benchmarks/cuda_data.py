"""Inputs and outputs of the cases of the GPU codec benchmark, the same on a GPU as on the CPU that checks it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from fp4comm.backends import Rows, backend_for, cpu
from fp4comm.exchange import WireRows
from fp4comm.formats import Kind
from fp4comm.routing import SendPlan

from .codec_cases import FLOATS, empty_rows

NUM_RANKS, NUM_TOPK, NUM_EXPERTS = 2, 8, 256  # of the routes
NUM_LOCAL_EXPERTS = NUM_EXPERTS // NUM_RANKS
POISON = 0xA5  # what is not written shows
Made = tuple[Tensor, ...]


@dataclass(frozen=True)
class Routes:
    """Routes of some tokens, and the rows that they make a rank send: see `SendPlan`."""

    topk_idx: Tensor
    weights: Tensor
    token_rows: Tensor
    counts: Tensor
    pair_tokens: Tensor
    pair_rows: Tensor

    @property
    def plan(self) -> SendPlan:
        pairs = self.pair_tokens, self.pair_rows
        return SendPlan(self.topk_idx, self.token_rows, self.counts, len(self.pair_rows), None, pairs)


@dataclass(frozen=True)
class Arrivals:
    """Where received rows go: the received row behind each row in expert order, the inverse, and the weights."""

    rows: Tensor
    slot_rows: Tensor
    weights: Tensor


class Data:
    """Random rows, routes and maps on a device, made when first asked for and kept.

    Args:
        device: where they lie.
        num_rows: of the sources, unless a case asks for another number.
        hidden: numbers in a row.
        seed: of everything random.
        original: data elsewhere; these are then a copy of it.
    """

    def __init__(
        self, device: torch.device, num_rows: int, hidden: int, seed: int, original: Data | None = None
    ) -> None:
        self.device, self.num_rows, self.hidden, self.seed, self.original = device, num_rows, hidden, seed, original
        self._made: dict[object, Made] = {}

    @cached_property
    def backend(self) -> ModuleType:
        """The module of the loops for that device."""
        return backend_for(torch.empty(0, device=self.device))

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def kept(self, key: object, make: Callable[[Data], Made]) -> Made:
        """What `make` makes, the first time."""
        if key not in self._made:
            if self.original is None:
                self._made[key] = make(self)
            else:
                self._made[key] = tuple(part.to(self.device, copy=True) for part in self.original.kept(key, make))
        return self._made[key]

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Random numbers that depend on seed and purpose alone."""
        return torch.Generator(device).manual_seed(self.seed * 2**32 + zlib.crc32(purpose.encode()))

    # --- rows

    def source(self, kind: Kind, num_rows: int | None = None) -> Rows:
        """Numbers of that kind: normal, with a scale per row."""
        count = self.num_rows if num_rows is None else num_rows
        return Rows(kind, *self.kept((kind, count), lambda data: data._make_source(kind, count)))

    def _make_source(self, kind: Kind, num_rows: int) -> Made:
        if kind == Kind.F32:
            generator = self.generator("numbers", self.device)
            x = torch.randn(num_rows, self.hidden, generator=generator, device=self.device)
            return (x.mul_(torch.randn(num_rows, 1, generator=generator, device=self.device).exp_()),)
        if kind in FLOATS:
            return (self.source(Kind.F32, num_rows).data.to(FLOATS[kind]),)
        rows = self.target(kind, num_rows)
        self.backend.convert_rows(self.source(Kind.BF16, num_rows), rows)  # cases of their own, and so checked
        assert rows.scales is not None
        return rows.data, rows.scales

    def fp8_any_scales(self) -> Rows:
        """FP8 with scales that are no powers of two."""

        def make(data: Data) -> Made:
            fp8 = data.source(Kind.FP8)
            assert fp8.scales is not None
            factors = torch.rand(fp8.scales.shape, generator=data.generator("scales")) + 0.5
            return fp8.data, fp8.scales * factors.to(data.device)

        return Rows(Kind.FP8, *self.kept("any scales", make))

    def target(self, kind: Kind, num_rows: int | None = None) -> Rows:
        """New memory for a result."""
        rows = empty_rows(kind, self.num_rows if num_rows is None else num_rows, self.hidden, self.device)
        for part in parts(rows):
            part.view(torch.uint8).fill_(POISON)
        return rows

    def wire_target(self, kind: Kind, num_rows: int, num_topk: int = 0) -> WireRows:
        """New memory for rows of a message."""
        layout = cpu.row_layout(kind, self.hidden, num_topk)
        buffer = torch.full((num_rows, layout.row_bytes), POISON, dtype=torch.uint8, device=self.device)
        return WireRows(buffer, kind, layout, num_topk)

    def wire_source(self, kind: Kind, num_rows: int) -> Rows:
        """Rows as they lie in a message, with random numbers."""

        def make(data: Data) -> Made:
            wire = data.wire_target(kind, num_rows)
            data.backend.convert_rows(data.source(Kind.BF16, num_rows), wire.rows)
            return (wire.buffer,)

        (buffer,) = self.kept(("wire", kind, num_rows), make)
        return WireRows(buffer, kind, cpu.row_layout(kind, self.hidden, 0), 0).rows

    # --- routes and maps

    def permutation(self, count: int) -> Tensor:
        """All of `range(count)` in random order."""
        (order,) = self.kept(
            ("order", count),
            lambda data: (torch.randperm(count, generator=data.generator("order")).to(data.device),),
        )
        return order

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """float32 numbers from 0 to 1."""
        (numbers,) = self.kept(
            (purpose, shape),
            lambda data: (torch.rand(shape, generator=data.generator(purpose)).to(data.device),),
        )
        return numbers

    def routes(self, num_tokens: int) -> Routes:
        """Random routes of so many tokens."""

        def make(data: Data) -> Made:
            generator = data.generator("routes")
            idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
            weights = torch.rand(num_tokens, NUM_TOPK, generator=generator)
            token_rows, counts, pairs = cpu.route(idx, NUM_EXPERTS, NUM_RANKS)
            assert pairs is not None
            return tuple(part.to(data.device) for part in (idx, weights, token_rows, counts, *pairs))

        return Routes(*self.kept(("routes", num_tokens), make))

    def arrivals(self, num_tokens: int) -> Arrivals:
        """The maps of so many rows that have arrived on rank 0, for the experts there."""

        def make(data: Data) -> Made:
            routes = data.routes(num_tokens)
            idx = routes.topk_idx.cpu()
            local = torch.where(idx < NUM_LOCAL_EXPERTS, idx, -1).to(torch.int32)
            counts = torch.bincount(local[local >= 0], minlength=NUM_LOCAL_EXPERTS)
            rows, slot_rows, _ = cpu.expert_layout(local, counts, 1)
            slots = torch.nonzero(slot_rows.flatten() >= 0).flatten()
            weights = torch.empty(len(rows))
            weights[slot_rows.flatten()[slots]] = routes.weights.cpu().flatten()[slots]
            return tuple(part.to(data.device) for part in (rows, slot_rows, weights))

        return Arrivals(*self.kept(("arrivals", num_tokens), make))

    def message(self, num_tokens: int) -> WireRows:
        """What rank 0 gets of so many tokens, in MXFP4: numbers of no meaning, with the routing that came along."""
        layout = cpu.row_layout(Kind.MXFP4, self.hidden, NUM_TOPK)

        def make(data: Data) -> Made:
            routes = Routes(*(part.cpu() for part in vars(data.routes(num_tokens)).values()))
            x = Rows(Kind.MXFP4, *(torch.ones(num_tokens, data.hidden // n, dtype=torch.uint8) for n in (2, 32)))
            buffer = torch.zeros(len(routes.pair_rows), layout.row_bytes, dtype=torch.uint8)
            wire = WireRows(buffer, Kind.MXFP4, layout, NUM_TOPK)
            cpu.pack_tokens(x, wire, routes.plan, routes.weights, NUM_EXPERTS)
            return (buffer[: int(routes.counts[0, 1])].to(data.device),)

        (buffer,) = self.kept(("message", num_tokens), make)
        return WireRows(buffer, Kind.MXFP4, layout, NUM_TOPK)

    def expert_sizes(self, num_rows: int, multiple: int) -> list[int]:
        """Uneven groups of rows for 32 experts, multiples of `multiple`, which together are at most `num_rows`."""
        multiple = multiple if num_rows >= multiple else 1
        num_units = num_rows // multiple
        experts = torch.randint(32, (num_units,), generator=self.generator("sizes"))
        return [multiple * int(count) for count in torch.bincount(experts, minlength=32)]


def head(rows: Rows, num_rows: int) -> Rows:
    """The first rows."""
    return Rows(rows.kind, rows.data[:num_rows], None if rows.scales is None else rows.scales[:num_rows])


def parts(rows: Rows) -> list[Tensor]:
    """Numbers and, where the kind has them, scales."""
    return [rows.data] if rows.scales is None else [rows.data, rows.scales]
