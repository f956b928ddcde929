"""Which numbers travel on which leg.

A leg is one of the four all-to-alls of a MoE layer: `dispatch` and `combine` in the forward pass, `grad_dispatch` (the
backward of combine) and `grad_combine` (the backward of dispatch).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from .errors import InvalidArgument
from .formats import Kind, scale_mode, wire_kind


@dataclass(frozen=True)
class Leg:
    """What one leg sends.

    Args:
        wire: "fp32", "bf16", "fp8" (E4M3, a power-of-two scale per 128) or "mxfp4" (E2M1, a power-of-two scale per 32).
        scale_mode: for mxfp4: "even" (default, nearest to the optimum), "rceil" (never saturates) or "floor".
        stochastic: for mxfp4: round up or down with probabilities that keep the mean, instead of to nearest.
        hadamard: for mxfp4: rotate each block by a random 32-point Hadamard transform, undone on arrival, so that
            an outlier spreads over its block.
    """

    wire: str
    scale_mode: str = "even"
    stochastic: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        kind = wire_kind(self.wire, "wire")
        scale_mode(self.scale_mode)
        if kind != Kind.MXFP4 and (self.stochastic or self.hadamard):
            raise InvalidArgument(f"stochastic and hadamard go with the wire 'mxfp4', not with {self.wire!r}")

    @property
    def kind(self) -> Kind:
        return wire_kind(self.wire, "wire")


@dataclass(frozen=True)
class Precision:
    """The legs of a communicator. A leg given as a string is that wire format with the default options of the leg.

    The default is the published FP4 recipe (arXiv 2603.02731): MXFP4 forward dispatch, BF16 combines, FP8 gradients.
    Gradients in mxfp4 take "rceil" scales by default, since a saturated gradient is a biased one.
    """

    dispatch: Leg | str = "mxfp4"
    combine: Leg | str = "bf16"
    grad_dispatch: Leg | str = "fp8"
    grad_combine: Leg | str = "bf16"

    def __post_init__(self) -> None:
        for field in fields(self):
            leg = getattr(self, field.name)
            if isinstance(leg, str):
                wire_kind(leg, field.name)
                leg = Leg(leg, "rceil" if field.name.startswith("grad_") else "even")
                object.__setattr__(self, field.name, leg)
            elif not isinstance(leg, Leg):
                raise InvalidArgument(f"{field.name} is {leg!r}; accepted: the name of a wire format or a Leg")

    @classmethod
    def of(cls, precision: Precision | str) -> Precision:
        """`precision` itself, or the recipe of that name.

        - "fp4": the published FP4 recipe, as `Precision()`.
        - "fp8": FP8 dispatch and grad_dispatch, BF16 combines (FP8-Flow-MoE, arXiv 2511.02302).
        - "mxfp4": MXFP4 on all four legs, gradients with stochastic rounding and Hadamard transform.
        - "bf16", "fp32": that format on all four legs.
        """
        if isinstance(precision, Precision):
            return precision
        if not isinstance(precision, str) or precision not in _RECIPES:
            raise InvalidArgument(
                f"precision is {precision!r}; accepted: a Precision or one of {', '.join(map(repr, _RECIPES))}"
            )
        return _RECIPES[precision]

    def leg(self, name: str) -> Leg:
        """The leg called `name`."""
        leg = getattr(self, name)
        assert isinstance(leg, Leg)
        return leg

    def legs(self) -> dict[str, dict[str, object]]:
        """The legs as plain data, for comparison and for records."""
        return asdict(self)


_GRADIENT_MXFP4 = Leg("mxfp4", "rceil", stochastic=True, hadamard=True)
_RECIPES = {
    "fp4": Precision(),
    "fp8": Precision("fp8", "bf16", "fp8", "bf16"),
    "mxfp4": Precision("mxfp4", "mxfp4", _GRADIENT_MXFP4, _GRADIENT_MXFP4),
    "bf16": Precision("bf16", "bf16", "bf16", "bf16"),
    "fp32": Precision("fp32", "fp32", "fp32", "fp32"),
}
