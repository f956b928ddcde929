"""Kernels that pack tokens, add and multiply rows, on a GPU and in the emulator: the bits of the CPU backend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cuda_targets import CPU, FILL, Run, Target, assert_all_same, assert_same
from numerics import decode, encode, hard_rows
from numpy.typing import NDArray
from test_cuda_rows import OPTIONS, options_of, small_hidden, sources, targets_of, variants
from torch import Tensor

from fp4comm.backends import Rows, cpu
from fp4comm.exchange import WireRows
from fp4comm.formats import Kind
from fp4comm.routing import SendPlan

RNG = np.random.default_rng
NUM_EXPERTS, NUM_RANKS = 12, 3
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS
SUM_PAIRS = list(product((Kind.BF16, Kind.FP8_E8M0, Kind.MXFP4), (Kind.BF16, Kind.MXFP4, Kind.FP8_E8M0, Kind.F32)))


def tame(kind: Kind, arrays: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
    """Rows without NaN and Inf: most sums should be numbers."""
    x = decode(kind, *arrays)
    return encode(kind, np.where(np.isfinite(x) & (np.abs(x) < 1e30), x, np.float32(0.5)))


@dataclass
class Packing:
    """Tokens to pack, and the buffer that must come out."""

    src: Kind
    dst: Kind
    hidden: int
    num_tokens: int
    num_topk: int = 4
    options: str = "even"
    weighted: bool = True
    capacity: int | None = None
    index: type = np.int64
    with_routing: bool = True
    gap: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        rng = RNG(self.num_tokens + 10 * self.src + self.dst)
        self.arrays = hard_rows(rng, self.src, self.num_tokens, self.hidden)
        idx = rng.integers(-1, NUM_EXPERTS, (self.num_tokens, self.num_topk))
        self.idx: NDArray[Any] = idx.astype(self.index)
        self.idx[rng.random(self.num_tokens) < 0.1] = -1
        self.weights = rng.standard_normal(self.idx.shape).astype(np.float32) if self.weighted else None
        token_rows, counts, _ = cpu.route(torch.from_numpy(self.idx), NUM_EXPERTS, NUM_RANKS)
        self.token_rows, self.counts = token_rows.numpy(), counts.numpy()
        per_rank = self.counts[:, 1]
        self.max_rows = int(per_rank.sum())
        if self.capacity is not None:
            shift = np.arange(NUM_RANKS) * self.capacity - (np.cumsum(per_rank) - per_rank)
            self.token_rows = np.where(self.token_rows >= 0, self.token_rows + shift, -1)
            self.max_rows = NUM_RANKS * self.capacity
        self.layout = cpu.row_layout(self.dst, self.hidden, self.num_topk if self.with_routing else 0)

    def wire(self, target: Target) -> WireRows:
        buffer = torch.full((self.max_rows, self.layout.row_bytes), FILL, dtype=torch.uint8, device=target.device)
        return WireRows(buffer, self.dst, self.layout, self.num_topk if self.with_routing else 0)

    def pack(self, target: Target) -> Tensor:
        """By the function under test."""
        send = self.wire(target)
        idx, token_rows, counts = map(target.tensor, (self.idx, self.token_rows, self.counts))
        plan = SendPlan(idx, token_rows, counts, self.max_rows, self.capacity, None)
        x = target.rows(self.src, self.arrays, self.gap, self.start)
        weights = None if self.weights is None else target.tensor(self.weights)
        target.backend.pack_tokens(x, send, plan, weights, NUM_EXPERTS, target.backend.options(**OPTIONS[self.options]))
        return send.buffer

    def expected(self) -> Tensor:
        """By converting rows on the CPU and writing the routing slot by slot."""
        send = self.wire(CPU)
        tokens, ranks = np.nonzero(self.token_rows >= 0)
        rows = CPU.tensor(self.token_rows[tokens, ranks])
        x = CPU.rows(self.src, self.arrays)
        cpu.convert_rows(x, send.rows, CPU.tensor(tokens), rows, cpu.options(**OPTIONS[self.options]))
        if self.with_routing:
            self._write_routing(send.buffer.numpy())
        return send.buffer

    def __call__(self, target: Target) -> list[Tensor]:
        return [self.expected() if target is CPU else self.pack(target)]

    def _write_routing(self, buffer: NDArray[np.uint8]) -> None:
        weights = buffer[:, self.layout.weight_offset :][:, : 4 * self.num_topk]
        experts = buffer[:, self.layout.expert_offset :][:, : 2 * self.num_topk]
        if self.capacity is not None:
            for rank, used in enumerate(self.counts[:, 1]):
                unused = slice(rank * self.capacity + used, (rank + 1) * self.capacity)
                weights[unused], experts[unused] = 0, 255
        for token, rank in zip(*np.nonzero(self.token_rows >= 0), strict=True):
            idx, row = self.idx[token], self.token_rows[token, rank]
            here = (idx >= 0) & (idx // NUM_LOCAL == rank)
            given = np.ones(len(idx), np.float32) if self.weights is None else self.weights[token]
            weights[row] = np.where(here, given, np.float32(0)).view(np.uint8)
            experts[row] = np.where(here, idx - rank * NUM_LOCAL, -1).astype(np.int16).view(np.uint8)


def assert_packs(target: Target, *cases: dict[str, Any]) -> None:
    runs: dict[str, Run] = {}
    for case in cases:
        runs[str(case)] = Packing(**case)
    assert_all_same(target, runs)


class TestPack:
    @sources
    def test_every_pair(self, target: Target, source: Kind) -> None:
        """With routing, and without as with a cached handle; as many rows as needed, and a fixed capacity."""
        cases = []
        for i, dst in enumerate(targets_of(source)):
            for hidden, name in variants(target, source, dst, target.pick(["even"], options_of(target, source, dst))):
                case = {"src": source, "dst": dst, "hidden": hidden, "num_tokens": target.pick(30, 300)}
                cases.append(case | {"options": name})
                if i == 0 and name == "even":
                    capacity = 80 if source % 2 else None
                    cases.append(case | {"capacity": capacity, "with_routing": False, "num_tokens": 60})
        assert_packs(target, *cases)

    def test_routing(self, target: Target) -> None:
        """With and without weights, int32 and int64 choices; unused rows of a fixed capacity belong to no expert."""
        case = {"src": Kind.BF16, "dst": Kind.MXFP4, "hidden": 160, "num_tokens": 70}
        ways = product((1, 4, 9), (None, 80), (True, False), (np.int64, np.int32))
        few = [(1, None, True, np.int64), (4, 80, False, np.int64), (4, None, True, np.int32), (9, 80, True, np.int32)]
        names = ("num_topk", "capacity", "weighted", "index")
        assert_packs(target, *(case | dict(zip(names, way, strict=True)) for way in target.pick(few, ways)))

    @pytest.mark.parametrize("num_tokens, capacity", [(0, None), (0, 8), (1, 8), (1, None)])
    def test_few_tokens(self, target: Target, num_tokens: int, capacity: int | None) -> None:
        case = {"src": Kind.BF16, "dst": Kind.MXFP4, "hidden": 32, "num_tokens": num_tokens}
        assert_packs(target, case | {"capacity": capacity})

    @pytest.mark.parametrize("gap, start", [(0, 0), (2, 2), (16, 0), (6, 10)])
    def test_any_address_and_stride(self, target: Target, gap: int, start: int) -> None:
        case = {"src": Kind.BF16, "dst": Kind.MXFP4, "hidden": 32, "num_tokens": 40}
        assert_packs(target, case | {"gap": gap, "start": start})

    def test_experts_that_do_not_exist(self, target: Target) -> None:
        """They count as none."""
        packing = Packing(Kind.BF16, Kind.MXFP4, 32, 40)
        expected = packing.expected()
        missing = packing.idx == -1
        packing.idx[missing] = RNG(1).choice([-2, NUM_EXPERTS, 2**40, -(2**40)], int(missing.sum()))
        assert_same(target, lambda t: [expected if t is CPU else packing.pack(t)])

    def test_many_tokens(self, target: Target) -> None:
        """So many that a warp takes a whole token."""
        num_tokens, hidden = target.pick((4100, 32), (8191, 2048))
        case = {"src": Kind.BF16, "dst": Kind.MXFP4, "hidden": hidden, "num_tokens": num_tokens}
        assert_packs(target, case, case | {"capacity": num_tokens + 7})

    def test_one_launch(self, target: Target) -> None:
        packing = Packing(Kind.BF16, Kind.MXFP4, 32, 70, capacity=80)
        before = target.num_launches()
        packing.pack(target)
        assert target.num_launches() == before + 1


class TestSums:
    @sources
    def test_every_pair(self, target: Target, source: Kind) -> None:
        """Weighted and plain; of hard rows and of such that most sums are numbers."""
        runs: dict[str, Run] = {}
        for dst in Kind if (source, Kind.F32) in SUM_PAIRS else targets_of(source):
            names = options_of(target, source, dst)
            for hidden, name in variants(target, source, dst, target.pick([names[(source + dst) % len(names)]], names)):
                rng = RNG(1000 * hidden + 10 * source + dst)
                num_rows, num_sums = target.pick((20, 15), (300, 400))
                hard = hard_rows(rng, source, num_rows, hidden)
                rows = rng.integers(-1, num_rows, (num_sums, 5))
                rows[0] = -1
                weights = rng.standard_normal(rows.shape).astype(np.float32)
                for given in (weights, None) if dst == Kind.BF16 else (weights,):
                    run = self.addition(source, dst, (hard, tame(source, hard)), rows, given, name)
                    runs[f"to {dst.name}, hidden {hidden}, {name}, weighted {given is not None}"] = run
        assert_all_same(target, runs)

    @staticmethod
    def addition(src: Kind, dst: Kind, sets: Any, rows: Any, weights: Any, name: str) -> Run:
        def run(t: Target) -> list[Tensor]:
            memories = []
            for arrays in sets:
                x = t.rows(src, arrays)
                out, memory = t.empty(dst, len(rows), x.hidden)
                factors = None if weights is None else t.tensor(weights)
                t.backend.sum_rows(x, out, t.tensor(rows), factors, options=t.backend.options(**OPTIONS[name]))
                memories += memory
            return memories

        return run

    def test_number_of_terms(self, target: Target) -> None:
        counts = (0, 1, 2, 8, 17, 33)
        assert_all_same(target, {f"{n} terms": self.terms(n, target.pick(n == 2, True)) for n in counts})

    @staticmethod
    def terms(num_terms: int, plain_too: bool) -> Run:
        rng = RNG(num_terms)
        arrays = tame(Kind.BF16, hard_rows(rng, Kind.BF16, 30, 160))
        rows = rng.integers(-1, 30, (25, num_terms))
        weights = rng.standard_normal(rows.shape).astype(np.float32)
        target_rows = rng.permutation(40)[:25]

        def run(t: Target) -> list[Tensor]:
            memories = []
            for given in (weights, None) if plain_too else (weights,):
                out, memory = t.empty(Kind.F32, 40, 160)
                factors = None if given is None else t.tensor(given)
                t.backend.sum_rows(
                    t.rows(Kind.BF16, arrays), out, t.tensor(rows), factors, dst_row=t.tensor(target_rows)
                )
                memories += memory
            return memories

        return run

    def test_weight_corners(self, target: Target) -> None:
        """0 * Inf and Inf - Inf are the canonical NaN; products round to subnormals; the sum starts from +0."""
        corners = np.array([np.inf, -np.inf, -0.0, 2.0**-126, np.nan, 3e38], np.float32)
        x = corners[:, None].repeat(32, axis=1)
        rows = np.array([[0, -1], [0, 1], [2, -1], [3, -1], [4, 3], [5, 5], [3, 3]])
        weights = np.array([[0, 1], [1, 1], [1, 1], [2.0**-10, 0], [1, 1], [1, 1], [0.25, 2.0**-23]], np.float32)

        def run(t: Target) -> list[Tensor]:
            memories = []
            for dst in target.pick((Kind.F32, Kind.FP8), Kind):
                out, memory = t.empty(dst, len(rows), 32)
                t.backend.sum_rows(
                    Rows(Kind.F32, t.tensor(x.astype(np.float32))), out, t.tensor(rows), t.tensor(weights)
                )
                memories += memory
            return memories

        assert_same(target, run)

    @pytest.mark.parametrize("source", [Kind.BF16, Kind.FP8_E8M0, Kind.MXFP4], ids=lambda kind: kind.name)
    def test_any_address_and_stride(self, target: Target, source: Kind) -> None:
        dst, rows = Kind.BF16, RNG(4).integers(-1, 20, (12, 5))
        size = 2 if source == Kind.BF16 else 1
        runs: dict[str, Run] = {}
        for hidden in (small_hidden(source, dst), 256):
            arrays = tame(source, hard_rows(RNG(3), source, 20, hidden))
            for gap, start in ((0, 0), (16, 16), (size, 3 * size)):

                def run(t: Target, arrays: Any = arrays, place: Any = (gap, start), hidden: int = hidden) -> Any:
                    out, memory = t.empty(dst, len(rows), hidden)
                    t.backend.sum_rows(t.rows(source, arrays, *place), out, t.tensor(rows))
                    return memory

                runs[f"hidden {hidden}, gap {gap}, start {start}"] = run
        assert_all_same(target, runs)

    def test_many_rows(self, target: Target) -> None:
        """So many that a warp takes a whole row."""
        num_rows, hidden = target.pick((4100, 160), (6007, 2048))
        runs: dict[str, Run] = {}
        for src, dst in target.pick(SUM_PAIRS[8:9], SUM_PAIRS):
            arrays = tame(src, hard_rows(RNG(5), src, 500, hidden))
            rows = RNG(6).integers(-1, 500, (num_rows, target.pick(2, 8)))
            weights = RNG(7).standard_normal(rows.shape).astype(np.float32)
            runs[f"{src.name} to {dst.name}"] = self.addition(src, dst, [arrays], rows, weights, "even")
        assert_all_same(target, runs)


class TestDotProducts:
    @sources
    def test_every_pair(self, target: Target, source: Kind) -> None:
        runs: dict[str, Run] = {}
        for other in targets_of(source):
            for hidden, _ in variants(target, source, other):
                rng = RNG(1000 * hidden + 10 * source + other)
                left, right = hard_rows(rng, source, 20, hidden), hard_rows(rng, other, 25, hidden)
                sets = (left, right), (tame(source, left), tame(other, right))
                maps = rng.integers(-1, 20, 25), rng.integers(-1, 25, 25)
                runs[f"by {other.name}, hidden {hidden}"] = self.products(source, other, sets, maps)
        assert_all_same(target, runs)

    @staticmethod
    def products(a: Kind, b: Kind, sets: Any, maps: Any) -> Run:
        def run(t: Target) -> list[Tensor]:
            a_row, b_row = map(t.tensor, maps)
            out = []
            for x, y in sets:
                out.append(t.backend.dot_rows(t.rows(a, x), t.rows(b, y), a_row, b_row))
                out.append(t.backend.dot_rows(t.rows(a, x, 16, 16), t.rows(b, y), b_row=b_row[:20]))
            return out

        return run

    @pytest.mark.parametrize("kind", [Kind.BF16, Kind.MXFP4, Kind.F32], ids=lambda kind: kind.name)
    def test_hadamard_is_undone(self, target: Target, kind: Kind) -> None:
        left, right = (tame(k, hard_rows(RNG(8), k, 30, 160)) for k in (kind, Kind.MXFP4))

        def run(t: Target) -> list[Tensor]:
            options = t.backend.options(**OPTIONS["hadamard"])
            return [t.backend.dot_rows(t.rows(kind, left), t.rows(Kind.MXFP4, right), options=options)]

        assert_same(target, run)

    def test_no_rows(self, target: Target) -> None:
        def run(t: Target) -> list[Tensor]:
            x, _ = t.empty(Kind.BF16, 0, 160)
            return [t.backend.dot_rows(x, x)]

        assert_same(target, run)
