"""Byte messages over MPI through mpi4py. The only module that imports mpi4py."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import NotAvailable, TransportError
from .base import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI counts are 32-bit before MPI 4, so a longer message travels in pieces; MPI keeps the order of a pair's messages.
_PIECE_BYTES = 1 << 30
# Waiting ranks poll instead of blocking in MPI: an MPI wait spins, which on a machine with more ranks than cores takes
# the core from the rank that everybody waits for. The first polls only yield, to keep the latency of short exchanges.
_NUM_YIELDING_POLLS = 2000
_SLEEP_SECS = 50e-6
# Requests and buffers of exchanges that were broken off: MPI may write to them until the process ends.
_ABANDONED: list[object] = []


def load_mpi() -> Any:
    """`mpi4py.MPI`, initialised.

    Raises:
        NotAvailable: mpi4py is not installed, or it finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise NotAvailable(f"MPI can't be used ({error}); install it with: pip install 'fp4comm[mpi]'") from error
    return MPI


class MPITransport(Transport):
    """One byte message per pair of ranks with nonblocking sends and receives.

    Args:
        comm: an mpi4py intracommunicator. It is duplicated (a collective call), so that messages can't be confused.
        timeout_secs: see `Transport`.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, timeout_secs: float) -> None:
        self._mpi = load_mpi()
        super().__init__(comm.Get_rank(), comm.Get_size(), timeout_secs)
        self._comm, request = comm.Idup()
        if not self._is_done([request]):
            _ABANDONED.append((self._comm, request))
            raise TransportError(
                f"rank {self.rank} waited {timeout_secs:g} s for the other ranks to join it over MPI; "
                "one ended, never made this call, or needs a larger timeout_secs"
            )

    def _exchange_with_peers(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        requests: list[tuple[int, MPI.Request]] = []
        try:
            for distance in range(1, self.num_ranks):
                source = (self.rank - distance) % self.num_ranks
                for piece in _pieces(incoming[source]):
                    requests.append((source, self._comm.Irecv(piece, source, self._tag)))
            for distance in range(1, self.num_ranks):
                target = (self.rank + distance) % self.num_ranks
                for piece in _pieces(outgoing[target]):
                    requests.append((target, self._comm.Isend(piece, target, self._tag)))
            self._wait(requests)
        except BaseException:  # an interrupt too
            _ABANDONED.append((requests, outgoing, incoming))
            raise

    def _wait(self, requests: list[tuple[int, MPI.Request]]) -> None:
        if not self._is_done([request for _, request in requests]):
            missing = tuple(sorted({peer for peer, request in requests if not request.Test()}))
            self._unusable = f"an exchange with rank(s) {list(missing)} timed out"
            raise TransportError(
                f"rank {self.rank} waited {self.timeout_secs:g} s for rank(s) {list(missing)} over MPI; "
                "they ended, never made this call, or need a larger timeout_secs",
                missing,
            )

    def _is_done(self, requests: list[MPI.Request]) -> bool:
        """Waits for them; False if the time is over before."""
        deadline = time.monotonic() + self.timeout_secs
        polls = 0
        while not self._mpi.Request.Testall(requests):
            polls += 1
            if polls <= _NUM_YIELDING_POLLS:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_SECS)
            if time.monotonic() > deadline:
                return False
        return True

    def close(self) -> None:
        if not self._unusable and not self._mpi.Is_finalized():
            self._comm.Free()
        super().close()


def _pieces(message: Tensor) -> list[NDArray[np.uint8]]:
    data = message.numpy().reshape(-1)
    return [data[start : start + _PIECE_BYTES] for start in range(0, data.size, _PIECE_BYTES)]
