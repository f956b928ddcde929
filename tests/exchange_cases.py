"""What every transport must do: each case runs on all ranks of a group and returns what must not depend on it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fp4comm
from fp4comm.precision import Precision
from fp4comm.reference import exchange as reference

TIMEOUT_SECS = 30.0


@dataclass
class Problem:
    """The same random MoE input, built alike on every rank: a list per rank of each input.

    Token counts are uneven, one rank of several has none, some choices are -1, and some tokens have no expert at all.
    """

    num_ranks: int
    num_local_experts: int = 3
    num_topk: int = 4
    hidden: int = 160
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.num_experts = self.num_ranks * self.num_local_experts
        counts = [0 if rank == 1 else 5 + 7 * rank for rank in range(self.num_ranks)]
        self.xs = [rng.standard_normal((n, self.hidden)).astype(np.float32) * 3 for n in counts]
        self.weights = [rng.uniform(0.1, 1.0, (n, self.num_topk)).astype(np.float32) for n in counts]
        self.idx = [self._choices(rng, n) for n in counts]
        self.num_tokens = counts

    def _choices(self, rng: np.random.Generator, num_tokens: int) -> np.ndarray:
        chosen = [rng.permutation(self.num_experts) for _ in range(num_tokens)]
        idx = np.full((num_tokens, self.num_topk), -1, np.int64)
        width = min(self.num_topk, self.num_experts)
        for token, experts in enumerate(chosen):
            idx[token, :width] = experts[:width]
        idx[rng.random(idx.shape) < 0.15] = -1
        idx[: 1 if num_tokens > 2 else 0] = -1
        return idx

    def mine(self, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """x, topk_idx and topk_weights of a rank."""
        x = torch.from_numpy(self.xs[rank]).to(dtype)
        return x, torch.from_numpy(self.idx[rank]), torch.from_numpy(self.weights[rank])


def communicator(group: Any, problem: Problem, precision: Precision | str = "fp32", **options: Any) -> Any:
    return fp4comm.EPCommunicator(
        group,
        num_experts=problem.num_experts,
        hidden=problem.hidden,
        precision=precision,
        timeout_secs=TIMEOUT_SECS,
        **options,
    )


def size_of(group: Any) -> int:
    """Ranks of a group of any kind."""
    if group is None:
        return 1
    if hasattr(group, "num_ranks"):
        return int(group.num_ranks)
    return int(group.Get_size() if hasattr(group, "Get_size") else group.size())


def digest(*tensors: Tensor) -> int:
    """A checksum of the bits."""
    value = 0
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        value = zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), value)
    return value


def expert_function(rows: Tensor, experts: Tensor) -> Tensor:
    """A different function for each expert (a global index per row), so that misrouting shows."""
    factor = 1.0 + 0.25 * experts.to(rows.dtype).unsqueeze(1)
    return rows * factor


def experts_of_rows(recv: Any, comm: Any) -> Tensor:
    """Global expert of each row of the expert layout, padding included."""
    local = torch.repeat_interleave(
        torch.arange(comm.num_local_experts), torch.tensor(recv.num_rows_per_expert, dtype=torch.int64)
    )
    missing = recv.x.shape[0] - local.shape[0]
    return torch.cat([local, torch.zeros(missing, dtype=torch.int64)]) + comm.rank * comm.num_local_experts


# ---- cases -----------------------------------------------------------------------------------------------------------


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
            np.testing.assert_array_equal(recv.x.numpy(), mine.x)
            np.testing.assert_array_equal(recv.topk_idx.numpy(), mine.topk_idx)
            np.testing.assert_array_equal(recv.topk_weights.numpy(), mine.topk_weights)
            home = reference.combine([a.x * 2 for a in arrived], arrived, problem.num_tokens, through)
            np.testing.assert_array_equal(out.numpy(), home[comm.rank])
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
                    np.testing.assert_array_equal(recv.x.numpy(), x_rows)
                    expected = [0 if r is None else there.topk_weights[r] for r in rows]
                    np.testing.assert_array_equal(recv.topk_weights.numpy(), np.array(expected, np.float32))
                    assert sum(recv.num_rows_per_expert) == len(rows)
                    assert all(n % alignment == 0 for n in recv.num_rows_per_expert)
                    counts = [(there.topk_idx == e).sum() for e in range(comm.num_local_experts)]
                    assert recv.num_recv_tokens_per_expert.tolist() == counts
                sums.append(reference.local_sums(y_rows, rows, there, weighted=True))
            home = reference.combine(sums, arrived, problem.num_tokens, through)
            np.testing.assert_array_equal(out.numpy(), home[comm.rank])
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
            if layout == "expert":
                most = most * min(problem.num_topk, problem.num_local_experts) + 3 * exact.num_local_experts
                most = most // 4 * 4
            assert recv_fixed.x.shape[0] == most
            assert torch.equal(recv_fixed.x[:num_rows], recv.x)
            assert not recv_fixed.x[num_rows:].any()
            assert torch.equal(recv_fixed.topk_weights[:num_rows], recv.topk_weights)
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
        again, _ = comm.dispatch(fp8, handle=handle, out=torch.float32)
        assert torch.equal(recv.x.dequantize(torch.float32), again.x)
        columns = recv.to_fp8_columns()
        assert torch.equal(columns.dequantize(), again.x)
        payload = recv.payload
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


def moe_on_one_rank(problem: Problem, x: Tensor, idx: Tensor, weights: Tensor, rank_sums: bool = True) -> Tensor:
    """The MoE of the cases for some tokens, in one process, sums in the order that ranks give them."""
    out = torch.zeros_like(x)
    for rank in range(problem.num_ranks):
        local = torch.zeros_like(x)
        for slot in range(idx.shape[1]):
            here = (idx[:, slot] >= 0) & (idx[:, slot] // problem.num_local_experts == rank)
            term = weights[:, slot, None] * expert_function(x, idx[:, slot].clamp(min=0))
            local = local + torch.where(here[:, None], term, torch.zeros_like(term))
        out = out + local
    return out


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
                y = y * recv.topk_weights.unsqueeze(1)
            out = comm.combine(y, handle, apply_weights=not by_experts)
            upstream = torch.from_numpy(np.random.default_rng(9).standard_normal(out.shape).astype(np.float32))
            out.backward(upstream)

            x_alone, weights_alone = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
            alone = moe_on_one_rank(problem, x_alone, idx, weights_alone)
            alone.backward(upstream)
            assert torch.equal(out, alone)
            torch.testing.assert_close(x.grad, x_alone.grad, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(weights.grad, weights_alone.grad, rtol=1e-5, atol=1e-4)
            digests.append(digest(out, x.grad, weights.grad))
    return digests


def inner(a: Tensor, b: Tensor) -> float:
    """Inner product in float64."""
    return float((a.detach().double() * b.detach().double()).sum())


def total(comm: Any, value: float) -> float:
    """Sum over the ranks."""
    return float(sum(np.frombuffer(part)[0] for part in comm._transport.all_gather_bytes(np.float64(value).tobytes())))


def case_dispatch_and_combine_are_adjoint(group: Any) -> list[int]:
    """<dispatch(x), y> = <x, combine(y)>, summed over the ranks, and the same for the weights."""
    problem = Problem(size_of(group), seed=11)
    with communicator(group, problem, "fp32", expert_alignment=4) as comm:
        rng = np.random.default_rng(comm.rank)
        x, idx, weights = problem.mine(comm.rank)
        for layout in ("rank", "expert"):
            weights.requires_grad_().grad = None
            recv, handle = comm.dispatch(x, idx, weights, layout=layout)
            y = torch.from_numpy(rng.standard_normal(recv.x.shape).astype(np.float32))
            home = comm.combine(y, handle, apply_weights=False)
            there, back = total(comm, inner(recv.x, y)), total(comm, inner(x, home))
            assert abs(there - back) < 1e-5 * (1 + abs(there)), (there, back)
            upstream = torch.from_numpy(rng.standard_normal(recv.topk_weights.shape).astype(np.float32))
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
        upstream = torch.from_numpy(np.random.default_rng(comm.rank).standard_normal(x.shape).astype(np.float32))
        shift = torch.zeros(comm.dispatch(x, idx, weights)[0].x.shape)

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
    """The rank layout: experts loop over their slots themselves; gradients equal those of one process."""
    problem = Problem(size_of(group), seed=5)
    with communicator(group, problem, "fp32") as comm:
        x, idx, weights = problem.mine(comm.rank)
        x.requires_grad_()
        weights.requires_grad_()
        recv, handle = comm.dispatch(x, idx, weights, layout="rank")
        y = torch.zeros_like(recv.x)
        for slot in range(problem.num_topk):
            experts = recv.topk_idx[:, slot]
            global_experts = experts.clamp(min=0) + comm.rank * comm.num_local_experts
            term = recv.topk_weights[:, slot, None] * expert_function(recv.x, global_experts)
            y = y + torch.where((experts >= 0)[:, None], term, torch.zeros_like(term))
        out = comm.combine(y, handle)
        upstream = torch.from_numpy(np.random.default_rng(9).standard_normal(out.shape).astype(np.float32))
        out.backward(upstream)
        x_alone, weights_alone = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
        alone = moe_on_one_rank(problem, x_alone, idx, weights_alone)
        alone.backward(upstream)
        assert torch.equal(out, alone)
        torch.testing.assert_close(x.grad, x_alone.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights.grad, weights_alone.grad, rtol=1e-5, atol=1e-4)
        return [digest(out, x.grad, weights.grad)]


def case_unused_experts_take_part_in_backward(group: Any) -> list[int]:
    """All tokens go to rank 0; the other ranks' experts never touch the graph, yet nobody waits for their backward."""
    problem = Problem(size_of(group), seed=6)
    with communicator(group, problem, "fp4") as comm:
        x, idx, weights = problem.mine(comm.rank)
        x.requires_grad_()
        idx = torch.where(idx >= 0, idx % comm.num_local_experts, -1)
        recv, handle = comm.dispatch(x, idx, weights)
        y = recv.x * 2 if comm.rank == 0 else torch.zeros(recv.x.shape)
        out = comm.combine(y, handle)
        out.sum().backward()
        assert x.grad is not None
        return [digest(out, x.grad)]


def case_every_precision_leg(group: Any) -> list[int]:
    """Each leg is one wire format from the reference, forward and backward; others stay exact."""
    problem = Problem(size_of(group), seed=7)
    digests = []
    for leg in ("dispatch", "combine", "grad_dispatch", "grad_combine"):
        for wire in ("bf16", "fp8", "mxfp4"):
            legs = dict.fromkeys(("dispatch", "combine", "grad_dispatch", "grad_combine"), "fp32") | {leg: wire}
            with communicator(group, problem, Precision(**legs)) as comm:
                x, idx, weights = problem.mine(comm.rank)
                x.requires_grad_()
                recv, handle = comm.dispatch(x, idx, weights, layout="rank")
                out = comm.combine(recv.x * 1, handle)
                upstreams = [
                    np.random.default_rng(rank).standard_normal(v.shape).astype(np.float32)
                    for rank, v in enumerate(problem.xs)
                ]
                out.backward(torch.from_numpy(upstreams[comm.rank]))
                modes = {name: "rceil" if name.startswith("grad_") else "even" for name in legs}
                through = {name: reference.through_wire(legs[name], modes[name]) for name in legs}

                def there_and_back(values: list[Any], first: str, second: str, through: Any = through) -> Any:
                    routing = problem.idx, problem.weights, problem.num_experts
                    arrived = reference.dispatch(values, *routing, through[first])
                    return reference.combine([a.x for a in arrived], arrived, problem.num_tokens, through[second])

                np.testing.assert_array_equal(
                    out.detach().numpy(), there_and_back(problem.xs, "dispatch", "combine")[comm.rank]
                )
                np.testing.assert_array_equal(
                    x.grad.numpy(), there_and_back(upstreams, "grad_dispatch", "grad_combine")[comm.rank]
                )
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
            recv, handle = comm.dispatch(one, torch.full((len(one), topk), comm.num_experts - 1))
            assert recv.num_recv_tokens_per_expert.sum() == (topk if comm.rank == num_ranks - 1 else 0)
            assert torch.equal(comm.combine(recv.x, handle), one * topk)
    return digests


def case_cached_handle(group: Any) -> list[int]:
    """A handle repeats its routes for other tokens, forward and backward, with less on the wire."""
    problem = Problem(size_of(group), seed=14)
    with communicator(group, problem, "bf16") as comm:
        x, idx, weights = problem.mine(comm.rank)
        weights.requires_grad_()
        _, handle = comm.dispatch(x, idx, weights)
        first_bytes = comm.traffic["dispatch"]
        fresh, fresh_handle = comm.dispatch(-x, idx, weights)
        other = (-x).requires_grad_()
        recv, handle = comm.dispatch(other, handle=handle)
        assert comm.traffic["dispatch"] - 2 * first_bytes <= first_bytes
        assert torch.equal(recv.x, fresh.x)
        assert torch.equal(recv.topk_weights, fresh.topk_weights)
        out = comm.combine(recv.x, handle)
        assert torch.equal(out, comm.combine(fresh.x, fresh_handle))
        out.sum().backward()
        assert other.grad.any() or not len(x)
        return [digest(recv.x, out, other.grad)]


def case_repeated_runs_are_equal(group: Any) -> list[int]:
    """Stochastic rounding and Hadamard included: a new communicator with the same seed repeats every bit."""
    problem = Problem(size_of(group), seed=8)

    def run(seed: int) -> int:
        with communicator(group, problem, "mxfp4", seed=seed) as comm:
            x, idx, weights = problem.mine(comm.rank, torch.bfloat16)
            x.requires_grad_()
            weights.requires_grad_()
            recv, handle = comm.dispatch(x, idx, weights)
            out = comm.combine(recv.x * 3, handle)
            out.float().square().sum().backward()
            return digest(out, x.grad, weights.grad)

    first = run(0)
    assert first == run(0)
    return [first, run(1)]


def case_traffic_counts_remote_bytes(group: Any) -> list[int]:
    """Bytes on the wire are counted as sent to other ranks, one row per token and rank."""
    problem = Problem(size_of(group), hidden=1024, seed=10)
    with communicator(group, problem, "fp4") as comm:
        x, idx, weights = problem.mine(comm.rank)
        recv, handle = comm.dispatch(x, idx, weights)
        comm.combine(recv.x, handle)
        ranks = np.where(problem.idx[comm.rank] >= 0, problem.idx[comm.rank] // comm.num_local_experts, -1)
        remote = sum(len(set(row.tolist()) - {-1, comm.rank}) for row in ranks)
        assert comm.traffic["dispatch"] == remote * (512 + 32 + 4 * 6 + 8)  # nibbles, scales, routing, padding to 32
        everyone = reference.dispatch(problem.xs, problem.idx, problem.weights, problem.num_experts, lambda v: v)
        away = sum(source != comm.rank for source, _ in everyone[comm.rank].sources)
        assert comm.traffic["combine"] == away * 2048
        return [comm.traffic["dispatch"], comm.traffic["combine"]]


CASES: dict[str, Callable[[Any], list[int]]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}


def run_cases(group: Any) -> dict[str, list[int]]:
    """All cases on one rank."""
    return {name: case(group) for name, case in CASES.items()}
