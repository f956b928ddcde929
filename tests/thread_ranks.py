"""Ranks as threads of one process: any number of them, started in microseconds, over a transport of queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fp4comm.errors import TransportError
from fp4comm.transport import Transport


class ThreadTransport(Transport):
    """Ranks of one process; `mailboxes[source][target]` holds the messages on their way."""

    name = "threads"

    def __init__(self, rank: int, mailboxes: list[list[queue.Queue[Tensor]]], timeout_secs: float) -> None:
        super().__init__(rank, len(mailboxes), timeout_secs)
        self._mailboxes = mailboxes

    def _exchange_with_peers(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        for target in peers:
            if outgoing[target].numel():
                self._mailboxes[self.rank][target].put(outgoing[target].clone())
        for source in peers:
            if incoming[source].numel():
                try:
                    message = self._mailboxes[source][self.rank].get(timeout=self.timeout_secs)
                except queue.Empty:
                    self._unusable = f"rank {source} did not answer"
                    raise TransportError(f"rank {self.rank} waited for rank {source}", (source,)) from None
                assert message.shape == incoming[source].shape, "a message of another size than agreed"
                incoming[source].copy_(message)


def run_thread_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_secs: float = 10.0) -> list[Any]:
    """Calls `function(transport, *args)` on every rank; returns the results in rank order or raises the first error."""
    mailboxes: list[list[queue.Queue[Tensor]]] = [[queue.Queue() for _ in range(num_ranks)] for _ in range(num_ranks)]
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(rank, mailboxes, timeout_secs), *args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_secs * 3)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results
