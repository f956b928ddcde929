"""What every rank does to test DeepEP's interface: all cases in one process, which is slow to start."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from adapters import deep_ep_elastic_cases
from adapters.deep_ep_world import (
    HIDDEN,
    NUM_EXPERTS,
    NUM_TOKENS,
    NUM_TOPK,
    World,
    dispatch,
    fp8_by_amax,
    numbers,
    registry,
    same,
    through,
)
from torch import Tensor

import fp4comm
from fp4comm import InvalidArgument, Leg, NotAvailable, Precision
from fp4comm.adapters import deep_ep
from fp4comm.adapters.deep_ep import Buffer
from fp4comm.errors import ClosedError

MPI_CASES = ("bf16_rows_arrive_as_they_are", "combine_sums", "elastic_rows_per_expert", "low_latency_pair")

CASES, case = registry()


def run_cases(group: Any, names: tuple[str, ...] | None = None) -> dict[str, str]:
    """The traceback of each case that failed on this rank. After one that failed on any, the others are not run."""
    torch.set_num_threads(1)
    failures = {}
    world = World(group)
    for name, function in {**CASES, **deep_ep_elastic_cases.CASES}.items():
        if names is None or name in names:
            try:
                with world.device:  # for tensors that the case makes
                    function(world)
            except Exception:
                failures[name] = traceback.format_exc()
            deep_ep.close()
            failed = [other for others in world.all_gather(list(failures)) for other in others]
            if failed:
                failures.setdefault(name, f"{failed[0]} failed on another rank; what follows was not run")
                break
    return failures


def run_mpi_cases(group: Any) -> dict[str, str]:
    return run_cases(group, MPI_CASES)


@case
def layout(world: World) -> None:
    _, idx, _ = world.own
    per_rank, per_rdma_rank, per_expert, in_rank, event = world.buffer().get_dispatch_layout(idx, NUM_EXPERTS)
    assert per_rdma_rank is None
    assert event.event is None
    assert per_rank.dtype == per_expert.dtype == torch.int32
    ranks = torch.where(idx >= 0, idx // world.num_local_experts, -1)
    for rank in range(world.num_ranks):
        assert torch.equal(in_rank[:, rank], (ranks == rank).any(1))
        assert per_rank[rank] == (ranks == rank).any(1).sum()
    assert per_expert.tolist() == [int((idx == expert).sum()) for expert in range(NUM_EXPERTS)]


@case
def bf16_rows_arrive_as_they_are(world: World) -> None:
    buffer = world.buffer()
    x, topk_idx, topk_weights = world.own
    for alignment in (1, 4):
        recv_x, idx, weights, counts, _, event = dispatch(buffer, x, topk_idx, topk_weights, expert_alignment=alignment)
        assert same(recv_x, world.arriving(world.x))
        assert same(idx, world.arriving(lambda rank: world.local_topk(rank)[0]))
        assert same(weights, world.arriving(lambda rank: world.local_topk(rank)[1]))
        assert counts == [-(-count // alignment) * alignment for count in world.counts]
        assert event.event is None


def codec_rows(world: World, dtype: torch.dtype, rank: int) -> Tensor:
    return through(world.x(rank, dtype))


def constant_rows(width: int, rank: int) -> Tensor:
    return torch.full((NUM_TOKENS[rank], width), float(rank), dtype=torch.bfloat16)


@case
def fp4_rows_arrive_as_the_codec_rounds_them(world: World) -> None:
    buffer = world.buffer("fp4")
    for dtype in (torch.bfloat16, torch.float32):
        x, topk_idx, topk_weights = world.x(world.rank, dtype), *world.own[1:]
        recv_x, *_, handle, _ = dispatch(buffer, x, topk_idx, topk_weights)
        expected = world.arriving(partial(codec_rows, world, dtype))
        assert same(recv_x, expected)
        assert same(buffer.dispatch(x, handle=handle)[0], expected)
    assert len(deep_ep.communicators()) == 1


@case
def fp32_is_exact(world: World) -> None:
    buffer = world.buffer("fp32")
    x = world.x(world.rank, torch.float32)
    recv_x, *_, handle, _ = dispatch(buffer, x, *world.own[1:])
    assert same(recv_x, world.arriving(lambda rank: world.x(rank, torch.float32)))
    combined = buffer.combine(recv_x, handle)[0]
    assert torch.allclose(combined, x * world.num_copies, rtol=1e-6, atol=0)


@case
def combine_sums(world: World) -> None:
    buffer = world.buffer()
    x, topk_idx, topk_weights = world.own
    recv_x, _, recv_weights, _, handle, _ = dispatch(buffer, x, topk_idx, topk_weights)
    combined, home, event = buffer.combine(recv_x, handle)
    assert same(combined, (x.float() * world.num_copies).bfloat16())
    assert home is None
    assert event.event is None
    bias = torch.full_like(x, 0.5), torch.arange(HIDDEN).expand_as(x).bfloat16()
    for chosen in (bias[0], bias):
        combined, home, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights, bias=chosen)
        addend = bias[0].float() + (bias[1].float() if chosen is bias else 0)
        assert same(combined, (x.float() * world.num_copies + addend).bfloat16())
        assert same(home, topk_weights.masked_fill(topk_idx < 0, 0))
    ones = torch.ones_like(recv_weights)
    home = buffer.combine(recv_x, handle, topk_weights=ones)[1]  # sums over all ranks, not only the expert's
    assert torch.equal(home, world.num_copies.float().expand_as(topk_weights))


@case
def cached_handle(world: World) -> None:
    buffer = world.buffer()
    x, topk_idx, topk_weights = world.own
    handle = dispatch(buffer, x, topk_idx, topk_weights)[4]
    recv_x, *rest, event = buffer.dispatch(-x, handle=handle)
    assert same(recv_x, world.arriving(lambda rank: -world.x(rank)))
    assert rest == [None, None, None, None]
    assert isinstance(event, deep_ep.EventOverlap)
    for width in (HIDDEN // 2, 2 * HIDDEN):  # rows of another width along the same routes
        other = constant_rows(width, world.rank)
        expected = world.arriving(partial(constant_rows, width))
        assert same(buffer.dispatch(other, handle=handle)[0], expected)
        assert same(buffer.combine(expected, handle)[0], other * world.num_copies)


@case
def without_topk(world: World) -> None:
    """The layout alone says where tokens go."""
    buffer = world.buffer()
    x, topk_idx, _ = world.own
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    recv_x, idx, weights, counts, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
    )
    assert same(recv_x, world.arriving(world.x))
    assert idx is None
    assert weights is None
    assert counts == world.counts
    assert same(buffer.combine(recv_x, handle)[0], (x.float() * world.num_copies).bfloat16())


@case
def num_worst_tokens(world: World) -> None:
    buffer = world.buffer()
    x, topk_idx, topk_weights = world.own
    worst = 10 * world.num_ranks + 1
    recv_x, idx, weights, counts, handle, _ = dispatch(buffer, x, topk_idx, topk_weights, num_worst_tokens=worst)
    expected = world.arriving(world.x)
    received = len(expected)
    assert counts == []
    assert recv_x.shape == (worst, HIDDEN)
    assert same(recv_x[:received], expected)
    assert same(idx[:received], world.arriving(lambda rank: world.local_topk(rank)[0]))
    assert same(weights[:received], world.arriving(lambda rank: world.local_topk(rank)[1]))
    assert idx.shape == weights.shape == (worst, NUM_TOPK)
    assert torch.all(idx[received:] == -1)
    assert not weights[received:].any()
    recv_x[received:] = 1000.0  # is nobody's
    combined, home, _ = buffer.combine(recv_x, handle, topk_weights=weights)
    assert same(combined, (x.float() * world.num_copies).bfloat16())
    assert same(home, topk_weights.masked_fill(topk_idx < 0, 0))
    assert same(buffer.dispatch(x, handle=handle)[0][:received], expected)


@case
def fp8_pairs(world: World) -> None:
    pairs = [fp8_by_amax(world.x(rank)) for rank in range(world.num_ranks)]
    data, scales = pairs[world.rank]
    strided = scales.t().contiguous().t()
    for precision in ("bf16", "fp32"):  # as they are
        recv_x, *_, handle, _ = dispatch(world.buffer(precision), (data, strided), *world.own[1:])
        again = world.buffer(precision).dispatch((data, scales), handle=handle)[0]
        for received in (recv_x, again):
            assert isinstance(received, tuple)
            assert same(received[0], world.arriving(lambda rank: pairs[rank][0].view(torch.uint8)).view(data.dtype))
            assert same(received[1], world.arriving(lambda rank: pairs[rank][1]))
    buffer = world.buffer("fp4")
    recv_x, *_, handle, _ = dispatch(buffer, (data, scales), *world.own[1:])
    expected = world.arriving(
        lambda rank: fp4comm.quantize_mxfp4(fp4comm.FP8Tensor(*pairs[rank])).dequantize(torch.float32)
    )
    assert recv_x[0].dtype == data.dtype
    assert same(numbers(*recv_x), expected)
    assert same(numbers(*buffer.dispatch((data, scales), handle=handle)[0]), expected)


@case
def fp8_pairs_with_exponents(world: World) -> None:
    wide = [world.x(rank).repeat(1, 2) for rank in range(world.num_ranks)]  # 512: four exponents in a number
    fp8 = [fp4comm.quantize_fp8(x) for x in wide]
    packed = [(t.scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32) for t in fp8]
    for precision in ("bf16", "fp4"):
        pair = fp8[world.rank].data, packed[world.rank]
        data, exponents = dispatch(world.buffer(precision), pair, *world.own[1:])[0]
        assert exponents.dtype == torch.int32
        scales = (exponents.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
        floats = [t.dequantize(torch.float32) for t in fp8]
        sent = floats if precision == "bf16" else [through(t) for t in floats]
        expected = torch.cat([sent[rank][(world.local_topk(rank)[0] >= 0).any(1)] for rank in range(world.num_ranks)])
        assert same(numbers(data, scales), expected)


@case
def asynchronous_calls(world: World) -> None:
    buffer = world.buffer()
    x, topk_idx, topk_weights = world.own
    before = Buffer.capture()
    *layout, event = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS, before, async_finish=True)
    per_rank, per_rdma_rank, per_expert, in_rank = layout
    recv_x, *_, handle, event = buffer.dispatch(
        x,
        None,
        per_rank,
        per_rdma_rank,
        in_rank,
        per_expert,
        topk_idx,
        topk_weights,
        config=Buffer.get_dispatch_config(world.num_ranks),
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    with event:
        pass
    event.current_stream_wait(release_handle=True)
    assert event.event is None
    combined, _, event = buffer.combine(recv_x, handle, None, None, None, deep_ep.EventOverlap(), async_finish=True)
    event.current_stream_wait()
    assert same(combined, (x.float() * world.num_copies).bfloat16())


class Dispatch(torch.autograd.Function):
    """As frameworks wrap it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, idx: Tensor, buffer: Buffer) -> tuple[Any, ...]:
        recv_x, recv_idx, recv_weights, _, handle, _ = dispatch(buffer, x, idx, weights)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_weights, recv_idx, handle

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_x, home, _ = ctx.buffer.combine(grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.float())
        return grad_x, home, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, handle: Any, buffer: Buffer) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


def layer(x: Tensor, weights: Tensor, idx: Tensor, buffer: Buffer) -> Tensor:
    """Experts that multiply by themselves and by the weights."""
    recv_x, recv_weights, recv_idx, handle = Dispatch.apply(x, weights, idx, buffer)
    factor = (recv_weights * (recv_idx >= 0)).sum(1, keepdim=True)
    return Combine.apply(torch.tanh(recv_x) * factor, handle, buffer)


def gradients(world: World, buffer: Buffer, run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    x = world.x(world.rank, torch.float32).requires_grad_()
    idx, weights = world.topk(world.rank)
    weights.requires_grad_()
    out = run(x, weights, idx, buffer)
    out.backward(world.x(world.rank, torch.float32).cos())
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad


@case
def gradients_of_a_layer(world: World) -> None:
    x = world.x(world.rank, torch.float32).requires_grad_()
    idx, weights = world.topk(world.rank)
    weights.requires_grad_()
    expected = torch.tanh(x) * (weights * (idx >= 0)).sum(1, keepdim=True)
    expected.backward(world.x(world.rank, torch.float32).cos())
    out, grad_x, grad_weights = gradients(world, world.buffer("fp32"), layer)
    assert torch.allclose(out, expected.detach(), rtol=1e-6, atol=1e-6)
    assert torch.allclose(grad_x, x.grad, rtol=1e-6, atol=1e-6)
    assert torch.allclose(grad_weights, weights.grad, rtol=1e-6, atol=1e-5)


@case
def gradients_take_legs_of_their_own(world: World) -> None:
    """Also where a checkpoint runs the forward pass again in the backward one."""
    checkpoint = torch.utils.checkpoint.checkpoint
    legs = Precision("fp32", "bf16", Leg("mxfp4", "rceil"), "fp32")
    runs: dict[str, Callable[..., Tensor]] = {
        "plain": layer,
        "reentrant": partial(checkpoint, layer, use_reentrant=True),
        "not reentrant": partial(checkpoint, layer, use_reentrant=False),
    }
    results, traffic = {}, {}
    for name, run in runs.items():
        buffer = world.buffer(legs)
        deep_ep.close()
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):  # or combine would not run again
            results[name] = gradients(world, buffer, run)
        (comm,) = deep_ep.communicators()  # of a buffer from before close()
        traffic[name] = dict(comm.traffic)
    plain = traffic["plain"]
    assert set(plain) == {"dispatch", "combine", "grad_dispatch", "grad_combine"}
    for name, result in results.items():
        for got, wanted in zip(result, results["plain"], strict=True):
            assert same(got, wanted), name
        if name != "plain":
            assert traffic[name] == plain | {leg: 2 * plain[leg] for leg in ("dispatch", "combine")}
    grad_out = world.x(world.rank, torch.float32).cos()
    rounded = fp4comm.quantize_mxfp4(grad_out, scale_mode="rceil").dequantize(torch.float32)
    x = world.x(world.rank, torch.float32)
    idx, weights = world.topk(world.rank)
    factor = (weights * (idx >= 0)).sum(1, keepdim=True)
    expected = rounded * factor * (1 - torch.tanh(x) ** 2)
    assert torch.allclose(results["plain"][1], expected, rtol=1e-5, atol=1e-5)


@case
def fp8_gradients(world: World) -> None:
    """A pair that is dispatched in a backward pass."""
    pairs = [fp8_by_amax(world.x(rank)) for rank in range(world.num_ranks)]
    received: list[Any] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            received.append(buffer.dispatch(pairs[world.rank], handle=handle)[0])
            return grad

    for leg in ("mxfp4", Leg("mxfp4", "rceil", hadamard=True)):
        buffer = world.buffer(Precision("bf16", "bf16", leg, "bf16"))
        handle = dispatch(buffer, *world.own)[4]
        Again.apply(torch.zeros(1, requires_grad=True)).sum().backward()
        expected = world.arriving(lambda rank: numbers(*pairs[rank]))
        error = (numbers(*received.pop()) - expected).norm() / expected.norm() if len(expected) else torch.zeros(())
        assert 0 <= error < 0.2


@case
def low_latency_pair(world: World) -> None:
    x, topk_idx, topk_weights = world.own
    for use_fp8, precision in ((False, "bf16"), (False, "fp4"), (True, "bf16"), (True, "fp4")):
        buffer = world.buffer(precision)
        stats = torch.ones(world.num_local_experts, dtype=torch.int32)
        recv, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, topk_idx, 10, NUM_EXPERTS, stats, use_fp8=use_fp8, return_recv_hook=True
        )
        assert hook is not None
        hook()
        assert event.event is None
        assert counts.dtype == torch.int32
        assert counts.tolist() == world.counts
        assert (stats - 1).tolist() == world.counts
        rows = recv if isinstance(recv, Tensor) else numbers(*recv)
        if not isinstance(recv, Tensor):
            assert recv[1].shape == (world.num_local_experts, 10 * world.num_ranks, HIDDEN // 128)
            assert recv[1].transpose(1, 2).is_contiguous()
        assert use_fp8 != isinstance(recv, Tensor)
        assert rows.shape == (world.num_local_experts, 10 * world.num_ranks, HIDDEN)
        expected = world.arriving(world.x)
        if precision == "fp4":
            expected = through(expected)
        elif use_fp8:
            expected = numbers(*fp8_by_amax(expected))
        expected = world.expanded(expected.to(rows.dtype)).split(world.counts)
        for expert, part in enumerate(expected):
            assert same(rows[expert, : len(part)], part)
            assert not rows[expert, len(part) :].any()
        out = torch.empty_like(x)
        again, event, hook = buffer.low_latency_combine(
            rows.bfloat16(), topk_idx, topk_weights, handle, out=out, async_finish=True
        )
        event.current_stream_wait()
        assert hook is None
        assert again is out
        own = through(x).float() if precision == "fp4" else numbers(*fp8_by_amax(x)) if use_fp8 else x.float()
        sums = own.bfloat16().float() * topk_weights.masked_fill(topk_idx < 0, 0).sum(1, keepdim=True)
        assert torch.allclose(out.float(), sums, rtol=2**-8, atol=1e-6)
        buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
        copied = buffer.low_latency_combine(torch.zeros_like(rows), topk_idx, topk_weights, handle, zero_copy=True)[0]
        assert same(copied, out)


@case
def low_latency_scales(world: World) -> None:
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(NUM_TOKENS[world.rank], 512, generator=generator, device="cpu").to(world.device, torch.bfloat16)
    topk_idx = world.own[1]
    buffer = world.buffer()
    for use_ue8m0 in (False, True):
        (data, scales), counts, *_ = buffer.low_latency_dispatch(
            x, topk_idx, 9, NUM_EXPERTS, round_scale=True, use_ue8m0=use_ue8m0
        )
        assert scales.dtype == (torch.int32 if use_ue8m0 else torch.float32)
        assert scales.shape == (*data.shape[:2], 1 if use_ue8m0 else 4)
        if use_ue8m0:
            scales = (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
        for expert, count in enumerate(counts.tolist()):
            assert torch.all(torch.frexp(scales[expert, :count])[0] == 0.5)
            largest = data[expert, :count].float().view(count, 4, 128).abs().amax(2)
            assert torch.all((largest > 224 / 1.1) & (largest <= 448))


@case
def mistakes_raise_on_all_ranks(world: World) -> None:
    buffer = world.buffer()
    x, topk_idx, topk_weights = world.own
    recv_x, *_, handle, _ = dispatch(buffer, x, topk_idx, topk_weights)
    with pytest.raises(InvalidArgument, match="hidden is 48; accepted: a positive multiple of 32"):
        dispatch(buffer, x[:, :48], topk_idx, topk_weights)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    wrong = torch.full_like(topk_idx, 8)
    with pytest.raises(InvalidArgument, match=r"topk_idx\[0, 0\] is 8; accepted: 0 to 7"):
        buffer.dispatch(x, None, per_expert, None, in_rank, per_expert, wrong, topk_weights)
    with pytest.raises(InvalidArgument, match="num_max_tokens_per_rank=2"):
        dispatch(buffer, x, topk_idx, topk_weights, num_worst_tokens=2 * world.num_ranks)
    with pytest.raises(
        InvalidArgument, match=f"num_worst_tokens is 1; accepted: 0, or the {world.num_ranks} ranks times"
    ):
        dispatch(buffer, x, topk_idx, topk_weights, num_worst_tokens=1)
    with pytest.raises(InvalidArgument, match=r"x is .* accepted: \[\d+, hidden\], as dispatched"):
        buffer.combine(torch.cat([recv_x] * (1 + world.rank))[1:], handle)
    with pytest.raises(InvalidArgument, match="bias is "):
        buffer.combine(recv_x, handle, bias=torch.zeros(3, HIDDEN))
    with pytest.raises(InvalidArgument, match="handle is a tuple; accepted: the handle that dispatch returned"):
        buffer.combine(recv_x, ())
    with pytest.raises(InvalidArgument, match="num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert"):
        buffer.dispatch(x, topk_idx=topk_idx, topk_weights=topk_weights)
    elastic = world.elastic(num_max_tokens_per_rank=4)
    with pytest.raises(
        InvalidArgument, match=r"topk_idx is torch.int64 of shape \[\d\]; accepted: \[num_tokens, num_topk\]"
    ):
        elastic.dispatch(x, topk_idx[:, 0], num_experts=NUM_EXPERTS)
    with pytest.raises(InvalidArgument, match="rank 0: x is 9 rows; accepted: at most num_max_tokens_per_rank=8"):
        elastic.dispatch(x, topk_idx, num_experts=NUM_EXPERTS, num_max_tokens_per_rank=8, do_cpu_sync=False)
    with pytest.raises(InvalidArgument, match="rank 0: x is 27 rows; accepted: at most num_max_tokens_per_rank=24"):
        buffer.low_latency_dispatch(x, topk_idx, 8, NUM_EXPERTS)  # a row for each of the three choices
    kept = elastic.dispatch(x[:4], topk_idx[:4], num_experts=NUM_EXPERTS)[3]
    with pytest.raises(NotAvailable, match="ordered by source rank"):
        _ = kept.recv_src_metadata


@case
def destroyed_buffers(world: World) -> None:
    first, second = (world.buffer(explicitly_destroy=True) for _ in range(2))
    dispatch(first, *world.own)
    first.destroy()
    assert deep_ep.communicators()
    dispatch(second, *world.own)
    with pytest.raises(ClosedError):
        dispatch(first, *world.own)
    second.destroy()
    second.destroy()
    assert not deep_ep.communicators()
    with pytest.raises(InvalidArgument, match="explicitly_destroy"):
        world.buffer().destroy()
