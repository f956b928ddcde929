"""Routing on the device: which rows are sent, and where the rows that arrive go. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cuda_compile
from .cpu import RowLayout

_SHARED_EXPERTS = 8192  # counters of 4 bytes per expert that shared memory takes
_MAX_CHUNKS = 256  # every block adds up the counts of all chunks

_ROUTE_THREADS = 256
_MAX_RANKS = 1024  # 36 bytes of shared memory each
_MIN_TOKENS_PER_CHUNK = 64
_ROUTE_COUNTS = 1 << 16  # of ranks and chunks that every block reads
_EXPERT_COUNTS = 1 << 23  # of experts and chunks, kept for the second launch

_READ_THREADS = 512
_MIN_ROWS_PER_CHUNK = 64
_PLACE_WARPS = 16
_READ_COUNTS = 1 << 15  # of experts and chunks that every block reads


def route(
    topk_idx: Tensor, num_experts: int, num_ranks: int, rows_stride: int | None = None, status: int | None = None
) -> tuple[Tensor, Tensor]:
    """One row per (token, rank with one of its experts), ordered by rank, then token.

    Args:
        topk_idx: int32 or int64 `[num_tokens, num_topk]`; entries outside `[-1, num_experts)` are no expert.
        num_experts: a multiple of `num_ranks`.
        num_ranks: ranks, each with `num_experts / num_ranks` experts in order.
        rows_stride: rows from the first row of a rank to that of the next; None = as many as the rank has.
        status: address of an int32 in pinned host memory that becomes 1 if entries are out of range.

    Returns:
        The row of each token for each rank, int64 `[num_tokens, num_ranks]`, or -1; per rank the number of entries out
        of range (the same for all), its rows, and the choices of each of its experts, int64
        `[num_ranks, 2 + num_experts / num_ranks]`.
    """
    num_tokens, num_topk = topk_idx.shape
    experts_per_rank = num_experts // num_ranks
    topk_idx = topk_idx.contiguous()
    most = min(_MAX_CHUNKS, _ROUTE_COUNTS // num_ranks, max(16, _EXPERT_COUNTS // num_experts))
    chunk = _round_up(max(_MIN_TOKENS_PER_CHUNK, _ceil_div(num_tokens, most)), 32)
    grid = max(1, _ceil_div(num_tokens, chunk))
    shared_experts = num_experts <= _SHARED_EXPERTS // 2
    constants = {
        "NUM_RANKS": num_ranks,
        "NUM_TOPK": num_topk,
        "INDEX_BYTES": topk_idx.element_size(),
        "SHARED_EXPERTS": int(shared_experts),
    }
    assert num_ranks <= _MAX_RANKS, f"{num_ranks} ranks need more than the shared memory of a block"
    words = num_ranks * (8 if num_ranks <= 256 else 2)
    table = torch.empty((num_ranks + 1 + num_experts, grid), dtype=torch.int32, device=topk_idx.device)
    token_rows = torch.empty((num_tokens, num_ranks), dtype=torch.int64, device=topk_idx.device)
    counts = torch.empty((num_ranks, 2 + experts_per_rank), dtype=torch.int64, device=topk_idx.device)
    source = (topk_idx.data_ptr(), num_tokens, num_experts, experts_per_rank, chunk)
    cuda_compile.launch(
        "route.cu",
        "route_count",
        constants,
        grid,
        _ROUTE_THREADS,
        (*source, table.data_ptr()),
        shared=4 * (words + num_ranks + num_experts * shared_experts),
    )
    stride = -1 if rows_stride is None else rows_stride
    cuda_compile.launch(
        "route.cu",
        "route_place",
        constants,
        grid,
        _ROUTE_THREADS,
        (*source, stride, table.data_ptr(), token_rows.data_ptr(), counts.data_ptr(), status or 0),
        shared=12 * (num_ranks + words),
    )
    return token_rows, counts


def read_routing(
    buffer: Tensor,
    layout: RowLayout,
    num_topk: int,
    num_local_experts: int,
    alignment: int | None = None,
    num_rows: int | None = None,
    status: int | None = None,
    source_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor] | None]:
    """Reads weights and local experts from received rows and lays the rows out by expert.

    Args:
        buffer: received rows, uint8 `[num_recv_rows, row_bytes]`.
        layout: of a row.
        num_topk: slots per row.
        num_local_experts: experts of this rank, at most 32767.
        alignment: padded groups of the expert layout are multiples of it; None = no expert layout.
        num_rows: rows of the expert layout.
        status: address of an int32 in pinned host memory that becomes 2 if experts are out of range (they read as -1)
            or the layout needs more than `num_rows` rows (what lies beyond is left out).
        source_rows: int64 `[num_recv_rows]`, receives the number of each row that has an expert, -1 for the others.

    Returns:
        Local experts int32 and weights float32 `[num_recv_rows, num_topk]`; rows per local expert, int64; the expert
        layout or None: the received row behind each row `[num_rows]`, or -1; the row of each slot
        `[num_recv_rows, num_topk]`, or -1 (both int64); where each padded group ends, int32; the weight of each row,
        0 for padding, float32 `[num_rows]`.
    """
    assert buffer.is_contiguous()
    assert alignment is None or num_rows is not None
    device = buffer.device
    shape = (buffer.shape[0], num_topk)
    chunk = max(_MIN_ROWS_PER_CHUNK, _ceil_div(shape[0], min(_MAX_CHUNKS, max(16, _READ_COUNTS // num_local_experts))))
    grid = max(1, _ceil_div(shape[0], chunk))
    constants = _read_constants(num_topk, num_local_experts)
    idx = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    histograms = torch.empty((grid, num_local_experts), dtype=torch.int32, device=device)
    num_expert_rows = 0 if alignment is None or num_rows is None else num_rows
    rows = torch.empty(num_expert_rows, dtype=torch.int64, device=device)
    row_weights = torch.empty(num_expert_rows, dtype=torch.float32, device=device)
    cuda_compile.launch(
        "read_routing.cu",
        "read_rows",
        constants,
        grid,
        _READ_THREADS,
        (
            buffer.data_ptr(),
            layout.row_bytes,
            layout.weight_offset,
            layout.expert_offset,
            idx.numel(),
            chunk * num_topk,
            num_local_experts,
            idx.data_ptr(),
            weights.data_ptr(),
            histograms.data_ptr(),
            num_expert_rows,
            rows.data_ptr(),
            row_weights.data_ptr(),
            0 if source_rows is None else source_rows.data_ptr(),
            status or 0,
        ),
        shared=4 * num_local_experts * constants["SHARED_EXPERTS"],
    )
    if alignment is None:
        return idx, weights, _count(histograms, constants), None
    slot_rows = torch.empty(shape, dtype=torch.int64, device=device)
    counts, ends = _place(idx, weights, histograms, chunk, alignment, (rows, slot_rows, row_weights), constants, status)
    return idx, weights, counts, (rows, slot_rows, ends, row_weights)


def _read_constants(num_topk: int, num_local_experts: int) -> dict[str, int]:
    """Macros of `read_routing.cu`."""
    place_warps = _PLACE_WARPS
    while place_warps > 1 and place_warps * num_local_experts > _SHARED_EXPERTS:
        place_warps //= 2
    return {
        "NUM_TOPK": num_topk,
        "SHARED_EXPERTS": int(num_local_experts <= _SHARED_EXPERTS),
        "PLACE_WARPS": place_warps,
        "EXPERT_BITS": (num_local_experts - 1).bit_length(),
    }


def _count(histograms: Tensor, constants: dict[str, int]) -> Tensor:
    """Sums of the columns, int64."""
    num_chunks, num_experts = histograms.shape
    counts = torch.empty(num_experts, dtype=torch.int64, device=histograms.device)
    width = min(num_experts, _READ_THREADS)
    cuda_compile.launch(
        "read_routing.cu",
        "count_experts",
        constants,
        _ceil_div(num_experts, width),
        _READ_THREADS,
        (histograms.data_ptr(), num_chunks, num_experts, width, counts.data_ptr()),
    )
    return counts


def _place(
    idx: Tensor,
    weights: Tensor,
    histograms: Tensor,
    chunk: int,
    alignment: int,
    out: tuple[Tensor, Tensor, Tensor],
    constants: dict[str, int],
    status: int | None,
) -> tuple[Tensor, Tensor]:
    """Fills `out` = rows, slot_rows, row_weights; returns counts and ends of the experts."""
    grid, num_experts = histograms.shape
    assert idx.numel() + num_experts * alignment < 2**31, "positions of the expert layout are int32"
    device = idx.device
    rows, slot_rows, row_weights = out
    counts = torch.empty(num_experts, dtype=torch.int64, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    in_shared = bool(constants["SHARED_EXPERTS"])
    counters = torch.empty((0 if in_shared else grid, num_experts), dtype=torch.int32, device=device)
    cuda_compile.launch(
        "read_routing.cu",
        "place_rows",
        constants,
        grid,
        _READ_THREADS,
        (
            idx.data_ptr(),
            weights.data_ptr(),
            idx.numel(),
            chunk * idx.shape[1],
            num_experts,
            min(num_experts, _READ_THREADS),
            alignment,
            histograms.data_ptr(),
            rows.numel(),
            rows.data_ptr(),
            slot_rows.data_ptr(),
            row_weights.data_ptr(),
            ends.data_ptr(),
            counts.data_ptr(),
            counters.data_ptr(),
            status or 0,
        ),
        shared=4 * constants["PLACE_WARPS"] * num_experts * in_shared,
    )
    return counts, ends


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b
