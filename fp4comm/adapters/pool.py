"""What adapters with layers have in common: their options, and the communicators that layers of equal sizes share."""

from __future__ import annotations

from typing import Any

from ..communicator import EPCommunicator
from ..errors import require
from ..precision import Precision

OPTIONS = (
    "check_inputs",
    "max_buffer_bytes",
    "num_max_tokens_per_rank",
    "num_sms",
    "seed",
    "timeout_secs",
    "transport",
)
Options = tuple[tuple[str, Any], ...]  # hashable: part of the key under which layers share a communicator


def checked_options(
    precision: Precision | str, options: dict[str, Any], accepted: tuple[str, ...] = OPTIONS
) -> Options:
    """The arguments of an `EPCommunicator` that users of an adapter may choose, in a fixed order.

    Raises:
        InvalidArgument: an unknown recipe or option.
    """
    for name in options:
        require(name in accepted, "option", repr(name), ", ".join(map(repr, ("precision", *accepted))))
    return tuple(sorted({**options, "precision": Precision.of(precision)}.items()))


class Pool:
    """The communicators of a host's layers, one for each group, sizes and options.

    They are not weak: ranks collect garbage at different times, and one would make a communicator that another still
    has.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], tuple[Any, EPCommunicator]] = {}

    def get(
        self, group: Any, num_experts: int, hidden: int, options: Options, expert_alignment: int = 1
    ) -> EPCommunicator:
        """That of these sizes, which is made at the first call. Collective then."""
        # By the group's id, since those of MPI have no hash; it is kept, so that no other group gets that id.
        key = (id(group), num_experts, hidden, options, expert_alignment)
        if key not in self._made:
            more = {"expert_alignment": expert_alignment, **dict(options)}
            self._made[key] = group, EPCommunicator(group, num_experts=num_experts, hidden=hidden, **more)
        return self._made[key][1]

    def all(self) -> tuple[EPCommunicator, ...]:
        """In the order in which they were made."""
        return tuple(comm for _, comm in self._made.values())

    def close(self) -> None:
        """Closes all. Collective."""
        while self._made:
            self._made.pop(next(iter(self._made)))[1].close()
