"""The cases of `ElasticBuffer`; see deep_ep_cases.py."""

from __future__ import annotations

import pytest
import torch
from adapters.deep_ep_world import NUM_EXPERTS, NUM_TOKENS, NUM_TOPK, World, registry, same
from torch import Tensor

from fp4comm import InvalidArgument
from fp4comm.adapters import deep_ep
from fp4comm.adapters.deep_ep._events import _tensors

CASES, case = registry()


@case
def elastic_rows_per_rank(world: World) -> None:
    x, topk_idx, topk_weights = world.own
    expected = world.arriving(world.x)
    for do_cpu_sync in (None, False):
        buffer = world.elastic(num_max_tokens_per_rank=10)
        stats = torch.zeros(world.num_local_experts, dtype=torch.int32)
        recv_x, idx, weights, handle, event = buffer.dispatch(
            x, topk_idx, topk_weights, stats, NUM_EXPERTS, expert_alignment=4, do_cpu_sync=do_cpu_sync
        )
        received = len(expected)
        assert event.event is None
        assert len(recv_x) == len(idx) == len(weights) == (received if do_cpu_sync is None else 10 * world.num_ranks)
        assert same(recv_x[:received], expected)
        assert same(idx[:received], world.arriving(lambda rank: world.local_topk(rank)[0]))
        assert same(weights[:received], world.arriving(lambda rank: world.local_topk(rank)[1]))
        assert stats.tolist() == world.counts
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == world.counts
        padded = [-(-count // 4) * 4 for count in world.counts]
        assert handle.num_recv_tokens_per_expert_list == (padded if do_cpu_sync is None else [])
        assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(padded).cumsum(0).tolist()
        per_rank = [int((world.local_topk(rank)[0] >= 0).any(1).sum()) for rank in range(world.num_ranks)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == torch.tensor(per_rank).cumsum(0).tolist()
        assert handle.topk_idx is not topk_idx
        assert any(tensor is handle._routes.routing.plan.token_rows for tensor in _tensors(handle))  # kept for streams
        combined, home, _ = buffer.combine(recv_x, handle, weights)
        assert same(combined, (x.float() * world.num_copies).bfloat16())
        assert same(home, topk_weights.masked_fill(topk_idx < 0, 0))
        again, again_idx, again_weights, again_handle, _ = buffer.dispatch(
            -x, topk_weights=-topk_weights, handle=handle
        )
        assert again_handle is handle
        assert same(again[:received], -expected)
        assert same(again_idx, idx)
        assert again_weights is not None
        assert torch.equal(-again_weights, weights)
        assert buffer.dispatch(x, handle=handle)[2] is None


@case
def elastic_handles_of_different_dispatches(world: World) -> None:
    """Also of rows of other widths, which other communicators move, and of before `close`."""
    x, topk_idx, topk_weights = world.own
    buffer = world.elastic(num_max_tokens_per_rank=10)

    if world.num_ranks == 1:
        return
    wide = torch.cat([x, x], dim=1)
    first, second = (buffer.dispatch(rows, topk_idx, topk_weights, num_experts=NUM_EXPERTS) for rows in (x, wide))
    deep_ep.close()
    third = buffer.dispatch(x, topk_idx, topk_weights, num_experts=NUM_EXPERTS)
    for one, other in ((first, second), (first, third)):
        mine = (one, other)[world.rank % 2]
        with pytest.raises(InvalidArgument, match='handle is "of dispatch'):
            buffer.combine(torch.ones(len(mine[0]), x.shape[1]).to(x), mine[3])
    buffer.combine(third[0], third[3])


@case
def elastic_mistakes(world: World) -> None:
    x, topk_idx, _ = world.own
    for alignment in (0, -4):
        for buffer in (world.buffer(), world.elastic()):
            with pytest.raises(InvalidArgument, match=f"expert_alignment is {alignment}; accepted: a positive integer"):
                buffer.dispatch(x, topk_idx=topk_idx, expert_alignment=alignment)
    with pytest.raises(InvalidArgument, match=r"x is a int; accepted: \[num_tokens, hidden\], or that and scales"):
        world.elastic().dispatch([1, 2], topk_idx, num_experts=NUM_EXPERTS)
    with pytest.raises(InvalidArgument, match="topk_idx is a NoneType"):
        world.elastic().dispatch([1, 2])


@case
def elastic_rows_per_expert(world: World) -> None:
    x, topk_idx, topk_weights = world.own
    arriving = world.arriving(world.x)
    for do_cpu_sync, alignment in ((True, 1), (True, 4), (False, 1), (False, 4)):
        buffer = world.elastic()
        recv_x, idx, weights, handle, _ = buffer.dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts=NUM_EXPERTS,
            num_max_tokens_per_rank=10,
            expert_alignment=alignment,
            do_cpu_sync=do_cpu_sync,
            do_expand=True,
            do_zero_padding=True,
            do_handle_copy=False,
        )
        expected = world.expanded(arriving, alignment)
        used = len(expected)
        most = world.num_ranks * 10 * min(NUM_TOPK, world.num_local_experts) + (alignment - 1) * world.num_local_experts
        assert len(recv_x) == len(weights) == (used if do_cpu_sync else -(-most // alignment) * alignment)
        assert idx is None
        assert same(recv_x[:used], expected)
        assert not recv_x[used:].any()
        all_idx = world.arriving(lambda rank: world.local_topk(rank)[0])
        all_weights = world.arriving(lambda rank: world.local_topk(rank)[1])
        parts = [
            torch.nn.functional.pad(part, (0, -len(part) % alignment))
            for part in (all_weights[all_idx == expert] for expert in range(world.num_local_experts))
        ]
        assert same(weights[:used], torch.cat(parts))
        assert handle.topk_idx is topk_idx
        padded = torch.tensor([-(-count // alignment) * alignment for count in world.counts])
        counts = torch.tensor(world.counts)
        assert handle.psum_num_recv_tokens_per_expert.tolist() == (padded.cumsum(0) - padded + counts).tolist()
        kept = weights.clone()
        weights.mul_(0.5)  # is the caller's business: combine sends what it is given
        weights.copy_(kept)
        combined, home, _ = buffer.combine(recv_x, handle, weights, bias=x)
        num_picks = (topk_idx >= 0).sum(1, keepdim=True)
        assert torch.allclose(combined.float(), x.float() * (num_picks + 1), rtol=2**-7, atol=1e-6)
        assert same(home, topk_weights.masked_fill(topk_idx < 0, 0))
        again, _, again_weights, _, _ = buffer.dispatch(x, topk_weights=topk_weights, handle=handle, do_expand=True)
        assert same(again, recv_x)
        assert same(again_weights, weights)


def bytes_and_scales(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(0, 256, (NUM_TOKENS[rank], 48), generator=generator, device="cpu")
    scales = torch.randint(-(2**31), 2**31, (NUM_TOKENS[rank], 3), generator=generator, device="cpu")
    device = torch.get_default_device()
    return data.to(device, torch.uint8), scales.to(device, torch.int32)


@case
def elastic_bytes(world: World) -> None:
    """Rows of any dtype travel as they are, and scales with them."""
    buffer = world.elastic("fp4")
    _, topk_idx, topk_weights = world.own

    (data, scales), *_ = buffer.dispatch(
        bytes_and_scales(world.rank), topk_idx, topk_weights, num_experts=NUM_EXPERTS, use_tma_aligned_col_major_sf=True
    )
    assert same(data, world.arriving(lambda rank: bytes_and_scales(rank)[0]))
    assert same(scales, world.arriving(lambda rank: bytes_and_scales(rank)[1]))
    assert scales.stride(0) == 1
    assert scales.stride(1) % 4 == 0
    alone = buffer.dispatch(bytes_and_scales(world.rank)[0], topk_idx, num_experts=NUM_EXPERTS)
    assert same(alone[0], data)
    assert alone[2] is None


@case
def elastic_asynchronous_calls(world: World) -> None:
    """Also in turn with others, and with a handle that is dropped while it is in use."""
    x, topk_idx, topk_weights = world.own
    buffer = world.elastic()
    for is_first_async, is_second_async in ((True, True), (True, False), (False, True)):
        recv_x, _, weights, handle, event = buffer.dispatch(
            x, topk_idx, topk_weights, num_experts=NUM_EXPERTS, async_with_compute_stream=is_first_async
        )
        assert (event.event is not None) == is_first_async
        if is_first_async:
            event.current_stream_wait()
        assert same(recv_x, world.arriving(world.x))
        combined, home, event = buffer.combine(
            recv_x, handle, weights, previous_event=buffer.capture(), async_with_compute_stream=is_second_async
        )
        del recv_x, weights, handle
        others = [torch.full((size,), -1) for size in range(1, 200)]  # in memory that was freed just now
        if is_second_async:
            event.current_stream_wait()
        assert same(combined, (x.float() * world.num_copies).bfloat16())
        assert same(home, topk_weights.masked_fill(topk_idx < 0, 0))
        del others
