"""What a MoE layer keeps between forward and backward, by recipe."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch

from ..backends import backend_for
from ..errors import is_count, require
from ..formats import BLOCK_SIZE, GROUP_SIZE, Kind
from .recipe import Recipe

_WEIGHT_BYTES = 4  # float32 routing weight of a row
_ROW_INDEX_BYTES = 8  # int64, where to find a row in the payload
_SCALE_BYTES = 4  # float32


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of the tensors that the experts of a layer save for backward; of one token, or of all rows.

    Attributes:
        x: received tokens, in whatever form, and where to find the rows in it.
        gate_up: results of the first GEMM, what SwiGLU reads.
        act: the operand of the second GEMM.
        weights: routing weights of the rows.
    """

    x: float
    gate_up: float
    act: float
    weights: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.x + self.gate_up + self.act + self.weights


def activation_bytes(
    recipe: Recipe | str,
    *,
    num_rows: float,
    num_recv_tokens: float,
    num_topk: int,
    hidden: int,
    ffn_hidden: int,
    dtype: torch.dtype = torch.bfloat16,
) -> ActivationBytes:
    """What the experts of a rank keep of a forward pass.

    Args:
        recipe: a `Recipe` or the name of one.
        num_rows: rows of the local experts, padding included.
        num_recv_tokens: received tokens, of which each has as many rows as it has experts here.
        num_topk, hidden, ffn_hidden: sizes of the layer.
        dtype: of the tokens, bfloat16 or float32.
    """
    recipe = Recipe.of(recipe)
    has_row_scales = recipe.experts == "fp8" and recipe.scaling == "row"
    if recipe.keeps == "payload":  # a view of the rows of the wire, whose routing is kept with it
        wire_row = backend_for(None).row_layout(Kind.MXFP4, hidden, num_topk).row_bytes
        x = num_recv_tokens * wire_row + num_rows * (_ROW_INDEX_BYTES + _SCALE_BYTES * has_row_scales)
    else:
        x = num_rows * _row_bytes(hidden, recipe, dtype)
    return ActivationBytes(
        x=x,
        gate_up=num_rows * 2 * ffn_hidden * dtype.itemsize,
        act=num_rows * _row_bytes(ffn_hidden, recipe, dtype) * recipe.keeps_act,
        weights=num_rows * _WEIGHT_BYTES,
    )


def activation_bytes_per_token(
    recipe: Recipe | str,
    *,
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    hidden: int,
    ffn_hidden: int,
    dtype: torch.dtype = torch.bfloat16,
) -> ActivationBytes:
    """What the experts keep for each token of a rank, where all sets of experts are equally likely; without padding.

    A token goes once to each rank that has any of its experts, but to each of its experts as a row.

    Args:
        recipe: a `Recipe` or the name of one.
        num_ranks, num_experts, num_topk, hidden, ffn_hidden: sizes of the layer.
        dtype: of the tokens, bfloat16 or float32.

    Raises:
        InvalidArgument: sizes that no layer can have.
    """
    require(is_count(num_ranks, 1), "num_ranks", repr(num_ranks), "a positive integer")
    require(num_experts % num_ranks == 0, "num_experts", num_experts, f"a multiple of num_ranks={num_ranks}")
    require(0 < num_topk <= num_experts, "num_topk", num_topk, f"1 to num_experts={num_experts}")
    require(hidden % BLOCK_SIZE == 0, "hidden", hidden, f"a multiple of {BLOCK_SIZE}")
    elsewhere = num_experts - num_experts // num_ranks
    misses_rank = comb(elsewhere, num_topk) / comb(num_experts, num_topk)
    return activation_bytes(
        recipe,
        num_rows=num_topk,
        num_recv_tokens=num_ranks * (1 - misses_rank),
        num_topk=num_topk,
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        dtype=dtype,
    )


def _row_bytes(width: int, recipe: Recipe, dtype: torch.dtype) -> int:
    if recipe.experts == "float":
        return width * dtype.itemsize
    return width + _SCALE_BYTES * (1 if recipe.scaling == "row" else -(-width // GROUP_SIZE))
