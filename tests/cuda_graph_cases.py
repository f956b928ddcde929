"""Dispatch, experts and combine without the host: captured in a CUDA graph, and counted in launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from launch import failures_of
from torch import Tensor

import fp4comm
from fp4comm.backends import cuda_compile

HIDDEN, NUM_TOPK, NUM_LOCAL_EXPERTS, MOST_TOKENS, ALIGNMENT = 256, 4, 8, 96, 16
MAX_LAUNCHES = 8  # of a dispatch, those of NCCL and of torch included
# Two for the routes, one to pack, two to read the routing, one to unpack; with peers two more to keep ranks apart.
OWN_LAUNCHES = {"nccl": 6, "loopback": 6, "peer": 8}
transport = "nccl"  # of groups of several ranks


@dataclass
class Layer:
    """A MoE layer whose tensors stay where they are, as a graph wants it."""

    comm: fp4comm.EPCommunicator
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    experts: Tensor

    @classmethod
    def on(cls, group: Any, **options: Any) -> Layer:
        """Tensors on the current device, filled by `load`."""
        device = torch.device("cuda", torch.cuda.current_device())
        num_ranks = group.Get_size() if hasattr(group, "Get_size") else 1 if group is None else group.size()
        comm = fp4comm.EPCommunicator(
            group,
            num_experts=NUM_LOCAL_EXPERTS * num_ranks,
            hidden=HIDDEN,
            expert_alignment=ALIGNMENT,
            timeout_secs=20.0,
            transport="auto" if group is None else transport,
            **options,
        )
        x = torch.zeros(MOST_TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
        topk_idx = torch.zeros(MOST_TOKENS, NUM_TOPK, dtype=torch.int64, device=device)
        topk_weights = torch.zeros(MOST_TOKENS, NUM_TOPK, device=device)
        experts = torch.randn(NUM_LOCAL_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(comm.rank))
        return cls(comm, x, topk_idx, topk_weights, experts.to(device, torch.bfloat16))

    def load(self, seed: int) -> None:
        """New values and new routes, some tokens without experts."""
        generator = torch.Generator().manual_seed(100 * seed + self.comm.rank)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        scores = torch.rand(MOST_TOKENS, self.comm.num_experts, generator=generator) ** (1 + seed)
        weights, idx = scores.topk(NUM_TOPK)
        idx[torch.rand(MOST_TOKENS, generator=generator) < 0.2] = -1
        self.topk_idx.copy_(idx)
        self.topk_weights.copy_(weights)

    def __call__(self) -> Tensor:
        """As a training step would: grouped products over the rows of each expert, weights applied by combine."""
        recv, handle = self.comm.dispatch(self.x, self.topk_idx, self.topk_weights)
        y = torch._grouped_mm(recv.x, self.experts, offs=recv.expert_offsets)
        return self.comm.combine(y, handle)


def capture_and_replay(group: Any) -> None:
    """A captured layer gives the bits of an eager one, for routes and values that came after the capture."""
    fixed, exact = Layer.on(group, num_max_tokens_per_rank=MOST_TOKENS), Layer.on(group)
    side = torch.cuda.Stream()
    fixed.load(0)
    with torch.cuda.stream(side), torch.no_grad():
        fixed()  # compiles kernels and grows buffers
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = fixed()
    for seed in (1, 2, 3):
        fixed.load(seed)
        exact.load(seed)
        graph.replay()
        with torch.no_grad():
            expected = exact()
        assert expected.any()
        assert torch.equal(out, expected), f"seed {seed}"
    torch.cuda.synchronize()
    graph.reset()  # or NCCL would wait for it
    fixed.comm.close()
    exact.comm.close()


def train_captured(group: Any) -> None:
    """Forward and backward in one graph."""
    fixed, exact = Layer.on(group, num_max_tokens_per_rank=MOST_TOKENS), Layer.on(group)
    for layer in (fixed, exact):
        layer.x.requires_grad_()
        layer.topk_weights.requires_grad_()
    upstream = torch.randn(fixed.x.shape, generator=torch.Generator().manual_seed(7)).to(fixed.x)

    def gradients(layer: Layer) -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(), [layer.x, layer.topk_weights], upstream)

    def load(seed: int) -> None:
        with torch.no_grad():
            fixed.load(seed)
            exact.load(seed)

    load(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(fixed)
    for seed in (1, 2):
        load(seed)
        graph.replay()
        for got, expected in zip(captured, gradients(exact), strict=True):
            assert expected.any()
            assert torch.equal(got, expected), f"seed {seed}"
    torch.cuda.synchronize()
    graph.reset()
    fixed.comm.close()
    exact.comm.close()


def never_waits_for_the_device(group: Any) -> None:
    """With fixed sizes, and along a cached handle, no call of torch's waits; with exact sizes one dispatch does."""
    for options in ({"num_max_tokens_per_rank": MOST_TOKENS}, {}):
        layer = Layer.on(group, **options)
        layer.load(0)
        recv, handle = layer.comm.dispatch(layer.x, layer.topk_idx, layer.topk_weights)
        layer.comm.dispatch(layer.x, handle=handle)
        layer.comm.combine(recv.x, handle)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not find all waits
            torch.cuda.set_sync_debug_mode("error")
        try:
            if options:
                layer.comm.dispatch(layer.x, layer.topk_idx, layer.topk_weights)
            layer.comm.dispatch(layer.x, handle=handle)
            layer.comm.combine(recv.x, handle)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        layer.comm.close()


def kernels_of(function: Any) -> list[str]:
    """Names of the kernels that a call runs on the device, by CUPTI."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities) as profile:
            function()
            torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in kernels if not event.name.startswith(("Memcpy", "Memset"))]


def few_launches(group: Any) -> None:
    """At most MAX_LAUNCHES kernels a call, of ours at most OWN_LAUNCHES."""
    for options in ({}, {"num_max_tokens_per_rank": MOST_TOKENS}):
        for layout in ("expert", "rank"):
            layer = Layer.on(group, **options)
            layer.load(0)
            for name, call in calls_of(layer, layout).items():
                call()
                before = cuda_compile.num_launches
                kernels = kernels_of(call)
                own = cuda_compile.num_launches - before
                assert 0 < own <= OWN_LAUNCHES[layer.comm.transport], (options, layout, name)
                assert len(kernels) <= MAX_LAUNCHES, (options, layout, name, kernels)
            layer.comm.close()


def calls_of(layer: Layer, layout: str) -> dict[str, Callable[[], object]]:
    """The kinds of calls."""
    arguments = (layer.x, layer.topk_idx, layer.topk_weights)
    recv, handle = layer.comm.dispatch(*arguments, layout=layout)
    return {
        "new routes": lambda: layer.comm.dispatch(*arguments, layout=layout),
        "cached": lambda: layer.comm.dispatch(layer.x, handle=handle),
        "combine": lambda: layer.comm.combine(recv.x, handle),
    }


def run_all(group: Any, over: str) -> dict[str, str]:
    """How each case failed over that transport, by name; empty if none has."""
    global transport
    transport = over
    torch.cuda.set_device(group.Get_rank())
    return failures_of(CASES, group)


CASES = (capture_and_replay, train_captured, never_waits_for_the_device, few_launches)
