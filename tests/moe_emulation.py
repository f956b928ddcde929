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
LEAST = 2.0**-126


def float32(x: F64) -> NDArray[np.float32]:
    return np.asarray(x, np.float32)


def through(wire: str, x: F64, scale_mode: str = "even") -> F64:
    """Numbers as they arrive, for wires without randomness."""
    if wire == "fp32":
        return float32(x).astype(np.float64)
    if wire == "bf16":
        return oracle.widen_bf16(oracle.round_bf16(float32(x))).astype(np.float64)
    if wire == "fp8":
        return oracle.decode_fp8(*oracle.encode_fp8(float32(x))).astype(np.float64)
    return oracle.decode_mxfp4(*oracle.encode_mxfp4(float32(x), scale_mode)).astype(np.float64)


class Floats:
    """GEMMs in the dtype of the tokens. Pairs: what products of rows read, and what sums over rows read."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def weights(self, matrix: F64) -> tuple[F64, F64]:
        """Of one expert, for rows and for gradients of rows."""
        return matrix, matrix

    def arrived(self, wire: str, sent: F64, scale_mode: str) -> tuple[F64, F64]:
        """Rows of one expert as they come over a wire."""
        values = through(wire, sent, scale_mode)
        return values, values

    def rows(self, x: F64) -> tuple[F64, F64]:
        """Rows of one expert that are made of floats."""
        values = through(self.dtype, x)
        return values, values


class Blocks:
    """FP8 with a power-of-two scale per 1x128, 128x128 and 128x1."""

    def weights(self, matrix: F64) -> tuple[F64, F64]:
        out = np.zeros_like(matrix)
        for i in range(0, matrix.shape[0], BLOCK):
            for j in range(0, matrix.shape[1], BLOCK):
                block = matrix[i : i + BLOCK, j : j + BLOCK]
                out[i : i + BLOCK, j : j + BLOCK] = e4m3(block, least_scale(np.abs(block).max()))
        return out, out

    def arrived(self, wire: str, sent: F64, scale_mode: str) -> tuple[F64, F64]:
        if wire != "mxfp4":
            return self.rows(through(wire, sent))
        codes = oracle.encode_mxfp4(float32(sent), scale_mode)
        columns = oracle.fp8_columns_values(*oracle.mxfp4_to_fp8_columns(*codes), sent.shape[1])
        return oracle.decode_fp8(*oracle.mxfp4_to_fp8(*codes)).astype(np.float64), columns.astype(np.float64)

    def rows(self, x: F64) -> tuple[F64, F64]:
        codes, scales = oracle.encode_fp8(float32(x))
        columns = oracle.fp8_columns_values(*oracle.fp8_to_fp8_columns(codes, scales), x.shape[1])
        return oracle.decode_fp8(codes, scales).astype(np.float64), columns.astype(np.float64)


class Rows:
    """FP8 with a power-of-two scale per row, and one per expert in sums over rows."""

    def weights(self, matrix: F64) -> tuple[F64, F64]:
        return self.rows(matrix)

    def arrived(self, wire: str, sent: F64, scale_mode: str) -> tuple[F64, F64]:
        if wire == "mxfp4":
            packed, bytes_ = oracle.encode_mxfp4(float32(sent), scale_mode)
            scales = 2.0 ** np.maximum(bytes_.max(axis=1, initial=0).astype(np.float64) - 6 - 127, -126)
            return self.moved(oracle.decode_mxfp4(packed, bytes_).astype(np.float64), scales)
        if wire == "fp8":
            codes, groups = oracle.encode_fp8(float32(sent))
            values = oracle.decode_fp8(codes, groups).astype(np.float64)
            has_numbers = np.add.reduceat(values != 0, range(0, values.shape[1], BLOCK), axis=1) > 0
            return self.moved(values, np.where(has_numbers, groups, LEAST).max(axis=1, initial=LEAST))
        return self.rows(through(wire, sent))

    def rows(self, x: F64) -> tuple[F64, F64]:
        return self.moved(x, least_scale(np.abs(x).max(axis=1, initial=0)))

    def moved(self, x: F64, scales: F64) -> tuple[F64, F64]:
        """Rows under scales of their own, then all under the largest of these."""
        rows = e4m3(x, scales[:, None])
        return rows, e4m3(rows, scales.max(initial=LEAST))


def least_scale(largest: F64) -> F64:
    """The least power of two that avoids saturation."""
    return np.maximum(2.0 ** np.ceil(np.log2(np.maximum(largest, 1e-300) / 448)), LEAST)


def e4m3(x: F64, scale: F64) -> F64:
    """The nearest numbers of E4M3 times a scale."""
    codes = oracle.nearest_code(np.abs(x) / scale, oracle.E4M3_MAGNITUDES)
    return np.sign(x) * oracle.E4M3_MAGNITUDES[codes] * scale


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
        results = Results()
        out, grad_x, grad_w = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
        for rank in range(self.num_ranks):
            own_out, own_grad = np.zeros_like(x), np.zeros_like(x)
            for expert in range(rank * num_local, (rank + 1) * num_local):
                tokens, slots = np.nonzero(choices == expert)
                y, gx, gw, g_gate_up, g_down = self.expert(expert, x[tokens], w[tokens, slots], grad[tokens])
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

    def expert(self, expert: int, x: F64, w: F64, dy: F64) -> tuple[F64, F64, F64, F64, F64]:
        """One expert's rows: y, gradients of x and w, of gate_up and of down."""
        gemms, legs = self.gemms, self.recipe.legs
        gate_up, gate_up_back = gemms.weights(self.rounded(self.gate_up[expert]))
        down, down_back = gemms.weights(self.rounded(self.down[expert]))
        x, x_columns = gemms.arrived(legs.leg("dispatch").wire, x, "even")
        dy, dy_columns = gemms.arrived(legs.leg("grad_dispatch").wire, dy, "rceil")
        gate, up = np.split(self.rounded(x @ gate_up.T), 2, axis=1)
        sigmoid = 1 / (1 + np.exp(-gate))
        act, act_columns = gemms.rows(gate * sigmoid * up * w[:, None])
        d_act = self.rounded(dy @ down_back)
        dw = (d_act * gate * sigmoid * up).sum(axis=1)
        d_up = d_act * w[:, None] * gate * sigmoid
        d_gate = d_act * w[:, None] * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_hidden, d_hidden_columns = gemms.rows(np.concatenate([d_gate, d_up], axis=1))
        y, dx = self.rounded(act @ down.T), self.rounded(d_hidden @ gate_up_back)
        return y, dx, dw, self.rounded(d_hidden_columns.T @ x_columns), self.rounded(dy_columns.T @ act_columns)

    @property
    def gemms(self) -> Floats | Blocks | Rows:
        """What GEMMs read."""
        if self.recipe.experts == "float":
            return Floats(self.dtype)
        return Rows() if self.recipe.scaling == "row" else Blocks()
