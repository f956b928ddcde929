"""Experts of all ranks in one process and in float64, with the quantization points of a recipe.

Nothing is shared with the code under test but the oracle of `fp4comm.reference`, which shares nothing with the codec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4comm.moe import Recipe
from fp4comm.reference import codec as oracle

F64 = NDArray[np.float64]
BLOCK = 128


def blocks_of(matrix: F64) -> F64:
    """The values of one matrix after FP8 with a power-of-two scale per 128x128."""
    out = np.zeros_like(matrix)
    for i in range(0, matrix.shape[0], BLOCK):
        for j in range(0, matrix.shape[1], BLOCK):
            block = matrix[i : i + BLOCK, j : j + BLOCK]
            scale = 2.0 ** np.ceil(np.log2(np.abs(block).max() / 448))
            codes = oracle.nearest_code(np.abs(block) / scale, oracle.E4M3_MAGNITUDES)
            out[i : i + BLOCK, j : j + BLOCK] = np.sign(block) * oracle.E4M3_MAGNITUDES[codes] * scale
    return out


def float32(x: F64) -> NDArray[np.float32]:
    return np.asarray(x, np.float32)


def fp8_rows(x: F64) -> tuple[F64, F64]:
    """The values of rows after FP8, and those of the columns made of them, in one group."""
    codes, scales = oracle.encode_fp8(float32(x))
    columns = oracle.fp8_columns_values(*oracle.fp8_to_fp8_columns(codes, scales), x.shape[1])
    return oracle.decode_fp8(codes, scales).astype(np.float64), columns.astype(np.float64)


def through(wire: str, x: F64, scale_mode: str = "even") -> F64:
    """Numbers as they arrive, for wires without randomness."""
    if wire == "fp32":
        return float32(x).astype(np.float64)
    if wire == "bf16":
        return oracle.widen_bf16(oracle.round_bf16(float32(x))).astype(np.float64)
    if wire == "fp8":
        return oracle.decode_fp8(*oracle.encode_fp8(float32(x))).astype(np.float64)
    return oracle.decode_mxfp4(*oracle.encode_mxfp4(float32(x), scale_mode)).astype(np.float64)


def columns_of_tokens(wire: str, x: F64) -> tuple[F64, F64]:
    """Received rows as FP8 rows and columns."""
    if wire != "mxfp4":
        return fp8_rows(x)
    codes = oracle.encode_mxfp4(float32(x))
    columns = oracle.fp8_columns_values(*oracle.mxfp4_to_fp8_columns(*codes), x.shape[1])
    return oracle.decode_fp8(*oracle.mxfp4_to_fp8(*codes)).astype(np.float64), columns.astype(np.float64)


@dataclass
class Results:
    """Per rank: results and gradients; per expert: gradients of its weights."""

    out: list[F64] = field(default_factory=list)
    grad_x: list[F64] = field(default_factory=list)
    grad_topk_weights: list[F64] = field(default_factory=list)
    grad_gate_up: list[F64] = field(default_factory=list)
    grad_down: list[F64] = field(default_factory=list)


@dataclass
class Emulation:
    """Experts with the numbers of a recipe.

    Attributes:
        recipe: legs without randomness.
        gate_up: `[num_experts, 2 * ffn_hidden, hidden]`, of all ranks.
        down: `[num_experts, hidden, ffn_hidden]`.
        num_ranks: among which the experts are spread.
        dtype: of tokens, weights and what GEMMs return: "fp32" or "bf16".
    """

    recipe: Recipe
    gate_up: F64
    down: F64
    num_ranks: int
    dtype: str = "fp32"

    def rounded(self, x: F64) -> F64:
        """To the dtype of the tokens."""
        return through(self.dtype, x)

    def __call__(self, xs: list[Any], idx: list[Any], weights: list[Any], grads: list[Any]) -> Results:
        """Forward and backward for tokens, choices, routing weights and gradients of the result, per rank."""
        legs, sizes = self.recipe.legs, [len(x) for x in xs]
        assert not any(leg["stochastic"] or leg["hadamard"] for leg in legs.legs().values())
        x, choices, w, grad = (np.concatenate(parts) for parts in (xs, idx, weights, grads))
        x, w, grad = self.rounded(x), w.astype(np.float64), self.rounded(grad)
        num_local = len(self.gate_up) // self.num_ranks
        arrived = through(legs.leg("dispatch").wire, x)
        grad_arrived = through(legs.leg("grad_dispatch").wire, grad, "rceil")
        results = Results()
        out, grad_x, grad_w = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
        for rank in range(self.num_ranks):
            own_out, own_grad = np.zeros_like(x), np.zeros_like(x)
            for expert in range(rank * num_local, (rank + 1) * num_local):
                tokens, slots = np.nonzero(choices == expert)
                y, gx, gw, g_gate_up, g_down = self.expert(
                    expert, x[tokens], arrived[tokens], w[tokens, slots], grad_arrived[tokens]
                )
                own_out[tokens] += y
                own_grad[tokens] += gx
                grad_w[tokens, slots] = gw
                results.grad_gate_up.append(g_gate_up)
                results.grad_down.append(g_down)
            out += through(legs.leg("combine").wire, own_out)
            grad_x += through(legs.leg("grad_combine").wire, own_grad, "rceil")
        out, grad_x = self.rounded(out), self.rounded(grad_x)
        ends = np.cumsum(sizes)[:-1]
        results.out, results.grad_x = np.split(out, ends), np.split(grad_x, ends)
        results.grad_topk_weights = np.split(grad_w, ends)
        return results

    def expert(self, expert: int, sent: F64, x: F64, w: F64, dy: F64) -> tuple[F64, F64, F64, F64, F64]:
        """One expert's rows: y, gradients of x and w, of gate_up and of down."""
        gate_up, down = self.rounded(self.gate_up[expert]), self.rounded(self.down[expert])
        rows = self.float_rows
        x_columns = x
        if self.recipe.experts == "fp8":
            gate_up, down, rows = blocks_of(gate_up), blocks_of(down), fp8_rows
            x, x_columns = columns_of_tokens(self.recipe.legs.leg("dispatch").wire, sent)
        dy, dy_columns = rows(dy)
        gate, up = np.split(self.rounded(x @ gate_up.T), 2, axis=1)
        sigmoid = 1 / (1 + np.exp(-gate))
        act, act_columns = rows(gate * sigmoid * up * w[:, None])
        d_act = self.rounded(dy @ down)
        dw = (d_act * gate * sigmoid * up).sum(axis=1)
        d_up = d_act * w[:, None] * gate * sigmoid
        d_gate = d_act * w[:, None] * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_hidden, d_hidden_columns = rows(np.concatenate([d_gate, d_up], axis=1))
        y, dx = self.rounded(act @ down.T), self.rounded(d_hidden @ gate_up)
        return y, dx, dw, self.rounded(d_hidden_columns.T @ x_columns), self.rounded(dy_columns.T @ act_columns)

    def float_rows(self, x: F64) -> tuple[F64, F64]:
        """As `fp8_rows`, for GEMMs in the dtype of the tokens."""
        return self.rounded(x), self.rounded(x)
