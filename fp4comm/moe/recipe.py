"""Recipes of a MoE layer: what travels, how experts compute, and what is kept for backward."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidArgument, require
from ..formats import ROW_TILE, Kind
from ..precision import Precision

EXPERTS = ("float", "fp8")
KEEPS = ("rows", "payload")
SCALING = ("row", "block")
_GEMM_ROWS = 16


@dataclass(frozen=True)
class Recipe:
    """How a MoE layer computes. `Recipe.of` knows those with a name.

    Args:
        precision: wire formats of the four legs, or the name of a `Precision`.
        experts: "fp8": GEMMs read E4M3 numbers. "float": they read the dtype of the tokens.
        keeps: what is kept of the received tokens for the weight gradient. "rows": a row per token and local expert, as
            the forward GEMM read it. "payload": a row per received token in the MXFP4 of the wire, from which backward
            makes the same numbers; the dispatch leg must be mxfp4.
        keeps_act: whether the operand of the down projection is kept, too. If not, backward computes it again from the
            gate and up projections, to the same bits; no GEMM is repeated.
        scaling: of FP8 experts, by powers of two. "row": tokens and weights have a scale per row, and where sums run
            over rows, all rows of an expert are brought to the largest of their scales; grouped GEMMs on Hopper read
            this. "block": a scale per 1x128 of tokens, 128x128 of weights and 128x1 where sums run over rows, as in
            DeepSeek-V3.

    Raises:
        InvalidArgument: on construction, for an unknown value or values that don't go together.
    """

    precision: Precision | str = "fp4"
    experts: str = "fp8"
    keeps: str = "payload"
    keeps_act: bool = False
    scaling: str = "row"

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision.of(self.precision))
        require(self.experts in EXPERTS, "experts", repr(self.experts), " or ".join(map(repr, EXPERTS)))
        require(self.keeps in KEEPS, "keeps", repr(self.keeps), " or ".join(map(repr, KEEPS)))
        require(self.scaling in SCALING, "scaling", repr(self.scaling), " or ".join(map(repr, SCALING)))
        dispatch = self.legs.leg("dispatch")
        is_mxfp4 = dispatch.kind == Kind.MXFP4
        require(self.keeps == "rows" or is_mxfp4, "keeps", "'payload'", "'rows' unless the dispatch leg is mxfp4")
        is_rotated = dispatch.hadamard
        require(not is_rotated, "the dispatch leg", "rotated (hadamard)", "one without, whose rows GEMMs can read")

    @property
    def legs(self) -> Precision:
        """`precision`, never a name."""
        return Precision.of(self.precision)

    def expert_alignment(self, has_capacity: bool) -> int:
        """Rows that those of an expert are padded to a multiple of: what FP8 GEMMs on Hopper take.

        Args:
            has_capacity: whether the number of rows is fixed. The host doesn't know the groups then, and the tiles of
                128 rows that share block scales must not span two of them.
        """
        is_by_block = self.experts == "fp8" and self.scaling == "block"
        return ROW_TILE if has_capacity and is_by_block else _GEMM_ROWS

    @classmethod
    def of(cls, recipe: Recipe | str) -> Recipe:
        """`recipe` itself, or the one of that name.

        - "bf16": BF16 on every wire and in every GEMM; keeps all operands, as plain PyTorch does.
        - "fp8_flow": FP8-Flow-MoE (arXiv 2511.02302): FP8 dispatch and grad_dispatch, BF16 combines, FP8 experts that
          read what arrives; keeps FP8 operands.
        - "fp4": the FP4 recipe (arXiv 2603.02731): as "fp8_flow", but tokens travel and are kept as MXFP4.
        - "fp4_all": MXFP4 on every leg, gradients with stochastic rounding and Hadamard transform.
        - "fp32": float32 on every wire, GEMMs in the dtype of the tokens: what the others are compared with.
        """
        if isinstance(recipe, Recipe):
            return recipe
        if not isinstance(recipe, str) or recipe not in _RECIPES:
            accepted = f"a Recipe or one of {', '.join(map(repr, _RECIPES))}"
            raise InvalidArgument(f"recipe is {recipe!r}; accepted: {accepted}")
        return _RECIPES[recipe]


_RECIPES = {
    "bf16": Recipe("bf16", "float", "rows", keeps_act=True),
    "fp8_flow": Recipe("fp8", "fp8", "rows", keeps_act=True),
    "fp4": Recipe("fp4", "fp8", "payload"),
    "fp4_all": Recipe("mxfp4", "fp8", "payload"),
    "fp32": Recipe("fp32", "float", "rows", keeps_act=True),
}
