"""What the experts of the MoE layer add to the GPU codec benchmark: FP8 rows with one scale each, and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from fp4comm.codec import MXFP4Tensor
from fp4comm.formats import GROUP_SIZE, Kind
from fp4comm.fp8_rows import FP8Rows, quantize_fp8_rows
from fp4comm.moe import swiglu
from fp4comm.moe.gemm import FP8Turned, Groups, RowGemms

from .codec_cases import num_bytes
from .cuda_data import POISON, Data
from .cuda_jobs import GpuCase, Job

NUM_MATRICES = 32  # experts of a rank
ALIGNMENT = 16  # of an expert's rows, that of the layer
WIDTH = 2048  # of SwiGLU, at most: that of published figures
SWIGLU_ERROR = 2e-3  # of the norm: its exponential has the device's last bits, and a few codes are the next ones
GEMMS = RowGemms()
Result = Tensor | FP8Rows | FP8Turned


def expert_cases() -> Iterator[GpuCase]:
    """In the order of the table. FP8 rows have one scale each."""
    yield GpuCase("MoE: BF16 -> FP8 rows", quantized)
    yield GpuCase("MoE: weights of 32 experts, FP8 rows, transposed", transposed)
    yield GpuCase("MoE: unpack for experts, MXFP4 -> FP8 rows", unpacked)
    yield GpuCase("MoE: FP8 rows -> columns of 32 experts", columns)
    yield GpuCase("MoE: kept MXFP4 -> columns of 32 experts", payload_columns)
    for how in ("forward", "backward", "backward and act again"):
        yield GpuCase(f"MoE: SwiGLU {how}, BF16 -> FP8 rows", partial(gated, how=how), max_error=SWIGLU_ERROR)


def job_of(make: Callable[[], Sequence[Result]], num_elements: int, num_bytes: int, as_floats: bool = False) -> Job:
    """A job that allocates its results.

    Args:
        make: does it.
        num_elements, num_bytes: see `Job`.
        as_floats: compare numbers, not codes and scales.
    """
    results: list[Result] = []

    def run() -> None:
        results[:] = make()

    def outputs() -> list[Tensor]:
        show = floats if as_floats else memory_of
        return [part for result in results for part in show(result)]

    return Job(run, outputs, num_elements, num_bytes)


def memory_of(result: Result) -> list[Tensor]:
    """What lies in memory."""
    if isinstance(result, FP8Rows):
        return [result.data.view(torch.uint8), result.scales]
    return [result] if isinstance(result, Tensor) else [result.data.view(torch.uint8), result.scales, result.row_scales]


def floats(result: Result) -> list[Tensor]:
    """Its numbers."""
    return [result if isinstance(result, Tensor) else result.dequantize()]


def kept_rows(data: Data, key: object, make: Callable[[Data], FP8Rows]) -> FP8Rows:
    """`Data.kept` for FP8 rows."""
    codes, scales = data.kept(key, lambda own: tuple(memory_of(make(own))))
    return FP8Rows(codes.view(torch.float8_e4m3fn), scales)


def quantized(data: Data) -> Job:
    """All rows, as weights are."""
    src = data.source(Kind.BF16)
    moved = num_bytes(src) + fp8_bytes(len(src), data.hidden)
    return job_of(lambda: [quantize_fp8_rows(src.data)], src.data.numel(), moved)


def fp8_bytes(num_rows: int, width: int) -> int:
    """Of FP8 rows with a scale each."""
    return num_rows * (width + 4)


def gradient_rows(data: Data, num_rows: int) -> FP8Rows:
    """Rows of floats that have been quantized."""
    return kept_rows(data, ("quantized", num_rows), lambda own: quantize_fp8_rows(own.source(Kind.BF16, num_rows).data))


def transposed(data: Data) -> Job:
    """All rows as the matrices of the experts."""
    num_experts = NUM_MATRICES if data.num_rows >= NUM_MATRICES else 1
    rows = gradient_rows(data, data.num_rows // num_experts * num_experts)
    weights = FP8Rows(rows.data.view(num_experts, -1, data.hidden), rows.scales.view(num_experts, -1))
    moved = rows.nbytes + rows.data.nbytes + 4 * num_experts * data.hidden
    return job_of(lambda: [GEMMS.transposed(weights)], rows.data.numel(), moved)


def unpacked(data: Data) -> Job:
    """As `cuda_cases.expanded`: half as many received rows to their up to 8 experts."""
    num_received = max(data.num_rows // 2, 1)
    src, arrivals = data.wire_source(Kind.MXFP4, num_received), data.arrivals(num_received)
    maps = arrivals.rows, arrivals.slot_rows
    out = FP8Rows.empty(len(arrivals.rows), data.hidden, data.device)
    for part in memory_of(out):
        part.view(torch.uint8).fill_(POISON)
    moved = num_bytes(src) + sum(part.nbytes for part in (out, *maps))
    run = partial(data.backend.expand_rows, src, out._rows, *maps, None, data.backend.options())
    return Job(run, lambda: memory_of(out), out.data.numel(), moved)


def groups_of(data: Data) -> Groups:
    """Uneven groups, together at most all rows."""
    sizes = tuple(data.expert_sizes(data.num_rows, ALIGNMENT))
    (ends,) = data.kept("ends", lambda own: (torch.tensor([*accumulate(sizes)], dtype=torch.int32).to(own.device),))
    return Groups(ends, sum(sizes), sizes)


def columns(data: Data) -> Job:
    """The rows of each expert brought to one scale, and turned."""
    groups = groups_of(data)
    rows = gradient_rows(data, groups.num_rows)
    moved = rows.nbytes + column_bytes(data, groups)
    return job_of(lambda: [GEMMS.columns(rows, groups)], rows.data.numel(), moved)


def column_bytes(data: Data, groups: Groups) -> int:
    """Written: codes, and the scale of each expert and, once more, of each row."""
    return fp8_bytes(groups.num_rows, data.hidden) + groups.ends.nbytes


def payload_columns(data: Data) -> Job:
    """Received rows in random order under the scale of each expert, found from those that their FP8 rows had."""
    groups = groups_of(data)
    src, order = data.source(Kind.MXFP4, groups.num_rows), data.permutation(groups.num_rows)
    assert src.scales is not None
    payload, scales = MXFP4Tensor(src.data, src.scales), arrived_rows(data, groups.num_rows).scales
    moved = num_bytes(src) + order.nbytes + scales.nbytes + column_bytes(data, groups)
    return job_of(
        lambda: [GEMMS.payload_columns(payload, order, scales, groups, torch.bfloat16)],
        groups.num_rows * data.hidden,
        moved,
    )


def arrived_rows(data: Data, num_rows: int) -> FP8Rows:
    """MXFP4 rows, taken in random order."""

    def make(own: Data) -> FP8Rows:
        out, order = FP8Rows.empty(num_rows, own.hidden, own.device), own.permutation(num_rows)
        slots = torch.argsort(order)[:, None].contiguous()
        own.backend.expand_rows(own.source(Kind.MXFP4, num_rows), out._rows, order, slots, None, own.backend.options())
        return out

    return kept_rows(data, ("arrived", num_rows), make)


def gated(data: Data, how: str) -> Job:
    """SwiGLU of all rows with the routing weight, or its gradients."""
    width = min(WIDTH, max(data.hidden // GROUP_SIZE, 1) * GROUP_SIZE)

    def make(own: Data) -> tuple[Tensor, ...]:
        generator = own.generator("SwiGLU", own.device)
        numbers = torch.randn(own.num_rows, 3 * width, generator=generator, device=own.device).bfloat16()
        return numbers[:, : 2 * width].contiguous(), numbers[:, 2 * width :].contiguous()

    gate_up, grad = data.kept("SwiGLU", make)
    weights = data.uniform("routing weights", data.num_rows)
    moved = gate_up.nbytes + weights.nbytes + fp8_bytes(data.num_rows, width)
    if how == "forward":
        return job_of(lambda: [swiglu.forward_rows(gate_up, weights, GEMMS)], grad.numel(), moved, as_floats=True)
    makes_act = "act" in how

    def backward() -> list[Result]:
        rows, grad_weights, act = swiglu.backward_rows(gate_up, weights, grad, GEMMS, makes_act)
        return [rows, grad_weights, *([] if act is None else [act])]

    moved = gate_up.nbytes + grad.nbytes + 2 * weights.nbytes + fp8_bytes(data.num_rows, 2 * width)
    moved += fp8_bytes(data.num_rows, width) if makes_act else 0
    return job_of(backward, gate_up.numel() + makes_act * grad.numel(), moved, as_floats=True)
