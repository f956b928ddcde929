"""Row kernels, on a GPU and in the emulator: the bits of the CPU backend, and of the oracle where it is cheap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from cuda_targets import Run, Target, assert_all_same, assert_same
from numerics import (
    SCALE_MODES,
    all_16_bits,
    assert_same_bits,
    convert,
    e2m1_ties,
    hard_floats,
    hard_rows,
    scale_thresholds,
)
from numpy.typing import NDArray
from torch import Tensor

from fp4comm.backends import Rows
from fp4comm.formats import Kind
from fp4comm.reference import codec as oracle

RNG = np.random.default_rng
PAIRS = list(product(Kind, Kind))
sources = pytest.mark.parametrize("source", Kind, ids=lambda kind: kind.name)
# A kernel is compiled for each, so a pair of kinds has one of them: a block, ragged groups, ragged chunks of a warp.
HIDDENS = (32, 160, 1184)
LARGE_HIDDENS = (2048, 96, 16416, 4096, 288)  # and one of these on a GPU, 7168 where it must be fast
FAST_PAIRS = [
    (Kind.FP8, Kind.MXFP4),
    (Kind.FP8_E8M0, Kind.MXFP4),
    (Kind.BF16, Kind.MXFP4),
    (Kind.MXFP4, Kind.FP8),
    (Kind.MXFP4, Kind.FP8_E8M0),
    (Kind.MXFP4, Kind.BF16),
    (Kind.BF16, Kind.FP8_E8M0),
    (Kind.FP8_E8M0, Kind.BF16),
    (Kind.BF16, Kind.BF16),
    (Kind.MXFP4, Kind.MXFP4),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "even": {"scale_mode_name": "even"},
    "both": {
        "scale_mode_name": "floor",
        "stochastic": True,
        "hadamard": True,
        "seed": 2**64 - 1,
        "stream": 1,
    },
    "floor": {"scale_mode_name": "floor"},
    "rceil": {"scale_mode_name": "rceil"},
    "stochastic": {"scale_mode_name": "rceil", "stochastic": True, "seed": 2**63 + 12345, "stream": 2**32 - 3},
    "hadamard": {"scale_mode_name": "even", "hadamard": True, "seed": 77},
}


def options_of(target: Target, src: Kind, dst: Kind) -> list[str]:
    """Names of the options that matter for a pair; fewer in the emulator."""
    if dst == Kind.MXFP4 and src != Kind.MXFP4:
        return target.pick(list(OPTIONS)[: 6 if src == Kind.F32 else 2], list(OPTIONS))
    return ["even", "hadamard"] if src == Kind.MXFP4 and target.pick(dst == Kind.F32, True) else ["even"]


def small_hidden(src: Kind, dst: Kind) -> int:
    return HIDDENS[(src + dst) % 3]


def variants(target: Target, src: Kind, dst: Kind, names: Sequence[str] = ("even",)) -> list[tuple[int, str]]:
    """Hidden sizes and names of options to try for a pair."""
    large = 7168 if (src, dst) in FAST_PAIRS else LARGE_HIDDENS[(src + 2 * dst) % 5]
    return [(small_hidden(src, dst), name) for name in names] + target.pick([], [(large, names[0])])


def targets_of(src: Kind) -> list[Kind]:
    """Some kinds, where conversions are known to be right and only what is done around them differs."""
    return [dst for dst in Kind if (src, dst) in FAST_PAIRS or dst == (src + 4) % 6]


class TestConvert:
    @sources
    def test_every_pair(self, target: Target, source: Kind) -> None:
        """Rows in order, and gathered, repeated, left zero and scattered; what lies between rows stays as it was."""
        runs: dict[str, Run] = {}
        for dst in Kind:
            for hidden, name in variants(target, source, dst, options_of(target, source, dst)):
                rng = RNG(1000 * hidden + 10 * source + dst)
                num_rows = target.pick(max(40, 3000 // hidden), 300)
                arrays = hard_rows(rng, source, num_rows, hidden)
                src_row = rng.integers(-1, num_rows, num_rows + 8)
                src_row[3:6] = src_row[2]
                src_row[7:9] = -1
                maps = src_row, rng.permutation(len(src_row) + 5)[: len(src_row)]
                runs[f"to {dst.name}, hidden {hidden}, {name}"] = self.conversion(source, dst, arrays, maps, name)
        assert_all_same(target, runs)

    @staticmethod
    def conversion(src: Kind, dst: Kind, arrays: Any, maps: Any, name: str) -> Run:
        def run(t: Target) -> list[Tensor]:
            x, options = t.rows(src, arrays), t.backend.options(**OPTIONS[name])
            src_row, dst_row = map(t.tensor, maps)
            some, memory = t.empty(dst, len(dst_row) + 5, x.hidden)
            t.backend.convert_rows(x, some, src_row, dst_row, options)
            whole, whole_memory = t.empty(dst, len(x), x.hidden)
            t.backend.convert_rows(x, whole, options=options)
            return memory + whole_memory

        return run

    @sources
    def test_any_address_and_stride(self, target: Target, source: Kind) -> None:
        """Sources as views of a user's tensors, at any address that their dtype allows."""
        dst = Kind.MXFP4 if source != Kind.MXFP4 else Kind.FP8
        size = {Kind.F32: 4, Kind.BF16: 2, Kind.F16: 2, Kind.FP8: 4}.get(source, 1)
        runs: dict[str, Run] = {}
        for hidden in {small_hidden(source, dst), 160 if source != Kind.MXFP4 else 256}:
            arrays = hard_rows(RNG(source), source, 20, hidden)
            for gap, start in ((0, 0), (16, 0), (16, 16), (size, 0), (7 * size, 3 * size)):

                def run(t: Target, arrays: Any = arrays, place: Any = (gap, start), hidden: int = hidden) -> Any:
                    out, memory = t.empty(dst, 20, hidden)
                    t.backend.convert_rows(t.rows(source, arrays, *place), out)
                    return memory

                runs[f"hidden {hidden}, gap {gap}, start {start}"] = run
        assert_all_same(target, runs)

    def test_repeated_row(self, target: Target) -> None:
        """Row stride 0, as of an expanded tensor."""
        x = hard_floats(RNG(1), 1, 160)

        def run(t: Target) -> list[Tensor]:
            out, memory = t.empty(Kind.MXFP4, 9, 160)
            t.backend.convert_rows(Rows(Kind.F32, t.tensor(x).expand(9, 160)), out)
            return memory

        assert_same(target, run)

    def test_number_of_rows(self, target: Target) -> None:
        """Fewer than the maps and the rows have; none at all."""
        arrays = hard_rows(RNG(2), Kind.BF16, 50, 160)
        rows = RNG(3).integers(-1, 50, 50)
        for num_rows in (0, 1, 17, None):

            def run(t: Target, num_rows: int | None = num_rows) -> list[Tensor]:
                out, memory = t.empty(Kind.MXFP4, 50, 160)
                t.backend.convert_rows(t.rows(Kind.BF16, arrays), out, num_rows=num_rows)
                other, other_memory = t.empty(Kind.MXFP4, 50, 160)
                t.backend.convert_rows(t.rows(Kind.BF16, arrays), other, t.tensor(rows), num_rows=num_rows)
                return memory + other_memory

            assert_same(target, run, str(num_rows))

    def test_many_rows(self, target: Target) -> None:
        """So many that a warp takes a whole row."""
        num_rows, hidden = target.pick((4100, 1184), (20011, 2048))
        runs: dict[str, Run] = {}
        for src, dst in target.pick(FAST_PAIRS[1:5:2], FAST_PAIRS):
            arrays = hard_rows(RNG(4), src, num_rows, hidden)

            def run(t: Target, arrays: Any = arrays, src: Kind = src, dst: Kind = dst) -> list[Tensor]:
                out, memory = t.empty(dst, num_rows, hidden)
                t.backend.convert_rows(t.rows(src, arrays), out)
                return memory

            runs[f"{src.name} to {dst.name}"] = run
        assert_all_same(target, runs)


def converted(target: Target, src: Kind, dst: Kind, arrays: Sequence[NDArray[Any]], mode: str) -> list[Tensor]:
    """Data and scales."""
    x = target.rows(src, arrays)
    out, _ = target.empty(dst, len(x), x.hidden)
    target.backend.convert_rows(x, out, options=target.backend.options(mode))
    return [out.data] if out.scales is None else [out.data, out.scales]


def assert_converts(target: Target, src: Kind, dst: Kind, arrays: Sequence[NDArray[Any]], mode: str = "even") -> None:
    """Compares with the oracle."""
    expected = convert(src, dst, *arrays, **({"scale_mode": mode} if dst == Kind.MXFP4 else {}))
    for what, got, want in zip(("data", "scales"), converted(target, src, dst, arrays, mode), expected, strict=False):
        assert_same_bits(got.contiguous(), want.view(np.uint8), f"{src.name} to {dst.name} {mode} {what}")


def as_rows(x: NDArray[Any], hidden: int) -> NDArray[Any]:
    """The numbers of `x` as rows, the last one filled up from the start."""
    return np.resize(x, (-(-x.size // hidden), hidden))


class TestExhaustive:
    """Every number in every situation that a scale makes."""

    @pytest.mark.parametrize("mode", SCALE_MODES)
    def test_every_e4m3_code_under_every_scale(self, target: Target, mode: str) -> None:
        """Blocks with every largest code and codes below it, under E8M0 bytes (all on a GPU) and float scales."""
        rng = RNG(SCALE_MODES.index(mode))
        largest = np.arange(256, dtype=np.uint8)
        below = rng.integers(0, 1 << 16, (256, 32)) % (largest[:, None] % 128 + 1)
        blocks = (below | rng.integers(0, 2, (256, 32)) << 7).astype(np.uint8)
        blocks[largest, largest % 32] = largest
        some = [*range(16), *range(16, 240, 29), *range(240, 256)]
        scales = np.array(target.pick(some, range(256)), np.uint8)
        for kind in (Kind.FP8_E8M0, Kind.FP8):
            rows = as_rows(blocks, small_hidden(kind, Kind.MXFP4))
            codes = np.tile(rows, (len(scales), 1))
            groups = np.repeat(scales, len(rows))[:, None].repeat(-(-rows.shape[1] // 128), axis=1)
            if kind == Kind.FP8:
                factors = oracle.e8m0_scales(groups)
                factors[1::4] *= np.float32(1.37)
            assert_converts(target, kind, Kind.MXFP4, (codes, factors if kind == Kind.FP8 else groups), mode)

    @pytest.mark.parametrize("kind", [Kind.BF16, Kind.F16], ids=lambda kind: kind.name)
    def test_every_16_bit_pattern(self, target: Target, kind: Kind) -> None:
        """As the largest of its block, and below the largest; to MXFP4, FP8 and the other floats."""
        bits = all_16_bits()
        alone = np.zeros((len(bits), 32), np.uint16)
        alone[1::2] = 0x8000
        alone[np.arange(len(bits)), np.arange(len(bits)) % 32] = bits
        maxima = (0x3FE0, 0x0180, 0x3F80, 0x43E1, 0x7F7F) if kind == Kind.BF16 else (0x3C01, 0x0400, 0x5F01, 0x7BFF)
        blocks = [alone]
        for amax in target.pick(maxima[:2], (*maxima, 1, 0x80, 0x100, 0x17F, 0x3FC0, 0x43E0, 0x4700)):
            below = bits[(bits & 0x7FFF) <= amax]
            blocks.append(np.insert(as_rows(below, 31), 5, amax, axis=1))
        x = np.concatenate(blocks)
        some = (Kind.MXFP4, Kind.FP8_E8M0) if kind == Kind.BF16 else (Kind.MXFP4,)
        for dst in target.pick(some, Kind):
            assert_converts(target, kind, dst, (as_rows(x, small_hidden(kind, dst)),))

    @pytest.mark.parametrize("mode", SCALE_MODES)
    def test_thresholds_of_the_scale(self, target: Target, mode: str) -> None:
        amax = scale_thresholds()[:, None]
        fractions = np.resize(np.array([1, 2, 3, 5, 7, 10, 12, 14, 20]) / 32, (1, 31))
        with np.errstate(under="ignore"):
            x = np.concatenate([-amax, (amax * fractions).astype(np.float32)], axis=1)
        ties = np.ldexp(np.resize(e2m1_ties(), (1, 32)), np.arange(-149, 126)[:, None]).astype(np.float32)
        x = np.concatenate([x, ties])
        for dst in (Kind.MXFP4, Kind.FP8_E8M0) if mode == "even" else (Kind.MXFP4,):
            assert_converts(target, Kind.F32, dst, (as_rows(x, small_hidden(Kind.F32, dst)),), mode)

    def test_every_mxfp4_code_and_scale(self, target: Target) -> None:
        for dst in (Kind.F32, Kind.BF16, Kind.F16, Kind.FP8, Kind.FP8_E8M0):
            hidden = small_hidden(Kind.MXFP4, dst)
            packed = as_rows(np.arange(256, dtype=np.uint8), hidden // 2)
            scales = np.repeat(np.arange(256, dtype=np.uint8), len(packed))[:, None].repeat(hidden // 32, axis=1)
            assert_converts(target, Kind.MXFP4, dst, (np.tile(packed, (256, 1)), scales))

    @pytest.mark.parametrize("dst", [Kind.FP8, Kind.FP8_E8M0], ids=lambda kind: kind.name)
    def test_every_tuple_of_exponents(self, target: Target, dst: Kind) -> None:
        """All codes in groups of four blocks that are d binades below the largest, for all that can matter."""
        below = np.array(list(product((0, 1, 6, 13, 14, 15, 16, 17, 18, 19, 20, 21), repeat=4)))
        for anchor in target.pick((10, 130), (3, 10, 21, 130, 254)):
            scales = np.clip(anchor - below, 0, 254).astype(np.uint8)
            scales[RNG(anchor).random(scales.shape) < 0.01] = 255
            packed = RNG(1).permuted(np.tile(np.arange(0, 256, 4, dtype=np.uint8), (len(scales), 1)), axis=1)
            assert_converts(target, Kind.MXFP4, dst, (packed.reshape(-1, 256), scales.reshape(-1, 16)))


class TestExpand:
    @sources
    def test_every_pair(self, target: Target, source: Kind) -> None:
        """Received rows in expert order with padding; with a weight for each row and without."""
        runs: dict[str, Run] = {}
        for dst in targets_of(source):
            for hidden, _ in variants(target, source, dst):
                rng = RNG(1000 * hidden + 10 * source + dst)
                arrays = hard_rows(rng, source, target.pick(30, 300), hidden)
                maps = self.maps(rng, len(arrays[0]), 4)
                for weighted in (False, True) if (source, dst) in FAST_PAIRS[3:8] else (False,):
                    for slots in (True, False) if dst == Kind.BF16 else (True,):
                        run = self.expansion(source, dst, arrays, maps, weighted, slots)
                        runs[f"to {dst.name}, hidden {hidden}, weighted {weighted}, slots {slots}"] = run
        assert_all_same(target, runs)

    def test_options(self, target: Target) -> None:
        """The transform is undone; random numbers are counted by source rows."""
        runs: dict[str, Run] = {}
        for src, dst, name in ((Kind.MXFP4, Kind.BF16, "hadamard"), (Kind.BF16, Kind.MXFP4, "both")):
            arrays, maps = hard_rows(RNG(8), src, 30, 160), self.maps(RNG(9), 30, 4)
            runs[f"{src.name} to {dst.name}"] = self.expansion(src, dst, arrays, maps, False, True, name)
        assert_all_same(target, runs)

    @staticmethod
    def maps(rng: np.random.Generator, num_rows: int, num_slots: int) -> tuple[NDArray[Any], ...]:
        """source_rows, slot_rows and weights; about half of the slots are used, and 13 rows are padding."""
        num_out = 2 * num_rows + 13
        slot_rows = np.full(num_rows * num_slots, -1)
        used = rng.permutation(num_rows * num_slots)[: num_out - 13]
        slot_rows[used] = rng.permutation(num_out)[: len(used)]
        source_rows = np.full(num_out, -1)
        source_rows[slot_rows[used]] = used // num_slots
        weights = rng.standard_normal(num_out).astype(np.float32)
        weights[:4] = [0, -0.0, np.inf, np.nan]
        return source_rows, slot_rows.reshape(num_rows, num_slots), weights

    @staticmethod
    def expansion(src: Kind, dst: Kind, arrays: Any, maps: Any, weighted: bool, slots: bool, name: str = "even") -> Run:
        def run(t: Target) -> list[Tensor]:
            source_rows, slot_rows, weights = map(t.tensor, maps)
            x = t.rows(src, arrays)
            out, memory = t.empty(dst, len(source_rows), x.hidden)
            given = (slot_rows if slots else None), (weights if weighted else None)
            t.backend.expand_rows(x, out, source_rows, *given, t.backend.options(**OPTIONS[name]))
            return memory

        return run

    def test_identity(self, target: Target) -> None:
        runs: dict[str, Run] = {}
        for (src, dst), num_rows in product(FAST_PAIRS[3:8], (0, 40)):
            hidden = small_hidden(src, dst)
            arrays = hard_rows(RNG(5), src, num_rows, hidden)

            def run(t: Target, arrays: Any = arrays, pair: Any = (src, dst), hidden: int = hidden) -> list[Tensor]:
                out, memory = t.empty(pair[1], len(arrays[0]), hidden)
                t.backend.expand_rows(t.rows(pair[0], arrays), out)
                return memory

            runs[f"{num_rows} rows of {src.name} to {dst.name}"] = run
        assert_all_same(target, runs)

    def test_only_padding(self, target: Target) -> None:
        """No received row, but rows to fill with zeros."""
        for dst in (Kind.BF16, Kind.FP8):

            def run(t: Target, dst: Kind = dst) -> list[Tensor]:
                hidden = small_hidden(Kind.MXFP4, dst)
                out, memory = t.empty(dst, 33, hidden)
                x, _ = t.empty(Kind.MXFP4, 0, hidden)
                rows, slots = t.tensor(np.full(33, -1)), t.tensor(np.zeros((0, 4), np.int64))
                t.backend.expand_rows(x, out, rows, slots)
                return memory

            assert_same(target, run, dst.name)

    def test_one_launch(self, target: Target) -> None:
        x, maps = hard_rows(RNG(6), Kind.MXFP4, 30, 160), self.maps(RNG(7), 30, 4)
        before = target.num_launches()
        self.expansion(Kind.MXFP4, Kind.BF16, x, maps, True, True)(target)
        assert target.num_launches() == before + 1
