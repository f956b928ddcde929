"""Prints the table of docs/deep_ep.md.

PYTHONPATH=tests torchrun --nproc-per-node 2 tests/adapters/deep_ep_figures.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from adapters.deep_ep_cases import layer
from torch import Tensor

from fp4comm.adapters import deep_ep
from fp4comm.adapters.deep_ep import Buffer

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 512, 2048, 8, 4
LEGS = ("dispatch", "combine", "grad_dispatch", "grad_combine")


def measure(precision: str) -> tuple[dict[str, float], list[Tensor]]:
    """Bytes sent for each token that goes to the other rank, by leg; and output and gradients of x and the weights."""
    deep_ep.configure(precision=precision)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).bfloat16().requires_grad_()
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    weights, idx = scores.topk(NUM_TOPK)
    weights.requires_grad_()
    out = layer(x, weights, idx, Buffer(dist.group.WORLD))
    out.backward(torch.randn(out.shape, generator=generator).bfloat16())
    (comm,) = deep_ep.communicators()
    rank_of = idx // (NUM_EXPERTS // dist.get_world_size())
    counts = torch.tensor([int((rank_of == rank).any(1).sum()) for rank in range(dist.get_world_size())])
    sent = counts.sum() - counts[dist.get_rank()]
    of_all = [torch.zeros_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, counts)
    received = sum(int(c[dist.get_rank()]) for c in of_all) - int(counts[dist.get_rank()])
    num_rows = {leg: received if leg in ("combine", "grad_combine") else int(sent) for leg in LEGS}
    deep_ep.close()
    assert x.grad is not None
    assert weights.grad is not None
    return {leg: comm.traffic[leg] / num_rows[leg] for leg in LEGS}, [out.detach(), x.grad, weights.grad]


def main() -> None:
    dist.init_process_group("gloo")
    exact = measure("bf16")[1]
    if dist.get_rank() == 0:
        print(f"| precision | {' | '.join(LEGS)} | output | gradient of x | gradient of weights |")
        print("|" + "---|" * 8)
    for precision in ("bf16", "fp8", "fp4", "mxfp4"):
        sent, results = measure(precision)
        errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(results, exact, strict=True)]
        if dist.get_rank() == 0:
            cells = [f"{sent[leg]:,.0f}" for leg in LEGS] + [f"{error:.2%}" for error in errors]
            print(f"| `{precision}` | {' | '.join(cells)} |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
