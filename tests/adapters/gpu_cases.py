"""What two ranks with a GPU each do: adapters whose other tests have the rows of a CPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from launch import failures_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp4comm
from fp4comm import ops
from fp4comm.adapters import distributed

WIDTH, NUM_EXPERTS, NUM_TOPK = 1024, 8, 2


def rows(source: int, target: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """What rank `source` sends to rank `target`."""
    generator = torch.Generator().manual_seed(2 * source + target)
    return torch.randn(num_rows, WIDTH, generator=generator).to(dtype).cuda()


def through_wire(x: Tensor) -> Tensor:
    return fp4comm.quantize_mxfp4(x.cpu()).dequantize(x.dtype).cuda()


def sizes(source: int) -> list[int]:
    return [(3 * source + 5 * target) % 7 for target in range(2)]


def compressed_all_to_alls(group: Any) -> None:
    """The backend's rows over NCCL are those of the codec on a CPU: at once, later, functional, with gradients."""
    rank = dist.get_rank(group)
    distributed.register()
    ep_group = dist.new_group(backend="fp4comm")
    assert ep_group.size() == 2
    for dtype in (torch.bfloat16, torch.float32):
        outgoing, incoming = sizes(rank), [sizes(source)[rank] for source in range(2)]
        x = torch.cat([rows(rank, target, n, dtype) for target, n in enumerate(outgoing)])
        expected = through_wire(torch.cat([rows(source, rank, n, dtype) for source, n in enumerate(incoming)]))
        output = torch.full_like(expected, torch.nan)
        dist.all_to_all_single(output, x, incoming, outgoing, group=ep_group)
        assert torch.equal(output, expected)
        output.fill_(torch.nan)
        work = dist.all_to_all_single(output, x, incoming, outgoing, group=ep_group, async_op=True)
        work.wait()
        assert torch.equal(output, expected)
        x.requires_grad_()
        y = funcol.all_to_all_single_autograd(x, incoming, outgoing, ep_group)
        y.backward(torch.cat([rows(source, rank, n, dtype) for source, n in enumerate(incoming)]))
        assert torch.equal(y, expected)
        assert torch.equal(x.grad, through_wire(x.detach()))
    total = torch.full((3,), float(rank + 1), device="cuda")
    dist.all_reduce(total, group=ep_group)
    assert total.tolist() == [3.0] * 3
    assert ep_group.traffic["mxfp4"] > 0
    dist.barrier(ep_group)


def step(layer: Callable[..., Tensor], rank: int) -> tuple[Tensor, ...]:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(48, WIDTH, generator=generator).bfloat16().cuda().requires_grad_()
    weights, idx = (part.cuda() for part in torch.rand(48, NUM_EXPERTS, generator=generator).topk(NUM_TOPK))
    weights.requires_grad_()
    out = layer(x, idx, weights)
    (out * torch.randn(out.shape, generator=generator).cuda()).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad


def compiled_operators(group: Any) -> None:
    """Layers by operators, compiled as one graph and checkpointed, give the bits of methods."""
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16().cuda() / 32
    for most in (None, 64):
        options: dict[str, Any] = {"num_max_tokens_per_rank": most, "precision": "fp4"}
        with fp4comm.EPCommunicator(group, num_experts=NUM_EXPERTS, hidden=WIDTH, **options) as comm:

            def by_methods(x: Tensor, idx: Tensor, weights: Tensor, comm: Any = comm) -> Tensor:
                received, handle = comm.dispatch(x, idx, weights)
                return comm.combine(received.x @ weight, handle)

            def by_operators(x: Tensor, idx: Tensor, weights: Tensor, comm: Any = comm) -> Tensor:
                received, handle = ops.dispatch(comm, x, idx, weights)
                return ops.combine(comm, received.x @ weight, received.topk_weights, handle)

            expected = step(by_methods, comm.rank)
            compiled = torch.compile(by_operators, fullgraph=True, backend="inductor")
            for layer in (by_operators, compiled, functools.partial(checkpoint, by_operators, use_reentrant=False)):
                for got, wanted in zip(step(layer, comm.rank), expected, strict=True):
                    assert torch.equal(got, wanted)


def megatron_models(group: Any) -> None:
    """Whole models of Megatron-Core learn alike with its dispatcher, fp4comm's, and fp4comm's experts."""
    importlib.import_module("adapters.megatron_gpu").compare(group)


HAVE_MEGATRON = importlib.util.find_spec("megatron") is not None
CASES = [compressed_all_to_alls, compiled_operators, *([megatron_models] if HAVE_MEGATRON else [])]


def run_cases(group: Any) -> dict[str, str]:
    """How each failed that did."""
    return failures_of(CASES, group)
