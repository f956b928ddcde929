"""Grouped GEMMs of experts, behind one interface for all formats and devices.

Rows of all local experts lie one after the other; `Groups` says where those of each end. Ways to multiply:

- `FloatGemms`: operands are tensors. `torch._grouped_mm` on CUDA, a loop over experts on the CPU.
- `RowGemms`: operands are FP8 with a scale per row. FP8 tensor cores of Hopper through `torch._scaled_grouped_mm`, all
  experts in one kernel. Elsewhere they are expanded to floats that hold the same numbers (float32 on the CPU, bfloat16
  on CUDA) and multiplied by `FloatGemms`.
- `BlockGemms`: operands are FP8 with block scales, expanded in the same way. Runs anywhere.
- `ScaledGemms`: the same on FP8 tensor cores through `torch._scaled_mm`, an expert at a time. The host must know the
  groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..backends import Rows, backend_for
from ..codec import FP8Columns, FP8Tensor, MXFP4Tensor, quantize_fp8
from ..errors import InvalidArgument, NotAvailable, require
from ..formats import ROW_TILE, Kind
from ..fp8_rows import FP8Rows, quantize_fp8_rows
from ..memory import empty
from ..routing import Routing
from .recipe import Recipe
from .weights import FP8Blocks, quantize_fp8_blocks

R = TypeVar("R", Tensor, FP8Tensor, FP8Rows)  # rows
W = TypeVar("W", Tensor, FP8Blocks, FP8Rows)  # weights
C = TypeVar("C", Tensor, FP8Columns, "FP8Turned")  # columns

_HOPPER = (9, 0)
_PADDED_SCALES = 4
_SCALED_MULTIPLE = 128  # of widths: blocks of weights are whole
_GROUPED_MULTIPLE = 16  # of widths and groups: operands begin at multiples of 16 bytes
_SHORT_SUM = 2048  # of so many products, which tensor cores may add up in registers with fewer bits than float32
_LARGE, _FEW_ROWS = 2048, 512  # of both sides of weights, and per expert, where such sums are slower
_MAX_GROUPS = 1023
_TESTED_TORCH = (2, 11)  # by their source, older kernels for weight gradients refuse experts without rows


@dataclass(frozen=True, eq=False)
class Groups:
    """How consecutive rows divide by local expert; rows after the last group belong to none.

    Attributes:
        ends: int32 `[num_local_experts]`, on the device of the rows: where each group ends.
        num_rows: of all groups, and those after them.
        known_sizes: rows of each group, if the host knows them without waiting for the device.
        num_sources: ranks that rows come from. If the host doesn't know the groups, num_rows is what all of them may
            send together, and rows that are spread evenly over the ranks fill that part of it.
        end: int32 `[1]`, if only a GPU knows: what is made of rows from there on is undefined. None = all count.
    """

    ends: Tensor
    num_rows: int
    known_sizes: tuple[int, ...] | None = None
    num_sources: int = 1
    end: Tensor | None = None

    @classmethod
    def of(cls, routing: Routing) -> Groups:
        """Those of a dispatch in layout "expert"."""
        assert routing.experts is not None
        on_host = routing.experts.ends.device.type == "cpu"
        known = routing.num_rows_per_expert if on_host else routing.sizes.padded_rows_per_expert
        return cls(routing.experts.ends, routing.num_rows, known, len(routing.sizes.rows_from_rank), routing.end)

    @classmethod
    def of_sizes(cls, sizes: tuple[int, ...], num_rows: int | None = None, device: str = "cpu") -> Groups:
        """Groups of so many rows."""
        ends = torch.tensor([*accumulate(sizes)], dtype=torch.int32, device=device)
        return cls(ends, sum(sizes) if num_rows is None else num_rows, sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group. Waits for the device if only it knows them."""
        if self.known_sizes is not None:
            return self.known_sizes
        return tuple(end - start for start, end in pairwise([0, *self.ends.tolist()]))

    @property
    def usual_rows(self) -> float:
        """Rows of all groups; where only the device knows them, those of an even spread over the ranks."""
        return self.num_rows if self.known_sizes is not None else self.num_rows / self.num_sources

    @property
    def usual_size(self) -> float:
        """Rows of the largest group; where only the device knows them, of each if all were alike."""
        return max(self.known_sizes) if self.known_sizes is not None else self.usual_rows / len(self.ends)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First row of each group and the row after its last."""
        return list(pairwise(accumulate(self.sizes, initial=0)))

    @property
    def column_sizes(self) -> tuple[int, ...]:
        """Groups of `FP8Columns`: these, or all rows as one where the host doesn't know them.

        Tiles of columns then hold the same rows as long as all groups are a multiple of 128 rows.
        """
        return (self.num_rows,) if self.known_sizes is None else self.known_sizes


class Gemms(Protocol[R, W, C]):
    """What experts need to compute. Rows are `[num_rows, k]`, weights `[num_experts, n, k]`."""

    arrives_as: str | None
    """What `EPCommunicator.dispatch` is to make of received tokens; None = rows in the dtype of the tokens."""

    def empty_rows(self, num_rows: int, hidden: int, device: torch.device, dtype: torch.dtype) -> R:
        """Memory for rows that arrive."""

    def weights(self, weights: Tensor, dtype: torch.dtype) -> W:
        """The operand for weights of any float dtype; `dtype` is that of the tokens."""

    def transposed(self, weights: W) -> W:
        """The operand for `[num_experts, k, n]`."""

    def rows(self, x: Tensor, dtype: torch.dtype) -> R:
        """The operand for float rows: the conversion of numbers in this interface."""

    def columns(self, x: R, groups: Groups) -> C:
        """The same rows as `weight_gradient` reads them."""

    def payload_columns(
        self, payload: MXFP4Tensor, rows: Tensor, scales: Tensor | None, groups: Groups, dtype: torch.dtype
    ) -> C:
        """Received MXFP4 rows, taken in the order `rows` (-1 = zeros), as `weight_gradient` reads them.

        `scales` are those of the rows that `multiply` read, where each has one; `dtype` is that of the tokens.
        """

    def multiply(self, x: R, weights: W, groups: Groups, dtype: torch.dtype) -> Tensor:
        """`[num_rows, n]`: each row times the transpose of its expert's matrix; undefined after the groups."""

    def weight_gradient(self, dy: C, x: C, groups: Groups, dtype: torch.dtype) -> Tensor:
        """`[num_experts, n, k]` for dy of n and x of k columns: per expert, dy transposed times x."""


class FloatGemms(Gemms[Tensor, Tensor, Tensor]):
    """Operands in the dtype of the tokens."""

    arrives_as = None

    def empty_rows(self, num_rows: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return empty((num_rows, hidden), dtype, device)

    def weights(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return weights.to(dtype)

    def transposed(self, weights: Tensor) -> Tensor:
        return weights.transpose(1, 2)

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def columns(self, x: Tensor, groups: Groups) -> Tensor:
        return x

    def payload_columns(
        self, payload: MXFP4Tensor, rows: Tensor, scales: Tensor | None, groups: Groups, dtype: torch.dtype
    ) -> Tensor:
        x = empty((len(rows), payload.hidden), dtype, payload.packed.device)
        backend_for(x).convert_rows(payload._rows, Rows.of(x), rows)
        return x

    def multiply(self, x: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        num_rows, n = x.shape[0], weights.shape[1]
        if _has_grouped_mm(x) and num_rows:
            return torch._grouped_mm(x, weights.transpose(1, 2), offs=groups.ends).to(dtype)
        y = x.new_zeros((num_rows, n), dtype=dtype)
        for weight, (start, end) in zip(weights, groups.bounds, strict=True):
            if end > start:
                y[start:end] = x[start:end] @ weight.t()
        return y

    def weight_gradient(self, dy: Tensor, x: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        if _has_grouped_mm(x) and x.shape[0]:
            return torch._grouped_mm(dy.t(), x, offs=groups.ends).to(dtype)
        gradient = x.new_zeros((groups.ends.shape[0], dy.shape[1], x.shape[1]), dtype=dtype)
        for own, (start, end) in zip(gradient, groups.bounds, strict=True):
            if end > start:
                own.copy_(dy[start:end].float().t() @ x[start:end].float())
        return gradient


def _has_grouped_mm(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


@dataclass(frozen=True, eq=False)
class FP8Turned:
    """The transpose of FP8 rows, of which those of an expert have one scale.

    Attributes:
        data: float8_e4m3fn `[hidden, num_rows]`.
        scales: float32 `[num_experts]`.
        row_scales: float32 `[num_rows]`, the same scales by row. Undefined, as data is, from `Groups.end` on.
    """

    data: Tensor
    scales: Tensor
    row_scales: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[num_rows, hidden]`, contiguous."""
        return (self.data.float() * self.row_scales).t().to(dtype).contiguous()

    @property
    def gemm_scales(self) -> Tensor:
        """A scale for each column of each expert."""
        return self.scales.repeat_interleave(self.data.shape[0])


class RowGemms(Gemms[FP8Rows, FP8Rows, FP8Turned]):
    """A scale per row: FP8 tensor cores of Hopper by `torch._scaled_grouped_mm`, or the same numbers as floats.

    The host need not know the groups. On tensor cores results are rounded to bfloat16, whatever dtype they get.

    Args:
        on_tensor_cores: needs compute capability 9.0, torch 2.11, widths and groups of multiples of 16.
    """

    arrives_as = "fp8_rows"
    _floats = FloatGemms()

    def __init__(self, on_tensor_cores: bool = False) -> None:
        self.on_tensor_cores = on_tensor_cores

    def empty_rows(self, num_rows: int, hidden: int, device: torch.device, dtype: torch.dtype) -> FP8Rows:
        return FP8Rows.empty(num_rows, hidden, device)

    def weights(self, weights: Tensor, dtype: torch.dtype) -> FP8Rows:
        return quantize_fp8_rows(weights)

    def transposed(self, weights: FP8Rows) -> FP8Rows:
        """All rows of an expert are brought to the largest of their scales; only what becomes subnormal is rounded."""
        num_experts, n, k = weights.data.shape
        largest = weights.scales.amax(dim=1, keepdim=True)
        row_scales = largest.expand(num_experts, n).contiguous().view(-1)
        data = backend_for(weights.data).gemm_columns(weights._rows, None, row_scales, (n,) * num_experts)
        return FP8Rows(data.view(num_experts, k, n), largest.expand(num_experts, k).contiguous())

    def rows(self, x: Tensor, dtype: torch.dtype) -> FP8Rows:
        return quantize_fp8_rows(x)

    def columns(self, x: FP8Rows, groups: Groups) -> FP8Turned:
        return self._turned(x._rows, None, x.scales, groups)

    def payload_columns(
        self, payload: MXFP4Tensor, rows: Tensor, scales: Tensor | None, groups: Groups, dtype: torch.dtype
    ) -> FP8Turned:
        assert scales is not None
        return self._turned(payload._rows, rows, scales, groups)

    def _turned(self, rows: Rows, src_row: Tensor | None, scales: Tensor, groups: Groups) -> FP8Turned:
        backend = backend_for(scales)
        of_experts, of_rows = backend.expert_scales(scales, groups.ends)
        data = backend.gemm_columns(rows, src_row, of_rows, end=groups.end)
        return FP8Turned(data.view(rows.hidden, len(scales)), of_experts, of_rows)

    def multiply(self, x: FP8Rows, weights: FP8Rows, groups: Groups, dtype: torch.dtype) -> Tensor:
        if not self.on_tensor_cores or not x.num_rows:
            wide = _wide(x.data)
            return self._floats.multiply(x.dequantize(wide), weights.dequantize(wide), groups, dtype)
        num_experts, n, k = weights.data.shape
        is_slow = min(n, k) >= _LARGE and groups.usual_rows < _FEW_ROWS * num_experts
        operands = x.data, weights.data.transpose(1, 2), x.scales, weights.scales
        return _grouped_mm(*operands, groups, is_quick=k <= _SHORT_SUM and not is_slow).to(dtype)

    def weight_gradient(self, dy: FP8Turned, x: FP8Turned, groups: Groups, dtype: torch.dtype) -> Tensor:
        num_rows = x.data.shape[1]
        if not self.on_tensor_cores or not num_rows:
            wide = _wide(x.data)
            return self._floats.weight_gradient(dy.dequantize(wide), x.dequantize(wide), groups, dtype)
        is_short = groups.usual_size <= _SHORT_SUM
        return _grouped_mm(dy.data, x.data.t(), dy.gemm_scales, x.gemm_scales, groups, is_short).to(dtype)


def _grouped_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, groups: Groups, is_quick: bool) -> Tensor:
    """Rounded to BF16. is_quick: sums stay in the registers of the tensor cores.

    On an H200 that made the error of BF16 results 1.70e-3 for 512 products, 1.87e-3 for 2,048 and 2.52e-3 for 7,168
    instead of 1.66e-3; times see docs/LOG.md.
    """
    options: dict[str, Any] = {"offs": groups.ends, "out_dtype": torch.bfloat16, "use_fast_accum": is_quick}
    return torch._scaled_grouped_mm(a, b, a_scales, b_scales, **options)


class _BlockOperands:
    """Conversions that GEMMs with block scales share."""

    arrives_as: str | None = "fp8"

    def empty_rows(self, num_rows: int, hidden: int, device: torch.device, dtype: torch.dtype) -> FP8Tensor:
        return FP8Tensor.empty(num_rows, hidden, device)

    def weights(self, weights: Tensor, dtype: torch.dtype) -> FP8Blocks:
        return quantize_fp8_blocks(weights)

    def transposed(self, weights: FP8Blocks) -> FP8Blocks:
        return weights.transposed()

    def rows(self, x: Tensor, dtype: torch.dtype) -> FP8Tensor:
        return quantize_fp8(x)

    def columns(self, x: FP8Tensor, groups: Groups) -> FP8Columns:
        """As `FP8Tensor.to_columns`, by the exponents alone: scales that we made need no check, which would wait."""
        sizes = self._column_sizes(groups)
        exponents = (x.scales.view(torch.int32) >> 23).to(torch.uint8)
        rows = Rows(Kind.FP8_E8M0, x.data[: sum(sizes)], exponents[: sum(sizes)])
        data, scales = backend_for(x.data).fp8_columns(rows, None, sizes)
        return FP8Columns(data, scales, sizes)

    def payload_columns(
        self, payload: MXFP4Tensor, rows: Tensor, scales: Tensor | None, groups: Groups, dtype: torch.dtype
    ) -> FP8Columns:
        return payload.to_fp8_columns(self._column_sizes(groups), rows)

    def _column_sizes(self, groups: Groups) -> tuple[int, ...]:
        return groups.column_sizes


class BlockGemms(_BlockOperands, Gemms[FP8Tensor, FP8Blocks, FP8Columns]):
    """The numbers of FP8 GEMMs with block scales on any device: only the order of sums is another."""

    _floats = FloatGemms()

    def multiply(self, x: FP8Tensor, weights: FP8Blocks, groups: Groups, dtype: torch.dtype) -> Tensor:
        wide = _wide(x.data)
        return self._floats.multiply(x.dequantize(wide), weights.dequantize(wide), groups, dtype)

    def weight_gradient(self, dy: FP8Columns, x: FP8Columns, groups: Groups, dtype: torch.dtype) -> Tensor:
        wide = _wide(x.data)
        return self._floats.weight_gradient(dy.dequantize().to(wide), x.dequantize().to(wide), groups, dtype)


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def _wide(x: Tensor) -> torch.dtype:
    """What holds FP8 numbers with their scales, and is quick to multiply."""
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16


class ScaledGemms(_BlockOperands, Gemms[FP8Tensor, FP8Blocks, FP8Columns]):
    """FP8 tensor cores: `torch._scaled_mm` per expert, 1x128 by 128x128 and, for weight gradients, 1x128 by 1x128.

    Needs compute capability 9.0, torch built with CUDA 12.9 or newer, widths that are multiples of 128 and groups of a
    multiple of 16 rows.
    """

    def _column_sizes(self, groups: Groups) -> tuple[int, ...]:
        return groups.sizes

    def multiply(self, x: FP8Tensor, weights: FP8Blocks, groups: Groups, dtype: torch.dtype) -> Tensor:
        y = x.data.new_empty((x.num_rows, weights.data.shape[1]), dtype=dtype)
        weight_scales = _as_cublas_reads(weights.scales)
        for expert, (start, end) in enumerate(groups.bounds):
            if end > start:
                torch._scaled_mm(
                    x.data[start:end],
                    weights.data[expert].t(),
                    x.scales[start:end].t().contiguous().t(),  # the rows' scales next to each other
                    weight_scales[expert].t(),
                    out_dtype=dtype,
                    out=y[start:end],
                )
        return y

    def weight_gradient(self, dy: FP8Columns, x: FP8Columns, groups: Groups, dtype: torch.dtype) -> Tensor:
        gradient = torch.zeros(len(groups.sizes), dy.hidden, x.hidden, dtype=dtype, device=x.data.device)
        for expert, size in enumerate(groups.sizes):
            if size:
                (a, a_scales), (b, b_scales) = dy.expert(expert), x.expert(expert)
                torch._scaled_mm(a, b.t(), a_scales.t(), b_scales, out_dtype=dtype, out=gradient[expert])
        return gradient


def _as_cublas_reads(scales: Tensor) -> Tensor:
    """The scales of 128x128 blocks in memory where each row takes a multiple of four numbers.

    cuBLAS reads them so, whatever torch thinks of it: 2.11 demands strides without that padding and hands over the
    address alone, so that unpadded rows give wrong products (by 30 to 50 % where k / 128 is no multiple of 4, measured
    on an H200). There the strides are those that torch demands, over memory that is padded nevertheless.
    """
    padded = _with_padded_rows(scales)
    if _wants_padded_scales():
        return padded
    n = scales.shape[-1]
    return padded.as_strided(scales.shape, (padded.stride(0), n, 1))


def _with_padded_rows(scales: Tensor) -> Tensor:
    """The same `[..., n]`, rows at a multiple of four numbers."""
    n = scales.shape[-1]
    return torch.nn.functional.pad(scales, (0, -n % _PADDED_SCALES))[..., :n]


@cache
def _wants_padded_scales() -> bool:
    """Whether `torch._scaled_mm` demands strides with that padding, about which its versions disagree."""
    data, scales = torch.zeros(256, 256, device="cuda").to(torch.float8_e4m3fn), torch.ones(2, 2, device="cuda")
    row_scales = torch.ones(2, 256, device="cuda").t()
    try:
        torch._scaled_mm(data, data.t(), row_scales, _with_padded_rows(scales).t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


GEMMS = ("auto", "emulated", "tensor_cores")


def gemms_for(
    recipe: Recipe,
    name: str,
    device: torch.device,
    widths: tuple[int, ...],
    alignment: int,
    has_capacity: bool,
    num_experts: int = 1,
) -> FloatGemms | RowGemms | BlockGemms | ScaledGemms:
    """The GEMMs of a layer.

    Args:
        recipe: says what they read.
        name: of FP8 GEMMs: "tensor_cores", "emulated", or "auto": on tensor cores where that can be, but with block
            scales only if the host knows the groups without waiting.
        device: of the weights.
        widths: hidden sizes of tokens and experts.
        alignment: every group is a multiple of so many rows.
        has_capacity: whether the number of rows is fixed, so that on a GPU the host doesn't know the groups.
        num_experts: of a rank.

    Raises:
        InvalidArgument: an unknown name, sizes that FP8 GEMMs don't take.
        NotAvailable: "tensor_cores" without a GPU that has such.
    """
    require(name in GEMMS, "gemms", repr(name), ", ".join(map(repr, GEMMS)))
    if recipe.experts == "float":
        return FloatGemms()
    by_row = recipe.scaling == "row"
    multiple = _GROUPED_MULTIPLE if by_row else _SCALED_MULTIPLE
    fits = all(width % multiple == 0 for width in widths) and alignment % _GROUPED_MULTIPLE == 0
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER
    can_run = is_hopper and _torch_version() >= _TESTED_TORCH
    if name == "tensor_cores":
        if not can_run:
            needs = f"a GPU of compute capability 9.0 and torch {'.'.join(map(str, _TESTED_TORCH))} or newer"
            found = f"weights on {device} with torch {torch.__version__}"
            raise NotAvailable(f"gemms is 'tensor_cores' for {found}; it needs {needs}")
        accepted = f"hidden sizes of multiples of {multiple}, and expert_alignment of {_GROUPED_MULTIPLE}"
        require(fits, "gemms", f"'tensor_cores' for widths {widths} and expert_alignment {alignment}", accepted)
        most = f"at most {_MAX_GROUPS} with 'tensor_cores' and scales per row"
        require(not by_row or num_experts <= _MAX_GROUPS, "experts of a rank", num_experts, most)
    if by_row:
        return RowGemms(on_tensor_cores=can_run and fits and num_experts <= _MAX_GROUPS and name != "emulated")
    if device.type == "cuda" and has_capacity and alignment % ROW_TILE:
        accepted = f"a multiple of {ROW_TILE} with num_max_tokens_per_rank and block scales on a GPU"
        raise InvalidArgument(f"expert_alignment is {alignment}; accepted: {accepted}")
    wanted = can_run and fits and (name == "tensor_cores" or (name == "auto" and not has_capacity))
    return ScaledGemms() if wanted else BlockGemms()
