"""Ranks as threads of one process: any number of them, started in microseconds, over a transport of queues."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numerics import tensors_device
from torch import Tensor

from fp4comm.errors import TransportError
from fp4comm.transport import Transport

Message = tuple[Tensor, threading.Event]  # the sender's own memory, and whether the receiver has copied it
Mailboxes = dict[tuple[int, int, int], "queue.Queue[Message]"]  # by source, target and tag


class ThreadTransport(Transport):
    """Ranks of one process, on one GPU if that is where the test's tensors lie.

    As with MPI, messages are read from the sender's memory and match by tag.
    After rows have gone to experts what was sent is overwritten, so that nobody may depend on a send buffer any more.
    """

    name = "threads"

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        mailboxes: Mailboxes,
        timeout_secs: float,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(rank, num_ranks, timeout_secs)
        self.device = tensors_device() if device is None else device
        self._mailboxes = mailboxes

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], purpose: str = "agreement") -> None:
        super().exchange(outgoing, incoming, purpose)
        if purpose.endswith("dispatch"):  # others may send the caller's own memory
            for message in outgoing:
                message.fill_(0xAA)

    def _exchange_with_peers(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        _synchronize(outgoing)
        deadline = time.monotonic() + self.timeout_secs
        peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        sent = {target: threading.Event() for target in peers if outgoing[target].numel()}
        for target, copied in sent.items():
            self._mailbox(self.rank, target).put((outgoing[target], copied))
        for source in peers:
            if incoming[source].numel():
                try:
                    message, copied = self._mailbox(source, self.rank).get(timeout=_left(deadline))
                except queue.Empty:
                    raise self._missing(source) from None
                assert message.shape == incoming[source].shape, "a message of another size than agreed"
                incoming[source].copy_(message)
                _synchronize(incoming)
                copied.set()
        for target, copied in sent.items():
            if not copied.wait(_left(deadline)):
                raise self._missing(target)

    def _mailbox(self, source: int, target: int) -> queue.Queue[Message]:
        return self._mailboxes.setdefault((source, target, self._tag), queue.Queue())

    def _missing(self, peer: int) -> TransportError:
        self._unusable = f"rank {peer} did not answer"
        return TransportError(f"rank {self.rank} waited for rank {peer}", (peer,))


def _synchronize(messages: Sequence[Tensor]) -> None:
    if any(message.is_cuda for message in messages):
        torch.cuda.synchronize()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def run_thread_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_secs: float = 10.0) -> list[Any]:
    """Calls `function(transport, *args)` on every rank; returns the results in rank order or raises the first error."""
    mailboxes: Mailboxes = {}
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        transport = ThreadTransport(rank, num_ranks, mailboxes, timeout_secs)
        try:
            # each backward pass in its own thread, else all would wait in the one that torch has for a GPU
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(transport, *args)
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
