"""Routing kernels, on a GPU and in the emulator: what the CPU backend makes of the same choices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_targets import CPU, Target, assert_same
from numpy.typing import NDArray
from torch import Tensor

from fp4comm.backends import cpu
from fp4comm.formats import Kind
from fp4comm.routing import worst_case_expert_rows

RNG = np.random.default_rng
Choices = Callable[[np.random.Generator, int, int, int], NDArray[np.int64]]


def random_choices(rng: np.random.Generator, num_tokens: int, num_topk: int, num_experts: int) -> NDArray[np.int64]:
    """Duplicates and -1 included."""
    return rng.integers(-1, num_experts, (num_tokens, num_topk))


def skewed_choices(rng: np.random.Generator, num_tokens: int, num_topk: int, num_experts: int) -> NDArray[np.int64]:
    """Nearly all tokens want the same few experts; some have none."""
    idx = np.minimum(rng.geometric(0.6, (num_tokens, num_topk)) - 1, num_experts - 1)
    idx[rng.random(num_tokens) < 0.1] = -1
    return idx


def no_choices(rng: np.random.Generator, num_tokens: int, num_topk: int, num_experts: int) -> NDArray[np.int64]:
    return np.full((num_tokens, num_topk), -1)


def last_expert(rng: np.random.Generator, num_tokens: int, num_topk: int, num_experts: int) -> NDArray[np.int64]:
    return np.full((num_tokens, num_topk), num_experts - 1)


CHOICES: dict[str, Choices] = {
    "random": random_choices,
    "skewed": skewed_choices,
    "none": no_choices,
    "last": last_expert,
}
# tokens, top-k, experts, ranks
SHAPES = [(0, 4, 12, 3), (1, 4, 12, 3), (700, 4, 12, 3), (333, 8, 64, 8), (65, 1, 1, 1), (40, 6, 600, 2)]
LARGE_SHAPES = [
    (32768, 8, 256, 8),
    (32768, 8, 256, 64),
    (4099, 32, 4096, 256),
    (8192, 1, 1, 1),
    (5000, 3, 32767, 1),
    (1 << 20, 2, 16, 4),
]


def status_word(target: Target) -> Tensor:
    """An int32 that kernels can write and the host can read."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=target.device.type == "cuda")


def synchronize(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def expected_route(idx: NDArray[Any], num_experts: int, num_ranks: int, stride: int | None) -> tuple[Any, Any]:
    """token_rows and counts, token by token."""
    experts_per_rank = num_experts // num_ranks
    good = (idx >= 0) & (idx < num_experts)
    to_rank = np.zeros((len(idx), num_ranks), bool)
    to_rank[np.nonzero(good)[0], idx[good] // experts_per_rank] = True
    counts = np.zeros((num_ranks, 2 + experts_per_rank), np.int64)
    counts[:, 0] = (~good & (idx != -1)).sum()
    counts[:, 1] = to_rank.sum(0)
    counts[:, 2:] = np.bincount(idx[good].ravel(), minlength=num_experts).reshape(num_ranks, -1)
    starts = np.cumsum(counts[:, 1]) - counts[:, 1] if stride is None else np.arange(num_ranks) * stride
    return np.where(to_rank, np.cumsum(to_rank, 0) - 1 + starts, -1), counts


def check_route(target: Target, idx: NDArray[Any], num_experts: int, num_ranks: int) -> None:
    from fp4comm.backends import cuda_route

    for stride in (None, len(idx) + 3):
        expected = expected_route(idx, num_experts, num_ranks, stride)
        for dtype in (np.int64, np.int32):
            status = status_word(target)
            on_device = target.tensor(idx.astype(dtype))
            out = cuda_route.route(on_device, num_experts, num_ranks, stride, status.data_ptr())
            synchronize(target)
            np.testing.assert_array_equal(out[0].cpu().numpy(), expected[0])
            np.testing.assert_array_equal(out[1].cpu().numpy(), expected[1])
            assert status.item() == (expected[1][0, 0] > 0)


class TestRoute:
    @pytest.mark.parametrize("choices", CHOICES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_small(self, target: Target, shape: tuple[int, ...], choices: str) -> None:
        num_tokens, num_topk, num_experts, num_ranks = shape
        idx = CHOICES[choices](RNG(num_tokens), num_tokens, num_topk, num_experts)
        check_route(target, idx, num_experts, num_ranks)
        assert_same(target, lambda t: t.backend.route(t.tensor(idx), num_experts, num_ranks)[:2])

    @pytest.mark.gpu
    @pytest.mark.parametrize("choices", CHOICES)
    @pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
    @pytest.mark.parametrize("target", ["cuda"], indirect=True)
    def test_large(self, target: Target, shape: tuple[int, ...], choices: str) -> None:
        self.test_small(target, shape, choices)

    def test_entries_that_are_no_expert(self, target: Target) -> None:
        """They count as -1, all of them, and are reported."""
        rng = RNG(1)
        idx = random_choices(rng, 500, 4, 12)
        bad = rng.random(idx.shape) < 0.05
        idx[bad] = rng.choice([-2, 12, 13, 2**31 - 1, -(2**31)], int(bad.sum()))
        check_route(target, idx, 12, 3)
        from fp4comm.backends import cuda_route

        idx[7, 2] = 2**40 + 1  # whose low half is an expert
        expected = expected_route(idx, 12, 3, None)
        actual = cuda_route.route(target.tensor(idx), 12, 3)
        np.testing.assert_array_equal(actual[0].cpu().numpy(), expected[0])
        np.testing.assert_array_equal(actual[1].cpu().numpy(), expected[1])

    def test_strided_choices(self, target: Target) -> None:
        wide = RNG(2).integers(-1, 12, (300, 9))
        one = target.backend.route(target.tensor(wide)[:, 2:6], 12, 3)
        other = target.backend.route(target.tensor(np.ascontiguousarray(wide[:, 2:6])), 12, 3)
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def received(
    rng: np.random.Generator, idx: NDArray[Any], hidden: int = 32
) -> tuple[NDArray[np.uint8], cpu.RowLayout, NDArray[np.float32]]:
    """A buffer of MXFP4 rows with these local experts and random weights, the rest of each row holding anything."""
    num_rows, num_topk = idx.shape
    layout = cpu.row_layout(Kind.MXFP4, hidden, num_topk)
    buffer = rng.integers(0, 256, (num_rows, layout.row_bytes), dtype=np.uint8)
    weights = rng.standard_normal(idx.shape).astype(np.float32)
    end = layout.expert_offset + 2 * num_topk
    buffer[:, layout.weight_offset : layout.expert_offset] = weights.view(np.uint8).reshape(num_rows, 4 * num_topk)
    buffer[:, layout.expert_offset : end] = idx.astype(np.int16).view(np.uint8).reshape(num_rows, 2 * num_topk)
    return buffer, layout, weights


def read(
    target: Target, buffer: NDArray[np.uint8], layout: cpu.RowLayout, num_topk: int, *args: Any, **options: Any
) -> list[Any]:
    """What the facade of a backend reads, flattened."""
    wire = SimpleNamespace(buffer=target.tensor(buffer), layout=layout, num_topk=num_topk)
    idx, weights, counts, experts, used = target.backend.read_routing(wire, *args, **options)
    return [idx, weights, counts, *(experts or ()), *(() if used is None else [used])]


# received rows, top-k, local experts
READ_SHAPES = [(0, 4, 3), (1, 1, 1), (500, 4, 3), (300, 8, 40), (64, 16, 600), (33, 2, 32767)]
LARGE_READ_SHAPES = [(131072, 8, 32), (1 << 20, 8, 4), (4096, 32, 256), (3000, 1, 32767), (262144, 6, 128)]


class TestReadRouting:
    @pytest.mark.parametrize("choices", CHOICES)
    @pytest.mark.parametrize("shape", READ_SHAPES, ids=str)
    def test_small(self, target: Target, shape: tuple[int, ...], choices: str) -> None:
        num_rows, num_topk, num_experts = shape
        idx = CHOICES[choices](RNG(num_rows), num_rows, num_topk, num_experts)
        buffer, layout, _ = received(RNG(1), idx)
        assert_same(target, lambda t: read(t, buffer, layout, num_topk, num_experts))
        assert_same(target, lambda t: read(t, buffer, layout, num_topk, num_experts, mark_unused=True))
        counts = np.bincount(idx.ravel() + 1, minlength=num_experts + 1)[1:]
        for alignment in (1, 16) if num_experts > 100 else (1, 3, 16, 128):
            needed = int((-(-counts // alignment) * alignment).sum())
            worst = worst_case_expert_rows(num_rows, num_topk, num_experts, alignment)
            for size in {needed, max(needed, worst)}:  # more than the worst case only with duplicates
                args = num_experts, alignment, size
                for mark in (False, True):

                    def run(t: Target, args: Any = args, mark: bool = mark) -> list[Tensor]:
                        return read(t, buffer, layout, num_topk, *args, mark_unused=mark)

                    assert_same(target, run, f"{args} {mark}")

    @pytest.mark.gpu
    @pytest.mark.parametrize("choices", CHOICES)
    @pytest.mark.parametrize("shape", LARGE_READ_SHAPES, ids=str)
    @pytest.mark.parametrize("target", ["cuda"], indirect=True)
    def test_large(self, target: Target, shape: tuple[int, ...], choices: str) -> None:
        self.test_small(target, shape, choices)

    @pytest.mark.parametrize("hidden", [32, 160, 7168])
    def test_offsets(self, target: Target, hidden: int) -> None:
        """Rows of other widths, whose routing lies at other places."""
        idx = random_choices(RNG(3), 50, 4, 3)
        buffer, layout, _ = received(RNG(4), idx, hidden)
        assert_same(target, lambda t: read(t, buffer, layout, 4, 3, 4, 300))

    def test_experts_that_are_not_here(self, target: Target) -> None:
        """Corrupt rows: they read as -1, and are reported."""
        from fp4comm.backends import cuda_route

        rng = RNG(5)
        idx = random_choices(rng, 400, 4, 3)
        corrupt = idx.copy()
        bad = rng.random(idx.shape) < 0.03
        corrupt[bad] = rng.choice([3, 4, -2, 32767, -32768], int(bad.sum()))
        buffer, layout, _ = received(RNG(6), corrupt)
        idx[bad] = -1
        as_if, _, _ = received(RNG(6), idx)
        expected = read(CPU, as_if, layout, 4, 3, 4, 1600)
        status = status_word(target)
        args = (target.tensor(buffer), layout, 4, 3, 4, 1600, status.data_ptr())
        idx32, weights, counts, experts = cuda_route.read_routing(*args)
        synchronize(target)
        for want, got in zip(expected, [idx32, weights, counts, *(experts or ())], strict=True):
            assert torch.equal(got.cpu(), want)
        assert status.item() == 2

    def test_more_rows_than_announced(self, target: Target) -> None:
        """Rows beyond num_rows are left out and reported; memory behind the results stays as it was."""
        from fp4comm.backends import cuda_route

        idx = random_choices(RNG(7), 300, 4, 3)
        buffer, layout, _ = received(RNG(8), idx)
        whole = read(CPU, buffer, layout, 4, 3, 4)
        for num_rows in (0, 1, 500):
            status = status_word(target)
            out = cuda_route.read_routing(target.tensor(buffer), layout, 4, 3, 4, num_rows, status.data_ptr())
            synchronize(target)
            assert status.item() == 2
            rows, slot_rows, ends, row_weights = (part.cpu() for part in out[3])
            assert torch.equal(out[0].cpu(), whole[0])
            assert torch.equal(out[2].cpu(), whole[2])
            assert torch.equal(rows, whole[3][:num_rows])
            assert torch.equal(slot_rows, torch.where(whole[4] < num_rows, whole[4], -1))
            assert torch.equal(row_weights, whole[6][:num_rows])
            assert ends.dtype == torch.int32

    def test_status_stays_zero(self, target: Target) -> None:
        from fp4comm.backends import cuda_route

        buffer, layout, _ = received(RNG(9), random_choices(RNG(10), 300, 4, 3))
        status = status_word(target)
        cuda_route.read_routing(target.tensor(buffer), layout, 4, 3, 4, 1300, status.data_ptr())
        synchronize(target)
        assert status.item() == 0


def test_number_of_launches(target: Target) -> None:
    buffer, layout, _ = received(RNG(1), random_choices(RNG(2), 300, 4, 3))
    before = target.num_launches()
    target.backend.route(target.tensor(random_choices(RNG(0), 300, 4, 12)), 12, 3)
    assert target.num_launches() == before + 2
    read(target, buffer, layout, 4, 3, 4, 1300)
    assert target.num_launches() == before + 4
