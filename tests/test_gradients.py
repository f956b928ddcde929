"""Gradients of a MoE layer over thread ranks equal those of the same layer in one process, however it is called."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from moe_problem import Problem, communicator
from thread_ranks import run_thread_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HIDDEN = 32
PROBLEMS = {num_ranks: Problem(num_ranks, hidden=HIDDEN, seed=21) for num_ranks in (1, 2, 3)}


def all_experts(problem: Problem, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix for each expert."""
    values = np.random.default_rng(22).standard_normal((problem.num_experts, HIDDEN, HIDDEN)) / 8
    return torch.from_numpy(values).to(dtype)


def upstream(problem: Problem, rank: int) -> Tensor:
    """The gradient of the layer's output on a rank."""
    values = np.random.default_rng([23, rank]).standard_normal(problem.xs[rank].shape)
    return torch.from_numpy(values.astype(np.float32))


def dense(x: Tensor, idx: Tensor, weights: Tensor | None, experts: Tensor) -> Tensor:
    """The layer in one process."""
    out = torch.zeros_like(x)
    for slot in range(idx.shape[1]):
        y = torch.tanh(torch.einsum("th,thj->tj", x, experts[idx[:, slot].clamp(min=0)]))
        y = y if weights is None else weights[:, slot, None] * y
        out = out + torch.where(idx[:, slot, None] >= 0, y, torch.zeros_like(y))
    return out


def layer(
    comm: Any,
    x: Tensor,
    idx: Tensor,
    weights: Tensor | None,
    experts: Tensor,
    by_experts: bool = False,
    skip_unused: bool = False,
) -> Tensor:
    """The layer over the ranks; `experts` are the local ones. Experts without rows may stay out of the graph."""
    recv, handle = comm.dispatch(x, idx, weights, layout="expert")
    num_rows = sum(recv.num_rows_per_expert)
    parts = recv.x[:num_rows].split(recv.num_rows_per_expert)
    rows = [torch.tanh(part @ expert) for part, expert in zip(parts, experts, strict=True) if len(part)]
    if not skip_unused:
        rows.append(recv.x[num_rows:] * 0)
    y = torch.cat(rows) if rows else torch.zeros(recv.x.shape, dtype=recv.x.dtype)
    if by_experts and rows:
        y = (y * recv.topk_weights[:, None]).to(y.dtype)
    combined: Tensor = comm.combine(y, handle, apply_weights=not by_experts)
    return combined


def leaf(value: Tensor, needs_grad: bool = True) -> Tensor:
    return value.detach().clone().requires_grad_(needs_grad)


def dense_gradients(problem: Problem, with_weights: bool) -> tuple[list[list[Any]], Any]:
    """Output and gradients of x and weights per rank, and the gradient of all experts."""
    experts, results = leaf(all_experts(problem)), []
    for rank in range(problem.num_ranks):
        x, idx, weights = problem.mine(rank)
        x, weights = leaf(x), leaf(weights)
        out = dense(x, idx, weights if with_weights else None, experts)
        out.backward(upstream(problem, rank))
        results.append([out.detach(), x.grad, weights.grad])
    return results, experts.grad


@pytest.mark.parametrize("num_ranks", PROBLEMS)
@pytest.mark.parametrize("weights_are", ["trained", "frozen", "absent"])
def test_gradients_of_whatever_needs_them(num_ranks: int, weights_are: str) -> None:
    """x, weights and experts with and without gradients; fixed and free shapes; backward twice; inputs unchecked."""
    problem = PROBLEMS[num_ranks]
    expected, expected_of_experts = dense_gradients(problem, weights_are != "absent")
    ways = [  # shapes and whether the ranks compare their arguments
        {},
        {"expert_alignment": 4, "num_max_tokens_per_rank": 64},
        {"num_max_tokens_per_rank": 64, "check_inputs": False},
    ]
    flags = list(itertools.product((True, False), (True, False), (True, False), ways))

    def run(group: Any) -> None:
        for of_x, of_experts, by_experts, options in flags:
            if not (of_x or of_experts or weights_are == "trained"):
                continue
            if not (of_x or weights_are == "trained" or options.get("check_inputs", True)):
                continue  # a rank without rows learns of the gradient by that check
            with communicator(group, problem, "fp32", **options) as comm:
                mine = slice(comm.rank * comm.num_local_experts, (comm.rank + 1) * comm.num_local_experts)
                x, idx, weights = problem.mine(comm.rank)
                x, experts = leaf(x, of_x), leaf(all_experts(problem)[mine], of_experts)
                used = None if weights_are == "absent" else leaf(weights, weights_are == "trained")
                out = layer(comm, x, idx, used, experts, by_experts)
                wanted = [*expected[comm.rank], expected_of_experts[mine]]
                torch.testing.assert_close(out, wanted[0], rtol=1e-4, atol=1e-5)
                for times in (1, 2):
                    out.backward(upstream(problem, comm.rank), retain_graph=True)
                    for value, gradient in zip((x, used, experts), wanted[1:], strict=True):
                        if value is not None and value.requires_grad:
                            torch.testing.assert_close(value.grad, gradient * times, rtol=1e-3, atol=1e-4)
                        assert value is None or value.requires_grad or value.grad is None

    run_thread_ranks(run, num_ranks)


def test_float16() -> None:
    problem = PROBLEMS[3]
    expected, expected_of_experts = dense_gradients(problem, with_weights=True)

    def run(group: Any) -> None:
        with communicator(group, problem, "fp32", num_max_tokens_per_rank=64) as comm:
            mine = slice(comm.rank * comm.num_local_experts, (comm.rank + 1) * comm.num_local_experts)
            x, idx, weights = problem.mine(comm.rank, torch.float16)
            x, weights, experts = leaf(x), leaf(weights), leaf(all_experts(problem, torch.float16)[mine])
            out = layer(comm, x, idx, weights, experts)
            out.backward(upstream(problem, comm.rank).half())
            values = (out, x.grad, weights.grad, experts.grad)
            assert [value.dtype for value in values] == [torch.float16, torch.float16, torch.float32, torch.float16]
            for value, wanted in zip(values, [*expected[comm.rank], expected_of_experts[mine]], strict=True):
                torch.testing.assert_close(value.float(), wanted, rtol=2e-2, atol=2e-2)

    run_thread_ranks(run, 3)


def transposed(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


def every_second_row(value: Tensor) -> Tensor:
    return value.repeat_interleave(2, 0)[::2]


def left_half(value: Tensor) -> Tensor:
    return torch.cat([value, value], 1)[:, : value.shape[1]]


@pytest.mark.parametrize("strided", [transposed, every_second_row, left_half])
def test_strided_tensors(strided: Callable[[Tensor], Tensor]) -> None:
    """x, topk_idx, topk_weights, y and the gradient of the output, one after the other: the bits of contiguous ones."""
    names = ("x", "idx", "weights", "y", "grad")
    problem = PROBLEMS[2]

    def run(group: Any) -> None:
        with communicator(group, problem, "bf16") as comm:
            results = []
            for which in (None, *names):
                views = {name: strided if name == which else torch.clone for name in names}
                x, idx, weights = problem.mine(comm.rank)
                x, weights = leaf(x), leaf(weights)
                recv, handle = comm.dispatch(views["x"](x), views["idx"](idx), views["weights"](weights))
                out = comm.combine(views["y"](torch.tanh(recv.x)), handle)
                out.backward(views["grad"](upstream(problem, comm.rank)))
                results.append((out.detach(), x.grad, weights.grad))
            for result in results[1:]:
                assert all(torch.equal(got, wanted) for got, wanted in zip(result, results[0], strict=True))

    assert not strided(torch.ones(4, 4)).is_contiguous()
    run_thread_ranks(run, 2)


def test_expanded_gradient() -> None:
    """`out.sum()` hands backward a tensor of which every element is the same place in memory."""
    problem = PROBLEMS[2]

    def run(group: Any) -> None:
        with communicator(group, problem, "fp32") as comm:
            x, idx, weights = problem.mine(comm.rank)
            x.requires_grad_()
            recv, handle = comm.dispatch(x, idx, weights)
            comm.combine(recv.x, handle).sum().backward()
            factor = torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
            torch.testing.assert_close(x.grad, factor.expand_as(x), rtol=1e-6, atol=1e-6)

    run_thread_ranks(run, 2)


def test_topk_idx_may_be_overwritten_before_backward() -> None:
    """Training loops reuse their index buffers."""
    problem = PROBLEMS[2]

    def run(group: Any, overwrite: bool) -> Any:
        with communicator(group, problem, "fp32") as comm:
            x, idx, weights = problem.mine(comm.rank)
            idx, weights = idx.clone(), leaf(weights)
            recv, handle = comm.dispatch(x, idx, weights)
            out = comm.combine(torch.tanh(recv.x), handle)
            if overwrite:
                idx.copy_(idx.flip(1))
            out.backward(upstream(problem, comm.rank))
            return weights.grad

    pairs = zip(run_thread_ranks(run, 2, False), run_thread_ranks(run, 2, True), strict=True)
    assert all(torch.equal(before, after) for before, after in pairs)


def test_no_grad() -> None:
    """Nothing needs a gradient under no_grad; a dispatch made there serves a combine that does."""
    problem = PROBLEMS[2]

    def run(group: Any) -> None:
        with communicator(group, problem, "fp32") as comm:
            x, idx, weights = problem.mine(comm.rank)
            x, weights = leaf(x), leaf(weights)
            with torch.no_grad():
                recv, handle = comm.dispatch(x, idx, weights)
                out = comm.combine(recv.x, handle)
            assert not any(value.requires_grad for value in (recv.x, recv.topk_weights, out))
            y = leaf(recv.x)
            again = comm.combine(y, handle)
            assert torch.equal(again, out)
            again.sum().backward()
            torch.testing.assert_close(y.grad, recv.topk_weights[:, None].expand_as(y))
            assert x.grad is None
            assert weights.grad is None

    run_thread_ranks(run, 2)


@pytest.mark.parametrize("of_x, of_weights", [(True, False), (False, True)])
def test_only_what_needs_a_gradient_requires_one(of_x: bool, of_weights: bool) -> None:
    """Else combine would keep y, and backward compute what nobody reads."""
    problem = PROBLEMS[2]

    def run(group: Any) -> None:
        with communicator(group, problem, "fp32") as comm:
            x, idx, weights = problem.mine(comm.rank)
            recv, _ = comm.dispatch(leaf(x, of_x), idx, leaf(weights, of_weights))
            assert (recv.x.requires_grad, recv.topk_weights.requires_grad) == (of_x, of_weights)

    run_thread_ranks(run, 2)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("by_experts", [True, False])
@pytest.mark.parametrize("skip_unused", [True, False])
def test_activation_checkpointing(use_reentrant: bool, by_experts: bool, skip_unused: bool) -> None:
    """The recomputation communicates too, so all ranks must start it at the same point of backward.

    Rank 0 has all the rows: the other ranks' experts may be out of the graph, and then nothing but the anchor of
    combine makes them recompute.
    """
    problem = PROBLEMS[3]

    def run(group: Any, with_checkpoint: bool) -> list[Tensor]:
        with communicator(group, problem, "fp32") as comm:
            x, idx, weights = problem.mine(comm.rank)
            idx = torch.where(idx >= 0, idx % comm.num_local_experts, -1)
            x, weights, experts = leaf(x), leaf(weights), leaf(all_experts(problem)[: comm.num_local_experts])

            def forward(x: Tensor, weights: Tensor) -> Tensor:
                return layer(comm, x, idx, weights, experts, by_experts, skip_unused)

            if with_checkpoint:
                out = checkpoint(forward, x, weights, use_reentrant=use_reentrant)
            else:
                out = forward(x, weights)
            out.backward(upstream(problem, comm.rank))
            of_experts = torch.zeros_like(experts) if experts.grad is None else experts.grad
            return [out.detach(), x.grad, weights.grad, of_experts]

    plain = run_thread_ranks(run, 3, False)
    recomputed = run_thread_ranks(run, 3, True, timeout_secs=3.0)
    assert plain[0][3].any()
    for wanted, got in zip(plain, recomputed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_layers_over_two_communicators_of_one_group() -> None:
    """Their exchanges alternate, forward and backward."""
    problem = PROBLEMS[2]

    def run(group: Any) -> None:
        with communicator(group, problem, "fp32") as first, communicator(group, problem, "fp32") as second:
            mine = slice(first.rank * first.num_local_experts, (first.rank + 1) * first.num_local_experts)
            x, idx, weights = problem.mine(first.rank)

            def model(apply: Callable[..., Tensor], x: Tensor, weights: Tensor) -> Tensor:
                a = apply(first, x, idx, weights)
                b = apply(second, a, idx.flip(0), weights)
                return b + apply(first, b + x, idx, weights)

            def alone(_comm: Any, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
                return dense(x, idx, weights, all_experts(problem))

            def over_ranks(comm: Any, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
                return layer(comm, x, idx, weights, all_experts(problem)[mine])

            results = []
            for apply in (alone, over_ranks):
                leaves = leaf(x), leaf(weights)
                out = model(apply, *leaves)
                out.backward(upstream(problem, first.rank))
                results.append([out.detach(), *(value.grad for value in leaves)])
            torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)

    run_thread_ranks(run, 2)
