"""Names of the number formats. The numbers themselves are defined in `csrc/include/fp4comm/`."""

from __future__ import annotations

from enum import IntEnum

from .errors import InvalidArgument

BLOCK_SIZE = 32  # elements that share one E8M0 scale in MXFP4
GROUP_SIZE = 128  # elements that share one scale in FP8
ROW_TILE = 128  # rows that share one scale in column-wise FP8


class Kind(IntEnum):
    """How a row of `hidden` numbers lies in memory. The values are those of `fp4comm::Kind` in `wire.h`."""

    F32 = 0
    BF16 = 1
    F16 = 2
    FP8 = 3  # E4M3, one float32 scale per 128
    FP8_E8M0 = 4  # E4M3, one E8M0 byte per 128
    MXFP4 = 5  # E2M1, one E8M0 byte per 32


class GemmKind(IntEnum):
    """As `Kind`, for what only GEMMs read. No message has it."""

    FP8_ROW = 6  # E4M3, one float32 scale per row


class ScaleMode(IntEnum):
    """How an MXFP4 scale follows from the largest magnitude `amax = 2**a * m`, `1 <= m < 2`, of its block."""

    FLOOR = 0  # exponent a - 2; saturates above m = 1.5
    EVEN = 1  # one more from m = 1.75; nearest to the optimum
    RCEIL = 2  # one more above m = 1.5; never saturates


WIRE_KINDS = {"fp32": Kind.F32, "bf16": Kind.BF16, "fp8": Kind.FP8_E8M0, "mxfp4": Kind.MXFP4}


def wire_kind(name: str, argument: str = "wire format") -> Kind:
    """The kind of the rows that the wire format `name` sends.

    Raises:
        InvalidArgument: `name` is not a wire format; `argument` is what the message calls it.
    """
    if not isinstance(name, str) or name not in WIRE_KINDS:
        raise InvalidArgument(f"{argument} is {name!r}; accepted: {', '.join(map(repr, WIRE_KINDS))}")
    return WIRE_KINDS[name]


def scale_mode(name: str) -> ScaleMode:
    """The scale mode called `name`: "floor", "even" or "rceil".

    Raises:
        InvalidArgument: it is none of these.
    """
    try:
        return ScaleMode[name.upper()]
    except (KeyError, AttributeError):
        accepted = ", ".join(repr(mode.name.lower()) for mode in ScaleMode)
        raise InvalidArgument(f"scale_mode is {name!r}; accepted: {accepted}") from None
