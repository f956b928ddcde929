"""What ranks do in the tests of `fp4comm.moe`: the experts of a small problem, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from moe_problem import Problem, communicator
from torch import Tensor

from fp4comm import Leg, Precision
from fp4comm.moe import GroupedExperts, Recipe

FFN_HIDDEN = 96
_GRADIENT = Leg("mxfp4", "rceil")
RECIPES = {name: Recipe.of(name) for name in ("fp32", "bf16", "fp8_flow", "fp4")} | {
    "mxfp4": Recipe(Precision("mxfp4", "mxfp4", _GRADIENT, _GRADIENT), "fp8", "payload"),  # fp4_all without randomness
    "mxfp4, floats": Recipe("fp4", "float", "payload"),
    "fp4, act kept": Recipe("fp4", "fp8", "payload", keeps_act=True),
    "fp4, rows": Recipe("fp4", "fp8", "rows"),
    "fp8_flow, blocks": Recipe("fp8", "fp8", "rows", keeps_act=True, scaling="block"),
    "fp4, blocks": Recipe("fp4", "fp8", "payload", scaling="block"),
    "fp4, blocks, act kept": Recipe("fp4", "fp8", "payload", keeps_act=True, scaling="block"),
    "mxfp4, blocks": Recipe(Precision("mxfp4", "mxfp4", _GRADIENT, _GRADIENT), "fp8", "payload", scaling="block"),
    "bf16 wires, fp8": Recipe("bf16", "fp8", "rows"),
}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "aligned": {"expert_alignment": 16},
    "fixed": {"expert_alignment": 128, "num_max_tokens_per_rank": 40},
}
Values = dict[str, np.ndarray]


def problem_of(num_ranks: int) -> Problem:
    """Uneven tokens, none on rank 1, choices that are missing, an expert that nobody chooses."""
    problem = Problem(num_ranks, hidden=160, seed=31)
    for idx in problem.idx:
        idx[idx == problem.num_local_experts - 1] = -1
    return problem


def all_weights(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """gate_up and down of all experts, float32."""
    rng = np.random.default_rng(32)
    gate_up = rng.standard_normal((problem.num_experts, 2 * FFN_HIDDEN, problem.hidden)) * 0.1
    down = rng.standard_normal((problem.num_experts, problem.hidden, FFN_HIDDEN)) * 0.1
    return gate_up.astype(np.float32), down.astype(np.float32)


def upstream(problem: Problem, rank: int) -> np.ndarray:
    """The gradient of the result on a rank."""
    values = np.random.default_rng([33, rank]).standard_normal(problem.xs[rank].shape)
    return values.astype(np.float32)


def make_experts(comm: Any, problem: Problem, recipe: Recipe, dtype: torch.dtype = torch.float32) -> GroupedExperts:
    """This rank's experts, with the weights of `all_weights`."""
    experts = GroupedExperts(comm, FFN_HIDDEN, recipe, dtype=dtype)
    mine = slice(experts.first_expert, experts.first_expert + comm.num_local_experts)
    with torch.no_grad():
        for parameter, values in zip((experts.gate_up, experts.down), all_weights(problem), strict=True):
            parameter.copy_(torch.from_numpy(values[mine]))
    return experts


def run_experts(group: Any, name: str, way: str, dtype: torch.dtype = torch.float32) -> Values:
    """Result and gradients on a rank."""
    recipe = RECIPES[name] if name in RECIPES else Recipe.of(name)
    ranks = 1 if group is None else group.num_ranks if hasattr(group, "num_ranks") else group.Get_size()
    problem = problem_of(ranks)
    with communicator(group, problem, recipe.precision, **WAYS[way]) as comm:
        experts = make_experts(comm, problem, recipe, dtype)
        x, idx, weights = problem.mine(comm.rank, dtype)
        x.requires_grad_()
        weights.requires_grad_()
        out = experts(x, idx, weights, comm)
        out.backward(torch.from_numpy(upstream(problem, comm.rank)).to(dtype))
        return numbers(
            out=out, x=x.grad, topk_weights=weights.grad, gate_up=experts.gate_up.grad, down=experts.down.grad
        )


def numbers(**tensors: Tensor | None) -> Values:
    """float32 arrays of tensors."""
    return {name: tensor.detach().float().numpy() for name, tensor in tensors.items() if tensor is not None}


def run_all(group: Any) -> dict[str, Values]:
    """`run_experts` for every recipe, on ranks that are processes."""
    return {name: run_experts(group, name, "aligned") for name in RECIPES}
