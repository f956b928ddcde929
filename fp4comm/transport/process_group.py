"""Byte messages over a torch.distributed process group."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from .base import MAX_TAG, Transport

_LONGEST_SECS = 1e8  # in nanoseconds an int64, to which gloo adds its clock
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class ProcessGroupTransport(Transport):
    """One byte message per pair of ranks over the backend that the group has.

    Point-to-point messages are used rather than `all_to_all_single`, since only they tell which rank did not answer.
    Over torch's NCCL rows lie on the current CUDA device, CPU tensors make a detour over it, and a lost rank is torch's
    own business (its watchdog ends the process).

    Args:
        group: a process group that this process belongs to.
        timeout_secs: see `Transport`; the group's own timeout is not used.
    """

    name = "process_group"

    def __init__(self, group: dist.ProcessGroup, timeout_secs: float) -> None:
        self._group = group
        # tags of its own, so that neither another communicator nor the user's messages are taken for ours
        self._first_tag = next(_numbers.setdefault(group, itertools.count(1))) * MAX_TAG
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout_secs)
        self._global_ranks = [dist.get_global_rank(group, rank) for rank in range(self.num_ranks)]
        if "cpu:" not in dist.get_backend_config(group) and dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def _exchange_with_peers(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        if self.device != torch.device("cpu"):
            return self._exchange_on_device(outgoing, incoming)
        works, tag = [], self._first_tag + self._tag
        for distance in range(1, self.num_ranks):
            source = (self.rank - distance) % self.num_ranks
            if incoming[source].numel():
                works.append((source, self._post(dist.irecv, incoming[source], source, tag)))
        for distance in range(1, self.num_ranks):
            target = (self.rank + distance) % self.num_ranks
            if outgoing[target].numel():
                works.append((target, self._post(dist.isend, outgoing[target], target, tag)))
        deadline = time.monotonic() + min(self.timeout_secs, _LONGEST_SECS)
        for peer, work in works:
            self._wait(peer, work, deadline)

    def _exchange_on_device(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        received = {
            rank: incoming[rank] if incoming[rank].device == self.device else incoming[rank].to(self.device)
            for rank in peers
        }
        operations = []
        for calls, messages in ((dist.isend, outgoing), (dist.irecv, received)):
            for rank in peers:
                if messages[rank].numel():
                    message = messages[rank].to(self.device)
                    operations.append(dist.P2POp(calls, message, self._global_ranks[rank], self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()  # in the order of the stream
        for rank in peers:
            if received[rank] is not incoming[rank]:
                incoming[rank].copy_(received[rank])

    def _post(self, call: Callable[..., dist.Work | None], message: Tensor, peer: int, tag: int) -> dist.Work:
        try:
            work = call(message, self._global_ranks[peer], self._group, tag)
        except RuntimeError as error:
            raise self._failure(peer, error) from error
        assert work is not None, "every rank of the transport is in the group"
        return work

    def _wait(self, peer: int, work: dist.Work, deadline: float) -> None:
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise self._failure(peer, error) from error

    def _failure(self, peer: int, error: RuntimeError) -> TransportError:
        return TransportError(
            f"rank {self.rank} could not exchange with rank {peer} over {dist.get_backend(self._group)} within "
            f"{self.timeout_secs:g} s: {error}",
            (peer,),
        )
