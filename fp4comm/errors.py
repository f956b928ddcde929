"""Exceptions of fp4comm. A message names the argument, the value received and what is accepted."""

from __future__ import annotations

import operator
from typing import Any


class Fp4CommError(Exception):
    """Base class of all errors that fp4comm raises on purpose."""


class InvalidArgument(Fp4CommError, ValueError):
    """An argument has the wrong type, shape, dtype, device or value, or the ranks of a group disagree about it."""


class NotAvailable(Fp4CommError, ImportError):
    """Something optional that this call needs (a package, an MPI library, a device) is not there."""


class TransportError(Fp4CommError, RuntimeError):
    """An exchange between ranks failed or timed out.

    Attributes:
        ranks: the ranks (of the expert-parallel group) that did not answer, as far as they are known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ClosedError(Fp4CommError, RuntimeError):
    """A communicator was used after `close()`."""


def is_count(value: Any, least: int) -> bool:
    """Whether it is an integer, of NumPy too, and at least that."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def counted(number: int, noun: str) -> str:
    """For texts: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def require(condition: bool, argument: str, received: object, accepted: str) -> None:
    """Raises `InvalidArgument` in the form that all checks share, unless `condition` holds."""
    if not condition:
        raise InvalidArgument(f"{argument} is {received}; accepted: {accepted}")
