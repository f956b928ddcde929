"""Sums and dot products of rows: the order and the roundings of the oracle, for every kind."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from numerics import assert_same_bits, convert, decode, encode, hard_rows, torch_rows
from numpy.typing import NDArray

from fp4comm.backends import cpu
from fp4comm.formats import Kind
from fp4comm.reference import codec as oracle

pytestmark = pytest.mark.usefixtures("isa")
RNG = np.random.default_rng


def tame(kind: Kind, arrays: tuple[NDArray[np.generic], ...]) -> tuple[NDArray[np.generic], ...]:
    """Rows without NaN and Inf: most sums should be numbers."""
    x = decode(kind, *arrays)
    return encode(kind, np.where(np.isfinite(x) & (np.abs(x) < 1e30), x, np.float32(0.5)))


def assert_same_rows(actual: list[NDArray[np.generic]], expected: tuple[NDArray[np.generic], ...]) -> None:
    for what, a, b in zip(("data", "scales"), actual, expected, strict=False):
        assert_same_bits(a, b, what)


class TestSums:
    @pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
    @pytest.mark.parametrize("src, dst", list(product(Kind, Kind)), ids=lambda kind: kind.name)
    def test_every_pair_of_kinds(self, src: Kind, dst: Kind, weighted: bool) -> None:
        rng = RNG(10 * src + dst)
        for hidden, clean in ((32, False), (160, True), (288, True)):
            arrays = hard_rows(rng, src, 40, hidden)
            arrays = tame(src, arrays) if clean else arrays
            rows = rng.integers(-1, 40, (60, 5))
            rows[0] = -1
            weights = rng.standard_normal((60, 5)).astype(np.float32) if weighted else None
            total = oracle.weighted_sum(decode(src, *arrays), rows, weights)
            expected = encode(dst, total)
            actual = [np.full_like(part, 1) for part in expected]
            tensors = torch.from_numpy(rows), None if weights is None else torch.from_numpy(weights)
            cpu.sum_rows(torch_rows(src, *arrays), torch_rows(dst, *actual), *tensors)
            assert_same_rows(actual, expected)

    @pytest.mark.parametrize("num_terms", [0, 1, 2, 8, 17])
    def test_number_of_terms(self, num_terms: int) -> None:
        rng = RNG(num_terms)
        arrays = tame(Kind.BF16, hard_rows(rng, Kind.BF16, 30, 96))
        rows = rng.integers(-1, 30, (50, num_terms))
        weights = rng.standard_normal((50, num_terms)).astype(np.float32)
        (expected,) = encode(Kind.F32, oracle.weighted_sum(decode(Kind.BF16, *arrays), rows, weights))
        actual = np.ones_like(expected)
        cpu.sum_rows(
            torch_rows(Kind.BF16, *arrays),
            torch_rows(Kind.F32, actual),
            torch.from_numpy(rows),
            torch.from_numpy(weights),
        )
        assert_same_bits(actual, expected)

    def test_weight_corners(self) -> None:
        """0 * Inf and Inf - Inf are the canonical NaN; products round to subnormals; the sum starts from +0."""
        x = np.full((4, 32), [[1.5], [np.inf], [-0.0], [1e-38]], np.float32)
        rows = np.array([[1], [1], [2], [3], [3]])
        weights = np.array([[0], [-1], [1], [1e-3], [np.nan]], np.float32)
        (expected,) = encode(Kind.F32, oracle.weighted_sum(x, rows, weights))
        actual = np.ones_like(expected)
        tensors = torch.from_numpy(rows), torch.from_numpy(weights)
        cpu.sum_rows(torch_rows(Kind.F32, x), torch_rows(Kind.F32, actual), *tensors)
        assert_same_bits(actual, expected)
        assert actual.view(np.uint32)[:, 0].tolist() == [0x7FC00000, 0xFF800000, 0, 7136, 0x7FC00000]

    def test_target_rows(self) -> None:
        rng = RNG(1)
        arrays = tame(Kind.MXFP4, hard_rows(rng, Kind.MXFP4, 30, 96))
        rows, target = rng.integers(-1, 30, (20, 3)), rng.permutation(25)[:20]
        total = oracle.weighted_sum(decode(Kind.MXFP4, *arrays), rows)
        expected = np.full((25, 96), 0x1234, np.uint16)
        expected[target] = oracle.round_bf16(total)
        actual = np.full((25, 96), 0x1234, np.uint16)
        cpu.sum_rows(
            torch_rows(Kind.MXFP4, *arrays),
            torch_rows(Kind.BF16, actual),
            torch.from_numpy(rows),
            dst_row=torch.from_numpy(target),
        )
        assert_same_bits(actual, expected)

    @pytest.mark.parametrize("src, dst", [(Kind.MXFP4, Kind.BF16), (Kind.BF16, Kind.MXFP4), (Kind.MXFP4, Kind.MXFP4)])
    def test_options(self, src: Kind, dst: Kind) -> None:
        """The transform is undone on every MXFP4 term and made before an MXFP4 result; rounding bits follow the sum."""
        rng = RNG(2)
        arrays = tame(src, hard_rows(rng, src, 30, 96))
        rows = rng.integers(-1, 30, (40, 3))
        weights = rng.standard_normal((40, 3)).astype(np.float32)
        terms = decode(src, *arrays, hadamard=True, seed=6)
        total = oracle.weighted_sum(terms, rows, weights)
        expected = encode(dst, total, scale_mode="rceil", stochastic=True, hadamard=True, seed=6, stream=3)
        actual = [np.full_like(part, 1) for part in expected]
        cpu.sum_rows(
            torch_rows(src, *arrays),
            torch_rows(dst, *actual),
            torch.from_numpy(rows),
            torch.from_numpy(weights),
            options=cpu.options("rceil", True, True, 6, 3),
        )
        assert_same_rows(actual, expected)

    @pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
    def test_one_term_is_a_conversion(self, kind: Kind) -> None:
        """A sum of one row equals the row (but -0 becomes +0)."""
        arrays = hard_rows(RNG(3), kind, 50, 160)
        (expected,) = convert(kind, Kind.F32, *arrays)
        actual = np.ones_like(expected)
        rows = torch.arange(50).unsqueeze(1)
        cpu.sum_rows(torch_rows(kind, *arrays), torch_rows(Kind.F32, actual), rows)
        assert_same_bits(actual, oracle.canonical(expected) + np.float32(0))


class TestDotProducts:
    @pytest.mark.parametrize("a, b", list(product(Kind, Kind)), ids=lambda kind: kind.name)
    def test_every_pair_of_kinds(self, a: Kind, b: Kind) -> None:
        rng = RNG(10 * a + b)
        for hidden, clean in ((32, False), (96, True), (1440, True)):
            left, right = hard_rows(rng, a, 20, hidden), hard_rows(rng, b, 25, hidden)
            if clean:
                left, right = tame(a, left), tame(b, right)
            a_row, b_row = rng.integers(-1, 20, 40), rng.integers(-1, 25, 40)
            absent = (a_row < 0) | (b_row < 0)
            expected = oracle.dot_products(decode(a, *left)[a_row], decode(b, *right)[b_row])
            expected = np.where(absent, np.float32(0), expected)
            maps = {"a_row": torch.from_numpy(a_row), "b_row": torch.from_numpy(b_row)}
            assert_same_bits(cpu.dot_rows(torch_rows(a, *left), torch_rows(b, *right), **maps), expected)

    def test_hadamard_is_undone(self) -> None:
        rng = RNG(1)
        left, right = (
            tame(Kind.BF16, hard_rows(rng, Kind.BF16, 30, 96)),
            tame(Kind.MXFP4, hard_rows(rng, Kind.MXFP4, 30, 96)),
        )
        expected = oracle.dot_products(decode(Kind.BF16, *left), decode(Kind.MXFP4, *right, hadamard=True, seed=4))
        options = cpu.options("even", False, True, 4, 0)
        assert_same_bits(
            cpu.dot_rows(torch_rows(Kind.BF16, *left), torch_rows(Kind.MXFP4, *right), options=options), expected
        )

    def test_close_to_float64(self) -> None:
        rng = RNG(2)
        a, b = rng.standard_normal((2, 50, 4096)).astype(np.float32)
        actual = cpu.dot_rows(torch_rows(Kind.F32, a), torch_rows(Kind.F32, b)).numpy()
        exact = (a.astype(np.float64) * b).sum(axis=1)
        assert (np.abs(actual - exact) <= 200 * 2.0**-24 * np.abs(a * b).sum(axis=1)).all()
