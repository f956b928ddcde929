"""Weights of experts as GEMMs read them, made again only when the parameter has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..backends.gemm_rows import least_exponents
from ..errors import require
from ..formats import GROUP_SIZE

_LEAST_EXPONENT = -126  # scales stay normal numbers

Operand = TypeVar("Operand")


@dataclass(frozen=True, eq=False)
class FP8Blocks:
    """Matrices of E4M3 numbers with a power-of-two float32 scale per block of 128x128.

    Attributes:
        data: float8_e4m3fn `[num_experts, n, k]`.
        scales: float32 `[num_experts, ceil(n / 128), ceil(k / 128)]`.
    """

    data: Tensor
    scales: Tensor

    def transposed(self) -> FP8Blocks:
        """The transposes, in memory of their own: the same numbers, since blocks are square."""
        return FP8Blocks(self.data.transpose(1, 2).contiguous(), self.scales.transpose(1, 2).contiguous())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[num_experts, n, k]`. Exact in float32; in bfloat16, too, where numbers are above its subnormals."""
        _, n, k = self.data.shape
        scales = self.scales.repeat_interleave(GROUP_SIZE, 1)[:, :n].repeat_interleave(GROUP_SIZE, 2)[:, :, :k]
        return (self.data.float() * scales).to(dtype)


def quantize_fp8_blocks(weights: Tensor) -> FP8Blocks:
    """Quantizes matrices to FP8, with the smallest power of two per 128x128 as scale that avoids saturation.

    Args:
        weights: `[num_experts, n, k]` float32, bfloat16 or float16. A block with a NaN or an Inf becomes NaN.

    Raises:
        InvalidArgument: not three dimensions, or not of a float dtype.
    """
    require(weights.ndim == 3, "weights", f"of shape {list(weights.shape)}", "[num_experts, n, k]")
    accepted = "torch.float32, torch.bfloat16 or torch.float16"
    floats = (torch.float32, torch.bfloat16, torch.float16)
    require(weights.dtype in floats, "weights", f"of dtype {weights.dtype}", accepted)
    num_experts, n, k = weights.shape
    data = torch.empty_like(weights, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    shape = (num_experts, -(-n // GROUP_SIZE), -(-k // GROUP_SIZE))
    scales = torch.empty(shape, dtype=torch.float32, device=weights.device)
    for weight, own_data, own_scales in zip(weights, data, scales, strict=True):  # float32 for one expert at a time
        _quantize_matrix(weight.float(), own_data, own_scales)
    return FP8Blocks(data, scales)


def _quantize_matrix(weight: Tensor, data: Tensor, scales: Tensor) -> None:
    n, k = weight.shape
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(weight, (0, columns * GROUP_SIZE - k, 0, rows * GROUP_SIZE - n))
    blocks = padded.view(rows, GROUP_SIZE, columns, GROUP_SIZE)
    amax = blocks.abs().amax(dim=(1, 3))
    exponent = torch.where(torch.isfinite(amax) & (amax > 0), least_exponents(amax), 0).clamp(min=_LEAST_EXPONENT)
    torch.ldexp(torch.ones_like(amax), exponent, out=scales)
    divisor = torch.where(torch.isfinite(amax), scales, torch.nan)
    data.copy_((blocks / divisor[:, None, :, None]).view_as(padded)[:n, :k])


_num_steps = 0
_fused_steps = WeakIdKeyDictionary()  # of a parameter, the last one
_unknown = count()


def _count_step(optimizer: Optimizer, *_: object) -> None:
    global _num_steps
    _num_steps += 1
    for group in optimizer.param_groups:
        if group.get("fused"):
            _fused_steps.update(dict.fromkeys(group["params"], _num_steps))


# Fused ones write to their parameters without a new version of the tensors (torch 2.13), and so do FSDP2 and
# ZeroRedundancyOptimizer, which bring what other ranks have updated.
register_optimizer_step_post_hook(_count_step)


def version(tensor: Tensor) -> tuple[int, int]:
    """Another one after the tensor was written to, also by its own fused optimizer."""
    written = next(_unknown) if tensor.is_inference() else tensor._version  # those have none
    return written, _fused_steps.get(tensor, 0)


class Cached(Generic[Operand]):
    """What `make` makes of a tensor, made again when the tensor may have been written to or is another one.

    Writing through `tensor.data`, and collectives, go unnoticed by torch, and so here: call `forget` after that.
    """

    def __init__(self, make: Callable[[Tensor], Operand]) -> None:
        self._make = make
        self._key: tuple[object, ...] | None = None
        self._storage: StorageWeakRef | None = None
        self._made: Operand | None = None

    def of(self, tensor: Tensor) -> Operand:
        """For the tensor as it is now; not differentiable."""
        is_frozen = tensor.is_leaf and not tensor.requires_grad  # no optimizer has it
        steps = 0 if is_frozen else _num_steps
        layout = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        key = (version(tensor), steps, *layout)
        # Other tensors may lie where one was that is gone.
        is_same = self._storage is not None and not self._storage.expired() and key == self._key
        if self._made is None or not is_same:
            self._made = None  # its memory may serve for the new one
            with torch.no_grad():
                self._made = self._make(tensor.detach())
            self._key, self._storage = key, StorageWeakRef(tensor.untyped_storage())
        return self._made

    def forget(self) -> None:
        """Makes it again at the next use."""
        self._key = self._storage = self._made = None
