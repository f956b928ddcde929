"""Grouped GEMMs of experts, behind one interface for all formats and devices.

Rows of all local experts lie one after the other; `Groups` says where those of each end. Three ways to multiply:

- `FloatGemms`: operands are tensors. `torch._grouped_mm` on CUDA, a loop over experts on the CPU.
- `EmulatedFP8Gemms`: operands are FP8 with block scales, expanded to floats that hold the same numbers (float32 on the
  CPU, bfloat16 on CUDA) and multiplied by `FloatGemms`. Runs anywhere.
- `ScaledGemms`: FP8 tensor cores of Hopper through `torch._scaled_mm`, an expert at a time. The host must know the
  groups. Written for torch 2.11 and not yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..backends import Rows, backend_for
from ..codec import FP8Columns, FP8Tensor, MXFP4Tensor, quantize_fp8
from ..errors import InvalidArgument, NotAvailable, require
from ..formats import ROW_TILE, Kind
from ..memory import empty
from ..routing import Routing
from .weights import FP8Blocks, quantize_fp8_blocks

R = TypeVar("R", Tensor, FP8Tensor)  # rows
W = TypeVar("W", Tensor, FP8Blocks)  # weights
C = TypeVar("C", Tensor, FP8Columns)  # columns

_HOPPER = (9, 0)
_PADDED_SCALES = 4
_SCALED_MULTIPLE = 128  # of widths: blocks of weights are whole


@dataclass(frozen=True, eq=False)
class Groups:
    """How consecutive rows divide by local expert; rows after the last group belong to none.

    Attributes:
        ends: int32 `[num_local_experts]`, on the device of the rows: where each group ends.
        num_rows: of all groups, and those after them.
        known_sizes: rows of each group, if the host knows them without waiting for the device.
    """

    ends: Tensor
    num_rows: int
    known_sizes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, routing: Routing) -> Groups:
        """Those of a dispatch in layout "expert"."""
        assert routing.experts is not None
        on_host = routing.experts.ends.device.type == "cpu"
        known = routing.num_rows_per_expert if on_host else routing.sizes.padded_rows_per_expert
        return cls(routing.experts.ends, routing.num_rows, known)

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

    is_fp8: bool
    """Whether rows are FP8."""

    def weights(self, weights: Tensor, dtype: torch.dtype) -> W:
        """The operand for weights of any float dtype; `dtype` is that of the tokens."""

    def transposed(self, weights: W) -> W:
        """The operand for `[num_experts, k, n]`."""

    def rows(self, x: Tensor, dtype: torch.dtype) -> R:
        """The operand for float rows: the conversion of numbers in this interface."""

    def columns(self, x: R, groups: Groups) -> C:
        """The same rows as `weight_gradient` reads them."""

    def payload_columns(self, payload: MXFP4Tensor, rows: Tensor, groups: Groups, dtype: torch.dtype) -> C:
        """Received MXFP4 rows, taken in the order `rows` (-1 = zeros), as `weight_gradient` reads them.

        `dtype` is that of the tokens.
        """

    def multiply(self, x: R, weights: W, groups: Groups, dtype: torch.dtype) -> Tensor:
        """`[num_rows, n]`: each row times the transpose of its expert's matrix; undefined after the groups."""

    def weight_gradient(self, dy: C, x: C, groups: Groups, dtype: torch.dtype) -> Tensor:
        """`[num_experts, n, k]` for dy of n and x of k columns: per expert, dy transposed times x."""


class FloatGemms(Gemms[Tensor, Tensor, Tensor]):
    """Operands in the dtype of the tokens."""

    is_fp8 = False

    def weights(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return weights.to(dtype)

    def transposed(self, weights: Tensor) -> Tensor:
        return weights.transpose(1, 2)

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def columns(self, x: Tensor, groups: Groups) -> Tensor:
        return x

    def payload_columns(self, payload: MXFP4Tensor, rows: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
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


class _FP8Operands:
    """Conversions that all FP8 GEMMs share."""

    is_fp8 = True

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

    def payload_columns(self, payload: MXFP4Tensor, rows: Tensor, groups: Groups, dtype: torch.dtype) -> FP8Columns:
        """Received MXFP4 rows, taken in the order `rows`, as `weight_gradient` reads them."""
        return payload.to_fp8_columns(self._column_sizes(groups), rows)

    def _column_sizes(self, groups: Groups) -> tuple[int, ...]:
        return groups.column_sizes


class EmulatedFP8Gemms(_FP8Operands, Gemms[FP8Tensor, FP8Blocks, FP8Columns]):
    """The numbers of FP8 GEMMs with block scales on any device: only the order of sums is another."""

    _floats = FloatGemms()

    def multiply(self, x: FP8Tensor, weights: FP8Blocks, groups: Groups, dtype: torch.dtype) -> Tensor:
        wide = _wide(x.data)
        return self._floats.multiply(x.dequantize(wide), weights.dequantize(wide), groups, dtype)

    def weight_gradient(self, dy: FP8Columns, x: FP8Columns, groups: Groups, dtype: torch.dtype) -> Tensor:
        wide = _wide(x.data)
        return self._floats.weight_gradient(dy.dequantize().to(wide), x.dequantize().to(wide), groups, dtype)


def _wide(x: Tensor) -> torch.dtype:
    """What holds FP8 numbers with their scales, and is quick to multiply."""
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16


class ScaledGemms(_FP8Operands, Gemms[FP8Tensor, FP8Blocks, FP8Columns]):
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


GEMMS = ("auto", "emulated", "scaled_mm")


def gemms_for(
    experts: str, name: str, device: torch.device, widths: tuple[int, ...], alignment: int, has_capacity: bool
) -> FloatGemms | EmulatedFP8Gemms | ScaledGemms:
    """The GEMMs of a layer.

    Args:
        experts: `Recipe.experts`.
        name: "emulated", "scaled_mm", or "auto": scaled_mm where it can run and the host knows the groups.
        device: of the weights.
        widths: hidden sizes of tokens and experts.
        alignment: every group is a multiple of so many rows.
        has_capacity: whether the number of rows is fixed, so that on a GPU the host doesn't know the groups.

    Raises:
        InvalidArgument: an unknown name, sizes that FP8 GEMMs don't take.
        NotAvailable: "scaled_mm" without a GPU that has it.
    """
    require(name in GEMMS, "gemms", repr(name), ", ".join(map(repr, GEMMS)))
    if experts == "float":
        return FloatGemms()
    if device.type != "cuda":
        if name == "scaled_mm":
            raise NotAvailable(f"gemms is 'scaled_mm' for weights on {device}; it needs a Hopper GPU")
        return EmulatedFP8Gemms()
    if has_capacity and alignment % ROW_TILE:
        accepted = f"a multiple of {ROW_TILE} with num_max_tokens_per_rank and FP8 experts on a GPU"
        raise InvalidArgument(f"expert_alignment is {alignment}; accepted: {accepted}")
    is_hopper = torch.cuda.get_device_capability(device) == _HOPPER
    fits = all(width % _SCALED_MULTIPLE == 0 for width in widths) and alignment % 16 == 0
    if name == "scaled_mm":
        if not is_hopper:
            raise NotAvailable("gemms is 'scaled_mm'; it needs a GPU of compute capability 9.0")
        accepted = f"hidden sizes that are multiples of {_SCALED_MULTIPLE}, and expert_alignment a multiple of 16"
        require(fits, "gemms", f"'scaled_mm' for widths {widths} and alignment {alignment}", accepted)
        return ScaledGemms()
    return ScaledGemms() if name == "auto" and is_hopper and fits and not has_capacity else EmulatedFP8Gemms()
