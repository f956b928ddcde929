"""Experts of `fp4comm.moe`: the numbers of every recipe, on one rank and several."""

from __future__ import annotations

import functools

import moe_cases
import numpy as np
import pytest
import torch
from launch import have_launcher, run_ranks
from moe_cases import RECIPES, WAYS, Values, all_weights, problem_of, run_experts, upstream
from moe_emulation import Emulation, Results
from thread_ranks import run_thread_ranks

# Of the norm. GEMMs sum in float32, so a number beside a rounding threshold of BF16 or FP8 may fall on the other side;
# a rounding of all numbers that is missing, or there twice, gives 2e-3 (BF16) or 3e-2 (FP8) and more.
TOLERANCE = 1e-4
CASES = [(name, 2) for name in RECIPES] + [(name, num_ranks) for name in ("fp32", "fp4") for num_ranks in (1, 3)]


@functools.cache
def emulated(name: str, num_ranks: int, dtype: str = "fp32") -> Results:
    problem = problem_of(num_ranks)
    gate_up, down = (weights.astype(np.float64) for weights in all_weights(problem))
    grads = [upstream(problem, rank) for rank in range(num_ranks)]
    return Emulation(RECIPES[name], gate_up, down, num_ranks, dtype)(problem.xs, problem.idx, problem.weights, grads)


@functools.cache
def on_threads(name: str, num_ranks: int, way: str) -> list[Values]:
    return run_thread_ranks(run_experts, num_ranks, name, way)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Of the norm."""
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def joined(results: list[Values], what: str) -> np.ndarray:
    return np.concatenate([values[what] for values in results])


def assert_emulated(results: list[Values], wanted: Results, tolerance: float) -> None:
    pairs = {
        "out": np.concatenate(wanted.out),
        "x": np.concatenate(wanted.grad_x),
        "topk_weights": np.concatenate(wanted.grad_topk_weights),
        "gate_up": np.stack(wanted.grad_gate_up),
        "down": np.stack(wanted.grad_down),
    }
    for what, want in pairs.items():
        got = joined(results, what)
        assert got.shape == want.shape, what
        assert error(got, want) < tolerance, what


@pytest.mark.parametrize("name, num_ranks", CASES)
def test_numbers_are_those_of_an_emulation_in_float64(name: str, num_ranks: int) -> None:
    assert_emulated(on_threads(name, num_ranks, "exact"), emulated(name, num_ranks), TOLERANCE)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "exact"])
@pytest.mark.parametrize("name", ["fp32", "fp8_flow", "fp4"])
def test_padding_and_fixed_shapes_change_nothing(name: str, way: str) -> None:
    """Not a bit of what a row gives; sums over rows may be made in another order."""
    for got, want in zip(on_threads(name, 2, way), on_threads(name, 2, "exact"), strict=True):
        for what in want:
            np.testing.assert_allclose(got[what], want[what], rtol=0, atol=1e-5 * np.abs(want[what]).max(initial=0))


@pytest.mark.mpi
def test_processes_give_the_bits_of_threads() -> None:
    if not have_launcher("mpi"):
        pytest.skip("mpi is not installed")
    processes = run_ranks(moe_cases.run_all, 2)
    for name in RECIPES:
        for got, want in zip(processes, on_threads(name, 2, "aligned"), strict=True):
            for what in want:
                assert error(got[name][what], want[what]) < 1e-6, (name, what)


@pytest.mark.parametrize("name", ["bf16", "fp8_flow", "fp4"])
def test_bfloat16_tokens_and_weights(name: str) -> None:
    """BF16 between the GEMMs rounds further."""
    results = run_thread_ranks(run_experts, 2, name, "aligned", torch.bfloat16)
    assert_emulated(results, emulated(name, 2, "bf16"), 5 * TOLERANCE)


def test_errors_of_recipes_against_float32() -> None:
    """Each format costs what it should: an order that a mistake in a scale would upset."""
    exact = on_threads("fp32", 2, "exact")
    most = {"bf16": 0.006, "fp8_flow": 0.08, "fp4": 0.25, "fp4_all": 0.45}
    errors = {}
    for name in most:
        results = on_threads(name, 2, "exact")
        errors[name] = {what: error(joined(results, what), joined(exact, what)) for what in exact[0]}
        assert all(value < most[name] for value in errors[name].values()), errors[name]
    for what in ("out", "x", "gate_up", "down"):
        assert errors["bf16"][what] < errors["fp8_flow"][what] < errors["fp4"][what] < errors["fp4_all"][what], what


def test_forward_keeps_the_choice_of_what_to_compute_again() -> None:
    """What backward makes again of the payload, or of the gates, has the bits of what was kept."""
    kept = on_threads("fp4, rows", 2, "exact"), on_threads("fp4, act kept", 2, "exact")
    for rank, want in enumerate(on_threads("fp4", 2, "exact")):
        for other in kept:
            for what in want:
                np.testing.assert_array_equal(other[rank][what], want[what], err_msg=what)
