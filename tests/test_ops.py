"""Operators of torch: compiled layers and checkpointed ones give the bits of eager ones, on one rank and on two."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import failures_of, have_launcher, run_ranks
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp4comm
from fp4comm import ops
from fp4comm.errors import InvalidArgument

HIDDEN, NUM_EXPERTS, NUM_TOPK = 64, 8, 2
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Results = tuple[Tensor, Tensor, Tensor]


def make(group: Any, **options: Any) -> fp4comm.EPCommunicator:
    return fp4comm.EPCommunicator(
        group, num_experts=NUM_EXPERTS, hidden=HIDDEN, precision="fp4", expert_alignment=16, timeout_secs=120, **options
    )


def layers(comm: fp4comm.EPCommunicator, layout: str) -> tuple[Layer, Layer]:
    """A layer by methods of the communicator, and the same by operators."""
    weight = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)) / 8

    def experts(rows: Tensor, weights: Tensor) -> Tensor:
        y = torch.tanh(rows @ weight)
        return y if layout == "expert" else y * weights.sum(1, keepdim=True)

    def by_methods(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        received, handle = comm.dispatch(x, topk_idx, topk_weights, layout=layout)
        assert isinstance(received.x, Tensor)
        return x + comm.combine(experts(received.x, received.topk_weights), handle)

    def by_operators(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        received, handle = ops.dispatch(comm, x, topk_idx, topk_weights, layout=layout)
        return x + ops.combine(comm, experts(received.x, received.topk_weights), received.topk_weights, handle)

    return by_methods, by_operators


def run(layer: Layer, num_tokens: int, seed: int) -> Results:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator, requires_grad=True)
    weights, idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK)
    weights.requires_grad_()
    out = layer(x, idx, weights)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad


def assert_equal(got: Results, expected: Results) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def operators_alone(group: Any) -> None:
    for layout in ("expert", "rank"):
        for most in (None, 50):
            with make(group, num_max_tokens_per_rank=most) as comm:
                by_methods, by_operators = layers(comm, layout)
                assert_equal(run(by_operators, 40, comm.rank), run(by_methods, 40, comm.rank))
    gc.collect()
    assert not ops._handles, "handles go with their tensors"


def abandoned(group: Any) -> None:
    """A forward without backward leaves nothing behind."""
    with make(group) as comm:
        for layout in ("expert", "rank"):
            _, by_operators = layers(comm, layout)
            x = torch.randn(20, HIDDEN, requires_grad=True) * 2
            out = by_operators(x, torch.zeros(20, 1, dtype=torch.int64), torch.ones(20, 1))
            assert len(ops._handles) == 1
            alive = weakref.ref(x)
            del out, x
            gc.collect()
            assert not ops._handles
            assert alive() is None


def saved_as_copies(group: Any) -> None:
    """As offloading does with what is kept for backward."""
    with make(group) as comm:
        by_methods, by_operators = layers(comm, "expert")
        expected = run(by_methods, 40, comm.rank)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            assert_equal(run(by_operators, 40, comm.rank), expected)


def compiled_whole(group: Any) -> None:
    """With `fullgraph`, and once for all numbers of tokens; a rank without tokens takes part."""
    by_inductor = "aot_eager" if group else "inductor"  # compiling takes long
    for layout, most, backend in (
        ("expert", None, by_inductor),
        ("expert", 50, "aot_eager"),
        ("rank", None, "aot_eager"),
    ):
        torch._dynamo.reset()
        with make(group, num_max_tokens_per_rank=most) as comm:
            by_methods, by_operators = layers(comm, layout)
            compiled = torch.compile(by_operators, fullgraph=True, dynamic=True, backend=backend)
            for num in (40, 7, 23 if comm.rank else 2):
                assert_equal(run(compiled, num, 10 + comm.rank), run(by_methods, num, 10 + comm.rank))
            with torch.no_grad():
                assert run_without_gradients(compiled, 0 if comm.rank else 5).shape[1] == HIDDEN


def run_without_gradients(layer: Layer, num_tokens: int) -> Tensor:
    idx = torch.arange(num_tokens * NUM_TOPK).view(num_tokens, NUM_TOPK) % NUM_EXPERTS
    return layer(torch.ones(num_tokens, HIDDEN), idx, torch.ones(num_tokens, NUM_TOPK))


def checkpointed(group: Any) -> None:
    """Forward runs again in backward, on all ranks alike: by methods, by operators, compiled, and selectively."""

    def keep_exchanges(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_ours = "fp4comm" in str(op)
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    selectively = functools.partial(create_selective_checkpoint_contexts, keep_exchanges)
    torch._dynamo.reset()
    with make(group) as comm:
        by_methods, by_operators = layers(comm, "expert")
        expected = run(by_methods, 30, comm.rank)
        calls = comm.traffic.copy()
        for layer in (by_methods, by_operators, torch.compile(by_operators, fullgraph=True, backend="aot_eager")):
            again = functools.partial(checkpoint, layer, use_reentrant=False)
            assert_equal(run(again, 30, comm.rank), expected)
        comm.traffic.clear()
        kept = functools.partial(checkpoint, by_operators, use_reentrant=False, context_fn=selectively)
        assert_equal(run(kept, 30, comm.rank), expected)
        assert comm.traffic == calls, "nothing is sent again"


def mistakes_of_one_rank(group: Any) -> None:
    """Are raised on both."""
    if group is None:
        return
    with make(group) as comm:
        idx = torch.zeros(3, 1, dtype=torch.int64)
        with pytest.raises(InvalidArgument, match="gradient of x is true on rank 0, false on rank 1"):
            ops.dispatch(comm, torch.ones(3, HIDDEN, requires_grad=comm.rank == 0), idx)
        weights = torch.ones(3, 1, requires_grad=comm.rank == 0)
        with pytest.raises(InvalidArgument, match="gradient of topk_weights is true on rank 0, false on rank 1"):
            ops.dispatch(comm, torch.ones(3, HIDDEN), idx, weights)
        received, handle = ops.dispatch(comm, torch.ones(3, HIDDEN), idx)
        wrong = handle._replace(token=handle.token + 0.5e6) if comm.rank else handle
        with pytest.raises(InvalidArgument, match="rank 1: handle is not of a dispatch"):
            ops.combine(comm, received.x, received.topk_weights, wrong)


def mistakes(group: Any) -> None:
    if group is not None:
        return
    with make(None) as comm, make(None) as other:
        x, idx = torch.randn(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int64)
        received, handle = ops.dispatch(comm, x, idx)
        with pytest.raises(InvalidArgument, match="handle is of another communicator"):
            ops.combine(other, received.x, received.topk_weights, handle)
        changed = handle._replace(token=handle.token + 0.5e6)
        with pytest.raises(InvalidArgument, match="handle is not of a dispatch that is still known"):
            ops.combine(comm, received.x, received.topk_weights, changed)
        with pytest.raises(InvalidArgument, match="topk_idx"):
            ops.dispatch(comm, x, idx + NUM_EXPERTS)
        name = comm.name
    del comm, handle
    gc.collect()
    with pytest.raises(InvalidArgument, match="comm is gone"):
        torch.ops.fp4comm.dispatch(x, idx, None, name, "expert")


CASES = (operators_alone, abandoned, saved_as_copies, compiled_whole, checkpointed, mistakes_of_one_rank, mistakes)


def run_all(group: Any) -> dict[str, str]:
    """One start for all cases."""
    return failures_of(CASES, group)


@functools.cache
def failures_of_two_ranks() -> list[dict[str, str]]:
    return run_ranks(run_all, 2, timeout=150)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # by the inductor
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_alone(case: Any) -> None:
    case(None)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    if not have_launcher("mpi"):
        pytest.skip("no mpi on this machine")
    for rank, failures in enumerate(failures_of_two_ranks()):
        assert case.__name__ not in failures, f"rank {rank}: {failures[case.__name__]}"
