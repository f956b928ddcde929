"""What every transport must do: each case runs on all ranks of a group and returns what must not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import moe_problem
import numpy as np
import precision_cases
import torch
from moe_problem import (
    Problem,
    communicator,
    digest,
    expert_function,
    experts_of_rows,
    floats_like,
    host,
    moe_on_one_rank,
    num_remote_rows,
    size_of,
    times,
    total,
)
from numerics import tensors_on
from torch import Tensor

import fp4comm
from fp4comm.precision import Precision
from fp4comm.reference import exchange as reference
from fp4comm.transport import make_transport


def inner(a: Tensor, b: Tensor) -> float:
    """Inner product in float64."""
    return float((a.detach().double() * b.detach().double()).sum())


def case_rank_layout_equals_reference(group: Any) -> list[int]:
    """Every wire: received rows, metadata and combined rows are the reference's, bit for bit."""
    problem = Problem(size_of(group))
    digests = []
    for wire in ("fp32", "bf16", "fp8", "mxfp4"):
        with communicator(group, problem, Precision(wire, wire, wire, wire)) as comm:
            x, idx, weights = problem.mine(comm.rank)
            recv, handle = comm.dispatch(x, idx, weights, layout="rank")
            out = comm.combine(recv.x * 2, handle)
            through = reference.through_wire(wire)
            arrived = reference.dispatch(problem.xs, problem.idx, problem.weights, problem.num_experts, through)
            mine = arrived[comm.rank]
            np.testing.assert_array_equal(host(recv.x), mine.x)
            np.testing.assert_array_equal(host(recv.topk_idx), mine.topk_idx)
            np.testing.assert_array_equal(host(recv.topk_weights), mine.topk_weights)
            home = reference.combine([a.x * 2 for a in arrived], arrived, problem.num_tokens, through)
            np.testing.assert_array_equal(host(out), home[comm.rank])
            digests.append(digest(recv.x, out))
    return digests


def case_expert_layout_equals_reference(group: Any) -> list[int]:
    """Every wire and alignment: expert order, padding, weights and weighted sum are the reference's, bit for bit."""
    problem = Problem(size_of(group), seed=1)
    digests = []
    for wire, alignment in (("fp32", 1), ("bf16", 16), ("fp8", 8), ("mxfp4", 16)):
        options = {"expert_alignment": alignment}
        with communicator(group, problem, Precision(wire, wire, wire, wire), **options) as comm:
            x, idx, weights = problem.mine(comm.rank)
            recv, handle = comm.dispatch(x, idx, weights)
            y = expert_function(recv.x, experts_of_rows(recv, comm))
            out = comm.combine(y, handle)
            through = reference.through_wire(wire)
            arrived = reference.dispatch(problem.xs, problem.idx, problem.weights, problem.num_experts, through)
            sums = []
            for rank, there in enumerate(arrived):
                rows = reference.expert_rows(there, comm.num_local_experts, alignment)
                blank = np.zeros(problem.hidden, np.float32)
                x_rows = np.array([blank if r is None else there.x[r[0]] for r in rows], np.float32)
                x_rows = x_rows.reshape(-1, problem.hidden)
                experts = [rank * comm.num_local_experts + (0 if r is None else int(there.topk_idx[r])) for r in rows]
                y_rows = x_rows * (1 + 0.25 * np.array(experts, np.float32))[:, None].astype(np.float32)
                if rank == comm.rank:
                    np.testing.assert_array_equal(host(recv.x), x_rows)
                    expected = [0 if r is None else there.topk_weights[r] for r in rows]
                    np.testing.assert_array_equal(host(recv.topk_weights), np.array(expected, np.float32))
                    assert sum(recv.num_rows_per_expert) == len(rows)
                    assert all(n % alignment == 0 for n in recv.num_rows_per_expert)
                    counts = [(there.topk_idx == e).sum() for e in range(comm.num_local_experts)]
                    assert recv.num_recv_tokens_per_expert.tolist() == counts
                sums.append(reference.local_sums(y_rows, rows, there, weighted=True))
            home = reference.combine(sums, arrived, problem.num_tokens, through)
            np.testing.assert_array_equal(host(out), home[comm.rank])
            digests.append(digest(recv.x, out))
    return digests


def case_fixed_capacity(group: Any) -> list[int]:
    """Fixed shapes hold the same rows as exact ones, then zeros; combine gives the same bits."""
    problem = Problem(size_of(group), seed=2)
    digests = []
    for layout in ("rank", "expert"):
        with (
            communicator(group, problem, "fp4", expert_alignment=4) as exact,
            communicator(group, problem, "fp4", expert_alignment=4, num_max_tokens_per_rank=64) as fixed,
        ):
            x, idx, weights = problem.mine(exact.rank, torch.bfloat16)
            recv, handle = exact.dispatch(x, idx, weights, layout=layout)
            recv_fixed, handle_fixed = fixed.dispatch(x, idx, weights, layout=layout)
            num_rows = recv.x.shape[0]
            most = 64 * exact.num_ranks
            places = torch.arange(num_rows)
            if layout == "expert":
                most = most * min(problem.num_topk, problem.num_local_experts) + 3 * exact.num_local_experts
                most = most // 4 * 4
            else:
                places = torch.nonzero((recv_fixed.topk_idx >= 0).any(1)).flatten().cpu()
                place = torch.zeros(most, dtype=torch.bool)
                place[places] = True
                assert all(run.sort(descending=True, stable=True)[0].equal(run) for run in place.view(-1, 64).int())
            rest = torch.ones(most, dtype=torch.bool)
            rest[places] = False
            assert recv_fixed.x.shape[0] == most
            assert torch.equal(recv_fixed.x[places], recv.x)
            assert not recv_fixed.x[rest].any()
            assert torch.equal(recv_fixed.topk_weights[places], recv.topk_weights)
            assert not recv_fixed.topk_weights[rest].any()
            out = exact.combine(recv.x, handle)
            assert torch.equal(out, fixed.combine(recv_fixed.x, handle_fixed))
            digests.append(digest(recv.x, out))
    return digests


def case_fp8_arrival(group: Any) -> list[int]:
    """MXFP4 arrives as FP8 rows and columns that mean the same numbers as its BF16 form; FP8 input needs no detour."""
    problem = Problem(size_of(group), hidden=256, seed=3)
    with communicator(group, problem, "fp4", expert_alignment=16) as comm:
        x, idx, weights = problem.mine(comm.rank)
        fp8 = fp4comm.quantize_fp8(x)
        recv, handle = comm.dispatch(fp8, idx, weights, out="fp8")
        columns, payload = recv.to_fp8_columns(), recv.payload  # with peers they are not there for ever
        again, _ = comm.dispatch(fp8, handle=handle, out=torch.float32)
        by_row, _ = comm.dispatch(fp8, handle=handle, out="fp8_rows")
        assert torch.equal(by_row.x.dequantize(), again.x)
        assert torch.equal(recv.x.dequantize(torch.float32), again.x)
        assert torch.equal(columns.dequantize(), again.x)
        with communicator(group, problem, "fp4", expert_alignment=16, num_max_tokens_per_rank=64) as fixed:
            at_most = fixed.dispatch(fp8, idx, weights)[0]
            assert len(at_most.x) > len(again.x)
            assert torch.equal(at_most.to_fp8_columns().dequantize(), again.x)
        assert payload.packed.shape == (recv.topk_idx.shape[0], problem.hidden // 2)
        expected = fp4comm.quantize_mxfp4(fp8)
        everyone = reference.dispatch(
            [np.zeros_like(rows) for rows in problem.xs], problem.idx, problem.weights, problem.num_experts, lambda v: v
        )
        own = [token for source, token in everyone[comm.rank].sources if source == comm.rank]
        start = sum(source < comm.rank for source, _ in everyone[comm.rank].sources)
        assert torch.equal(payload.packed[start : start + len(own)], expected.packed[own])
        assert torch.equal(payload.scales[start : start + len(own)], expected.scales[own])
        return [digest(recv.x.data.view(torch.uint8), recv.x.scales, columns.data.view(torch.uint8), columns.scales)]


def case_gradients_equal_one_rank(group: Any) -> list[int]:
    """With an exact wire, forward and gradients equal the same MoE in one process; weights in combine or experts."""
    problem = Problem(size_of(group), seed=4)
    digests = []
    for by_experts in (False, True):
        with communicator(group, problem, "fp32", expert_alignment=2) as comm:
            x, idx, weights = problem.mine(comm.rank)
            x.requires_grad_()
            weights.requires_grad_()
            recv, handle = comm.dispatch(x, idx, weights)
            y = expert_function(recv.x, experts_of_rows(recv, comm))
            if by_experts:
                y = times(y, recv.topk_weights)
            out = comm.combine(y, handle, apply_weights=not by_experts)
            upstream = floats_like(np.random.default_rng(9), out)
            out.backward(upstream)

            x_alone, weights_alone = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
            alone = moe_on_one_rank(problem, x_alone, idx, weights_alone)
            alone.backward(upstream)
            assert torch.equal(out, alone)
            torch.testing.assert_close(x.grad, x_alone.grad, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(weights.grad, weights_alone.grad, rtol=1e-5, atol=1e-4)
            digests.append(digest(out, x.grad, weights.grad))
    return digests


def case_dispatch_and_combine_are_adjoint(group: Any) -> list[int]:
    """<dispatch(x), y> = <x, combine(y)>, summed over the ranks, and the same for the weights."""
    problem = Problem(size_of(group), seed=11)
    with communicator(group, problem, "fp32", expert_alignment=4) as comm:
        rng = np.random.default_rng(comm.rank)
        x, idx, weights = problem.mine(comm.rank)
        for layout in ("rank", "expert"):
            weights.requires_grad_().grad = None
            recv, handle = comm.dispatch(x, idx, weights, layout=layout)
            y = floats_like(rng, recv.x)
            home = comm.combine(y, handle, apply_weights=False)
            there, back = total(comm, inner(recv.x, y)), total(comm, inner(x, home))
            assert abs(there - back) < 1e-5 * (1 + abs(there)), (there, back)
            upstream = floats_like(rng, recv.topk_weights)
            (home.sum() * 0 + (recv.topk_weights * upstream).sum()).backward()
            there, back = total(comm, inner(recv.topk_weights, upstream)), total(comm, inner(weights, weights.grad))
            assert abs(there - back) < 1e-5 * (1 + abs(there)), (there, back)
    return []


def case_gradients_are_finite_differences(group: Any) -> list[int]:
    """Experts that are not linear; single entries of x, y and topk_weights of every rank are moved both ways."""
    problem = Problem(size_of(group), num_topk=2, hidden=32, seed=12)
    step = 2.0**-6
    with communicator(group, problem, "fp32") as comm:
        x, idx, weights = (value.clone() for value in problem.mine(comm.rank))
        upstream = floats_like(np.random.default_rng(comm.rank), x)
        shift = torch.zeros_like(comm.dispatch(x, idx, weights)[0].x)

        def loss(x: Tensor, weights: Tensor, shift: Tensor) -> Tensor:
            recv, handle = comm.dispatch(x, idx, weights)
            y = torch.tanh(expert_function(recv.x, experts_of_rows(recv, comm))) + shift
            return (comm.combine(y, handle) * upstream).sum()

        leaves = [value.requires_grad_() for value in (x, weights, shift)]
        loss(*leaves).backward()
        for owner in range(comm.num_ranks):
            for which, leaf in enumerate(leaves):
                for pick in range(3):
                    moved = []
                    for sign in (1.0, -1.0):
                        values = [value.detach().clone() for value in leaves]
                        if comm.rank == owner and leaf.numel():
                            values[which].view(-1)[(pick * 97) % leaf.numel()] += sign * step
                        moved.append(total(comm, float(loss(*values))))
                    slope = (moved[0] - moved[1]) / (2 * step)
                    if comm.rank == owner and leaf.numel():
                        expected = float(leaf.grad.view(-1)[(pick * 97) % leaf.numel()])
                        assert abs(slope - expected) < 2e-3 * (1 + abs(expected)), (which, pick, slope, expected)
    return []


def case_rank_layout_gradients(group: Any) -> list[int]:
    """The rank layout, free and fixed in size: experts loop over their slots; gradients equal those of one process."""
    problem = Problem(size_of(group), seed=5)
    digests = []
    for capacity in (None, 64):
        with communicator(group, problem, "fp32", num_max_tokens_per_rank=capacity) as comm:
            x, idx, weights = problem.mine(comm.rank)
            x.requires_grad_()
            weights.requires_grad_()
            recv, handle = comm.dispatch(x, idx, weights, layout="rank")
            y = torch.zeros_like(recv.x)
            padding = recv.topk_idx.new_full((len(recv.x) - len(recv.topk_idx), problem.num_topk), -1)
            for experts, factor in zip(torch.cat([recv.topk_idx, padding]).T, recv.topk_weights.T, strict=True):
                global_experts = experts.clamp(min=0) + comm.rank * comm.num_local_experts
                term = factor[:, None] * expert_function(recv.x, global_experts)
                y = y + torch.where((experts >= 0)[:, None], term, torch.zeros_like(term))
            out = comm.combine(y, handle)
            upstream = floats_like(np.random.default_rng(9), out)
            out.backward(upstream)
            x_alone, weights_alone = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
            alone = moe_on_one_rank(problem, x_alone, idx, weights_alone)
            alone.backward(upstream)
            assert torch.equal(out, alone)
            torch.testing.assert_close(x.grad, x_alone.grad, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(weights.grad, weights_alone.grad, rtol=1e-5, atol=1e-4)
            digests.append(digest(out, x.grad))
    return digests


def case_extreme_sizes(group: Any) -> list[int]:
    """More experts than a byte holds, one expert per rank, one token, the smallest and an odd width, a wide top-k."""
    num_ranks = size_of(group)
    digests = []
    for local, topk, hidden in ((300, 16, 32), (1, 1, 96), (2, 9, 224), (40, 8, 7168)):
        problem = Problem(num_ranks, num_local_experts=local, num_topk=topk, hidden=hidden, seed=13)
        with communicator(group, problem, "fp32", expert_alignment=3) as comm:
            x, idx, weights = problem.mine(comm.rank)
            recv, handle = comm.dispatch(x, idx.to(torch.int32), weights)
            out = comm.combine(expert_function(recv.x, experts_of_rows(recv, comm)), handle)
            assert torch.equal(out, moe_on_one_rank(problem, x, idx, weights))
            digests.append(digest(recv.x, out))
            one = x.new_ones(1 if comm.rank == 0 else 0, hidden)
            recv, handle = comm.dispatch(one, idx.new_full((len(one), topk), comm.num_experts - 1))
            assert recv.num_recv_tokens_per_expert.sum() == (topk if comm.rank == num_ranks - 1 else 0)
            assert torch.equal(comm.combine(recv.x, handle), one * topk)
    return digests


def case_cached_handle(group: Any) -> list[int]:
    """A handle repeats its routes for other tokens, forward and backward, without routing metadata on the wire."""
    problem = Problem(size_of(group), seed=14)
    with communicator(group, problem, "bf16") as comm:
        x, idx, weights = problem.mine(comm.rank)
        weights = (weights * 8).ceil() / 8  # whose sums are exact in bfloat16
        weights.requires_grad_()
        fresh, fresh_handle = comm.dispatch(-x, idx, weights)
        first_bytes = comm.traffic["dispatch"]
        other = (-x).requires_grad_()
        recv, handle = comm.dispatch(other, handle=fresh_handle)
        num_bytes = 2 * problem.hidden
        remote_rows = num_remote_rows(problem, comm.rank)
        assert comm.traffic["dispatch"] - first_bytes == remote_rows * num_bytes
        assert first_bytes == remote_rows * (num_bytes + 32)  # 4 weights, 4 experts, padding
        assert torch.equal(recv.x, fresh.x)
        assert torch.equal(recv.topk_weights, fresh.topk_weights)
        out = comm.combine(recv.x * 2, handle)
        assert torch.equal(out, comm.combine(fresh.x * 2, fresh_handle))
        out.sum().backward()
        factor = torch.where(idx >= 0, weights.detach(), 0).sum(1, keepdim=True) * 2
        assert torch.equal(other.grad, factor.expand_as(x))
        assert weights.grad is None  # a handle has them as constants
        return [digest(recv.x, out, other.grad)]


def case_unused_experts_take_part_in_backward(group: Any) -> list[int]:
    """Only rank 0's experts are in the graph; others have no rows, or rows whose y is detached. Nobody waits."""
    problem = Problem(size_of(group), seed=6)
    digests = []
    for all_to_first, by_experts in ((True, False), (False, False), (False, True)):
        with communicator(group, problem, "fp32", check_inputs=True) as comm:
            x, idx, weights = problem.mine(comm.rank)
            x.requires_grad_()
            weights.requires_grad_()
            if all_to_first:
                idx = torch.where(idx >= 0, idx % comm.num_local_experts, -1)
            recv, handle = comm.dispatch(x, idx, weights)
            assert bool(len(recv.x)) == (comm.rank == 0 or not all_to_first)
            y = times(recv.x, recv.topk_weights) * 2 if by_experts else recv.x * 2
            out = comm.combine(y if comm.rank == 0 else y.detach(), handle, apply_weights=not by_experts)
            out.sum().backward()
            used = (idx >= 0) & (idx < comm.num_local_experts)  # on rank 0
            factor = torch.where(used, weights.detach() * 2, 0).sum(1, keepdim=True)
            torch.testing.assert_close(x.grad, factor.expand_as(x), rtol=1e-6, atol=1e-6)
            # a weight that combine applies has a gradient whether y has one or not
            slope = torch.where(used if by_experts else idx >= 0, (x.detach() * 2).sum(1, keepdim=True), 0)
            torch.testing.assert_close(weights.grad, slope, rtol=1e-4, atol=1e-4)
            digests.append(digest(out, x.grad, weights.grad))
    return digests


def case_training_of_experts_alone(group: Any) -> list[int]:
    """x and weights are frozen; y needs a gradient only where there are rows, and rank 0 has all of them."""
    problem = Problem(size_of(group), seed=16)
    with communicator(group, problem, "fp32", check_inputs=True) as comm:
        x, idx, weights = problem.mine(comm.rank)
        idx = torch.where(idx >= 0, idx % comm.num_local_experts, -1)
        scale = x.new_ones(problem.hidden).requires_grad_()
        recv, handle = comm.dispatch(x, idx, weights)
        out = comm.combine(recv.x * scale if len(recv.x) else torch.zeros_like(recv.x), handle)
        assert out.requires_grad
        out.sum().backward()
        if comm.rank:
            assert scale.grad is None
            return [digest(out)]
        terms = [
            (np.where(idx >= 0, weights, 0).sum(1, keepdims=True) * x).sum(0)
            for x, idx, weights in zip(problem.xs, problem.idx, problem.weights, strict=True)
        ]
        torch.testing.assert_close(scale.grad.cpu(), torch.from_numpy(sum(terms)), rtol=1e-4, atol=1e-4)
        return [digest(out)]


CASES: dict[str, Callable[[Any], list[int]]] = {
    name.removeprefix("case_"): function
    for name, function in (globals() | vars(precision_cases)).items()
    if name.startswith("case_")
}


def run_cases(group: Any, gpu_transport: str | None = None, shares_transport: bool = False) -> dict[str, list[int]]:
    """All cases on one rank; on a GPU with that transport, if one is given. Ranks take the GPUs in turn.

    shares_transport: all communicators are over one transport, which saves a start of NCCL for each.
    """
    if gpu_transport is None:
        return {name: case(group) for name, case in CASES.items()}
    rank = (group.Get_rank() if hasattr(group, "Get_rank") else group.rank()) % torch.cuda.device_count()
    torch.cuda.set_device(rank)
    moe_problem.gpu_transport = gpu_transport
    shared = make_transport(group, gpu_transport, timeout_secs=moe_problem.TIMEOUT_SECS) if shares_transport else None
    with tensors_on(f"cuda:{rank}"):
        results = {name: case(shared or group) for name, case in CASES.items()}
    if shared:
        shared.close()
    return results
