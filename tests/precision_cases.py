"""The exchange cases about numbers: wire formats of the legs, their options, dtypes, and bytes sent."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from moe_problem import Problem, communicator, digest, floats_like, host, num_remote_rows, size_of
from numerics import on_device
from torch import Tensor

import fp4comm
from fp4comm.precision import Leg, Precision
from fp4comm.reference import codec
from fp4comm.reference import exchange as reference

LEGS = ("dispatch", "combine", "grad_dispatch", "grad_combine")
SEED = 2**40 + 5
ROTATED = Leg("mxfp4", "rceil", hadamard=True)


def only(name: str, leg: Leg | str) -> Precision:
    """One leg as given, the others exact."""
    return Precision(**(dict.fromkeys(LEGS, "fp32") | {name: leg}))


def through_leg(leg: Leg) -> reference.Wire:
    """What becomes of numbers on a leg without stochastic rounding, by the reference."""
    if not leg.hadamard:
        return reference.through_wire(leg.wire, leg.scale_mode)
    rotation = {"hadamard": True, "seed": SEED}
    return lambda x: codec.decode_mxfp4(*codec.encode_mxfp4(x, leg.scale_mode, **rotation), **rotation)


def case_every_precision_leg(group: Any) -> list[int]:
    """Each leg is one wire format from the reference, forward and backward, plain or rotated; others stay exact."""
    problem = Problem(size_of(group), seed=7)
    digests = []
    for leg in LEGS:
        for wire in ("bf16", "fp8", "mxfp4", ROTATED):
            precision = only(leg, wire)
            with communicator(group, problem, precision, seed=SEED) as comm:
                x, idx, weights = problem.mine(comm.rank)
                x.requires_grad_()
                recv, handle = comm.dispatch(x, idx, weights, layout="rank")
                out = comm.combine(recv.x * 1, handle)
                upstreams = [
                    np.random.default_rng(rank).standard_normal(v.shape).astype(np.float32)
                    for rank, v in enumerate(problem.xs)
                ]
                out.backward(on_device(upstreams[comm.rank]))
                through = {name: through_leg(precision.leg(name)) for name in LEGS}

                def there_and_back(values: list[Any], first: str, second: str, through: Any = through) -> Any:
                    routing = problem.idx, problem.weights, problem.num_experts
                    arrived = reference.dispatch(values, *routing, through[first])
                    return reference.combine([a.x for a in arrived], arrived, problem.num_tokens, through[second])

                np.testing.assert_array_equal(host(out), there_and_back(problem.xs, "dispatch", "combine")[comm.rank])
                np.testing.assert_array_equal(
                    host(x.grad), there_and_back(upstreams, "grad_dispatch", "grad_combine")[comm.rank]
                )
                digests.append(digest(out, x.grad))
    return digests


def step(group: Any, precision: Precision | str) -> list[Tensor]:
    """Output and gradients of experts that are not linear."""
    problem = Problem(size_of(group), hidden=256, seed=15)
    with communicator(group, problem, precision) as comm:
        x, idx, weights = problem.mine(comm.rank)
        x.requires_grad_()
        weights.requires_grad_()
        recv, handle = comm.dispatch(x, idx, weights)
        out = comm.combine(torch.tanh(recv.x.cpu()).to(x.device), handle)  # whose bits differ on a GPU
        out.backward(floats_like(np.random.default_rng(comm.rank), out))
        return [out.detach(), x.grad, weights.grad]


def case_rotated_and_stochastic_legs(group: Any) -> list[int]:
    """A leg in rotated or stochastic MXFP4 is near the exact one, and is not plain MXFP4.

    The expert layout decodes in the weighted sum, in the product for the weights' gradients and at home. Right results
    are off by 0.1 to 0.3; a rotation that is not undone, by 1.1 or more.
    """
    exact = step(group, "fp32")
    digests = []
    for leg in LEGS:
        plain = step(group, only(leg, Leg("mxfp4", "rceil")))
        for options in ({"hadamard": True}, {"stochastic": True}):
            results = step(group, only(leg, Leg("mxfp4", "rceil", **options)))
            for got, wanted in zip(results, exact, strict=True):
                assert not wanted.numel() or float((got - wanted).norm() / wanted.norm()) < 0.6, (leg, options)
            same = all(torch.equal(got, before) for got, before in zip(results, plain, strict=True))
            assert not same or not len(exact[0]), (leg, options)
            digests.append(digest(*results))
    return digests


def case_random_numbers_differ(group: Any) -> list[int]:
    """Equal tokens are rounded differently by each rank and each call, but the rounding of many has no bias."""
    problem = Problem(size_of(group))
    with communicator(group, problem, only("dispatch", Leg("mxfp4", "rceil", stochastic=True))) as comm:
        x = on_device(np.random.default_rng(3).standard_normal((8, problem.hidden)).astype(np.float32))
        to_first = on_device(np.zeros((len(x), 1), np.int64))
        copies = [part for _ in range(12) for part in comm.dispatch(x, to_first)[0].x.split(len(x))]
        if comm.rank:
            return []
        for one, another in itertools.combinations(copies, 2):
            assert not torch.equal(one, another)
        deviations = [float((copy - x).norm()) for copy in copies]
        mean_deviation = float((torch.stack(copies).mean(0) - x).norm())
        assert mean_deviation < 1.2 * max(deviations) / len(copies) ** 0.5
        return [digest(*copies)]


def case_dtypes(group: Any) -> list[int]:
    """All dtypes of x, `out=` and y: the right one comes out, and its numbers are the ones of float32, rounded."""
    problem = Problem(size_of(group), hidden=32, seed=17)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    with communicator(group, problem, "fp32") as comm:
        for x_dtype, arrival, y_dtype in itertools.product(dtypes, (None, *dtypes), dtypes):
            x, idx, weights = problem.mine(comm.rank, x_dtype)
            x.requires_grad_()
            weights.requires_grad_()
            expected, _ = comm.dispatch(x.detach().float(), idx, weights.detach())
            recv, handle = comm.dispatch(x, idx, weights, out=arrival)
            assert recv.x.dtype == (arrival or x_dtype)
            assert torch.equal(recv.x, expected.x.to(recv.x.dtype))
            out = comm.combine((recv.x * 2).to(y_dtype), handle)
            factor = torch.where(idx >= 0, weights.detach() * 2, 0).sum(1, keepdim=True)
            assert out.dtype == y_dtype
            torch.testing.assert_close(out.float(), factor * x.detach().float(), rtol=2e-2, atol=2e-2)
            out.float().sum().backward()
            assert x.grad.dtype == x_dtype
            torch.testing.assert_close(x.grad.float(), factor.expand_as(x), rtol=2e-2, atol=2e-2)
            slope = torch.where(idx >= 0, 2 * x.detach().float().sum(1, keepdim=True), 0)
            torch.testing.assert_close(weights.grad, slope, rtol=2e-2, atol=0.5)
        fp8 = fp4comm.quantize_fp8(problem.mine(comm.rank)[0])
        recv, handle = comm.dispatch(fp8, idx)
        assert recv.x.dtype == torch.bfloat16
        assert torch.equal(recv.x, comm.dispatch(fp8.dequantize(torch.float32), idx, out=torch.bfloat16)[0].x)
    with (
        communicator(group, problem, only("dispatch", ROTATED)) as rotated,
        pytest.raises(fp4comm.InvalidArgument, match="Hadamard"),
    ):
        rotated.dispatch(fp8, idx, out="fp8")
    return [digest(recv.x)]


def case_repeated_runs_are_equal(group: Any) -> list[int]:
    """Stochastic rounding and Hadamard included: a new communicator with the same seed repeats every bit."""
    problem = Problem(size_of(group), seed=8)

    def run(seed: int) -> int:
        with communicator(group, problem, "mxfp4", seed=seed) as comm:
            x, idx, weights = problem.mine(comm.rank, torch.bfloat16)
            x.requires_grad_()
            weights.requires_grad_()
            recv, handle = comm.dispatch(x, idx, weights)
            recv.x.retain_grad()
            out = comm.combine(recv.x * 3, handle)
            out.float().square().sum().backward()
            return digest(out, recv.x.grad, x.grad, weights.grad)

    first, other = run(0), run(1)
    assert first == run(0)
    assert first != other
    return [first, other]


def case_traffic_counts_remote_bytes(group: Any) -> list[int]:
    """Bytes on the wire are counted as sent to other ranks, one row per token and rank."""
    problem = Problem(size_of(group), hidden=1024, seed=10)
    with communicator(group, problem, "fp4") as comm:
        x, idx, weights = problem.mine(comm.rank)
        recv, handle = comm.dispatch(x, idx, weights)
        comm.combine(recv.x, handle)
        remote = num_remote_rows(problem, comm.rank)
        assert comm.traffic["dispatch"] == remote * (512 + 32 + 4 * 6 + 8)  # nibbles, scales, routing, padding to 32
        everyone = reference.dispatch(problem.xs, problem.idx, problem.weights, problem.num_experts, lambda v: v)
        away = sum(source != comm.rank for source, _ in everyone[comm.rank].sources)
        assert comm.traffic["combine"] == away * 2048
        return [comm.traffic["dispatch"], comm.traffic["combine"]]
