"""All ranks go on, or all ranks raise the same error: a rank that raises alone leaves the others waiting for it."""

from __future__ import annotations

import json
import operator
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import InvalidArgument, TransportError
from .transport import Transport


def agree(
    transport: Transport,
    operation: str,
    facts: Mapping[str, object],
    error: Exception | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Compares `facts` over the ranks, and exchanges numbers for each other rank with the same message.

    Args:
        transport: the ranks that must agree.
        operation: what this rank is about to do, e.g. "dispatch".
        facts: what must be equal on all ranks; values that JSON can hold.
        error: what went wrong on this rank already, if anything.
        values: `[num_ranks, n]` int64, on the CPU or the transport's device, e.g. how many rows this rank has for each
            other; None = a 0 each. n is equal on all ranks.

    Returns:
        `[num_ranks, n]` int64 on the CPU, the values that each rank has for this one.

    Raises:
        InvalidArgument: on all ranks alike: a rank had one, or the facts or operations differ.
        TransportError: on all ranks alike: a rank had another error; that rank raises its own.
    """
    values = torch.zeros(transport.num_ranks, 1, device="cpu", dtype=torch.int64) if values is None else values
    return begin_agreement(transport, operation, facts, error, [values])()


def begin_agreement(
    transport: Transport,
    operation: str,
    facts: Mapping[str, object],
    error: Exception | None = None,
    values: Sequence[Tensor] = (),
) -> Callable[[], Tensor]:
    """`agree` in two parts: returns what waits for the result, so that a device can be given work meanwhile.

    `values` may be several tensors, whose rows are put side by side.
    """
    num_ranks = transport.num_ranks
    if num_ranks == 1:
        if error is not None:
            raise error
        return lambda: torch.cat([part.cpu() for part in values], dim=1)
    statement = json.dumps({"operation": operation, **facts}, sort_keys=True, default=_plain)
    checksum = zlib.crc32(statement.encode())
    header = torch.tensor([[error is not None, checksum]] * num_ranks, device="cpu", dtype=torch.int64)
    wait = transport.begin_all_to_all([header, *values])

    def finish() -> Tensor:
        theirs = wait()
        table = theirs.numpy()  # NumPy is quicker with a few numbers
        if table[:, 0].any() or (table[:, 1] != checksum).any():
            _raise_together(transport, statement, error)
        return theirs[:, 2:]

    return finish


def _plain(value: Any) -> int | str:
    """For JSON, which knows neither NumPy's integers nor most of all else."""
    return operator.index(value) if hasattr(value, "__index__") else str(value)


def _raise_together(transport: Transport, statement: str, error: Exception | None) -> None:
    """Every rank sees that something differs, so every rank comes here."""
    about_error = None if error is None else (str(error), isinstance(error, InvalidArgument))
    replies = [json.loads(reply) for reply in transport.all_gather_bytes(json.dumps([about_error, statement]).encode())]
    failures = {rank: failure for rank, (failure, _) in enumerate(replies) if failure is not None}
    if failures:
        text = "; ".join(f"rank {rank}: {message}" for rank, (message, _) in failures.items())
        if all(is_argument for _, is_argument in failures.values()):
            raise InvalidArgument(text) from error
        if error is not None and not isinstance(error, InvalidArgument):
            raise error
        raise TransportError(text, tuple(failures)) from error
    raise InvalidArgument(_differences([json.loads(theirs) for _, theirs in replies]))


def _differences(statements: list[dict[str, object]]) -> str:
    """Names each fact that differs, with the ranks that hold each value."""
    texts = []
    for key in sorted(set().union(*statements), key=lambda name: (name != "operation", name)):
        holders = defaultdict(list)
        for rank, statement in enumerate(statements):
            holders[json.dumps(statement.get(key), sort_keys=True)].append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in holders.items())
            texts.append(f"{key} is {values}")
            if key == "operation":
                break
    return "the ranks disagree: " + "; ".join(texts)


def name_ranks(ranks: Sequence[int]) -> str:
    """For texts: "rank 0", "ranks 1, 3"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
