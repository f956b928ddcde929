"""What a transport does: one exchange of byte messages among the ranks of a group. Everything else is built on that."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..backends.rows import Arrivals, PeerRows
from ..errors import ClosedError, Fp4CommError, TransportError
from ..memory import empty

PURPOSES = ("agreement", "dispatch", "combine", "grad_dispatch", "grad_combine")
MAX_TAG = 2**15  # what every MPI has
_SPIN_SECS = 2e-3  # a count exchange takes some 50 us; a rank that is later than this may as well be waited for asleep


def wait_on_host(done: torch.cuda.Event) -> None:
    """Waits for an event of work that ends by itself if a rank is lost."""
    start = time.monotonic()
    while not done.query():
        if time.monotonic() - start > _SPIN_SECS:
            time.sleep(50e-6)


RowMatrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Window:
    """Where the rows of an exchange go, and where those of the others arrive.

    Attributes:
        slot: number of the memory that they arrive in, on all ranks.
        table: int64 on the device, see `Destination` of `csrc/cuda/rows.cuh`.
        num_ranks: that it is about.
        num_rows: that are sent, to all ranks together.
        num_turns: if a row of each rank is sent in turn, how many, with those of ranks that have no more.
        buffer: uint8 `[rows that arrive, row_bytes]`, ordered by source rank.
        arrivals: how to wait for them one by one.
        counting_blocks: see `Rows`; 0 = they will be waited for by `meet`.
    """

    slot: int
    table: Tensor
    num_ranks: int
    num_rows: int
    num_turns: int
    buffer: Tensor
    arrivals: Arrivals
    counting_blocks: int = 0


class Transport(ABC):
    """Moves bytes between the ranks of one group. All methods are collective: every rank of the group calls them alike.

    Attributes:
        name: what `transport=` calls it.
        device: where the rows that it moves lie; None = on any one device.
        rank: this process's place in the group.
        num_ranks: size of the group.
        timeout_secs: an exchange that takes longer raises `TransportError`.
    """

    name: str
    device: torch.device | None = torch.device("cpu")

    def __init__(self, rank: int, num_ranks: int, timeout_secs: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_secs = timeout_secs
        self._count = 0
        self._tag = 0  # of this exchange, so that calls that differ between ranks never match
        self._unusable = ""  # why the transport can't be used any more; empty while it can

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], purpose: str = "agreement") -> None:
        """Sends `outgoing[r]` to every rank r and fills `incoming[r]` from it.

        With CPU tensors all of that is done on return. With CUDA tensors it is ordered as if it ran on the current
        stream: after what was enqueued there before, and before what is enqueued after it.

        Args:
            outgoing: per rank a contiguous uint8 tensor, on the CPU or on `device`. Empty ones are not sent.
            incoming: per rank a contiguous uint8 tensor of the size that rank r sends here.
            purpose: one of PURPOSES; ranks with different ones wait for each other in vain instead of mixing data up
                (but NCCL has no tags to tell them by).

        Raises:
            TransportError: a rank did not answer within `timeout_secs`; the transport can't be used after that.
            ClosedError: the transport is closed or has failed before.
        """
        self._require_usable()
        if self.num_ranks == 1:
            return self._copy_own(outgoing, incoming)
        self._count += 1
        self._tag = (len(PURPOSES) * self._count + PURPOSES.index(purpose)) % MAX_TAG
        try:
            self._exchange(outgoing, incoming, purpose)
        except BaseException as error:  # an interrupt too: messages are still on their way
            self._unusable = self._unusable or f"an exchange was broken off by {type(error).__name__}"
            if isinstance(error, RuntimeError) and not isinstance(error, Fp4CommError):  # gloo's, MPI's
                raise TransportError(f"rank {self.rank}: {purpose} over {self.name} failed: {error}") from error
            raise

    def _require_usable(self) -> None:
        if self._unusable:
            raise ClosedError(f"the {self.name} transport can't be used: {self._unusable}")

    def describe(self) -> str:
        """For people: the name, and what it holds."""
        return self.name

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], purpose: str) -> None:
        self._copy_own(outgoing, incoming)
        self._exchange_with_peers(outgoing, incoming)

    def _copy_own(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        target, source = incoming[self.rank], outgoing[self.rank]
        if target.device.type == "cpu" == source.device.type:
            # NumPy, since torch splits a large copy over threads, for which ranks that share cores wait
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source)

    @abstractmethod
    def _exchange_with_peers(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """`exchange` but for the own share."""

    def send_buffer(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Uninitialised uint8 memory for the outgoing rows of the next exchange, and for nothing else."""
        return empty(shape, torch.uint8, device)

    # Transports of GPUs that can write to each other's memory have windows. They need to know beforehand how many rows
    # go from each rank to each, and `begin_all_to_all` takes tensors of any strides there.

    @property
    def has_windows(self) -> bool:
        """Whether rows are written to their ranks by the kernels that make them."""
        return False

    def open_window(
        self, rows_of_all: RowMatrix, row_bytes: int, just_met: bool = False, counting_blocks: int = 0
    ) -> Window:
        """Work that is enqueued next may write rows to their ranks.

        Then must follow, before anything else, `meet`, or, if the window is counted, a kernel that reads its rows as
        they arrive, or `await_rows`, and `close_window`.

        Args:
            rows_of_all: rows from each rank (first index) to each.
            row_bytes: of a row.
            just_met: the last call here was of `begin_all_to_all`, with its wait, so that ranks need no other.
            counting_blocks: see `Rows`. Above 0 rows may be counted: all are written by one kernel, and one kernel
                is the first to read them. Whether they are depends on their number.
        """
        raise NotImplementedError

    def meet(self, window: Window) -> None:
        """All rows written to the window by all ranks are there for what is enqueued next."""
        raise NotImplementedError

    def close_window(self) -> Callable[[], bool]:
        """What waits for the counted rows has been enqueued. Returns as `lease`."""
        raise NotImplementedError

    def await_rows(self, arrivals: Arrivals) -> None:
        """All of them are there for what is enqueued next."""
        raise NotImplementedError

    def lease(self) -> Callable[[], bool]:
        """What tells whether nobody has been allowed to write to the last window's memory again since."""
        raise NotImplementedError

    def put_slots(self, values: Tensor, rows: PeerRows, weight_offset: int) -> None:
        """float32 `[num_rows, num_slots]` become the weights of the rows of a window."""
        raise NotImplementedError

    def begin_all_to_all(self, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Starts `all_to_all` of several tensors side by side, each on the CPU or on `device`.

        Returns:
            What waits for the end and returns a CPU tensor `[num_ranks, sum of n]`.
        """
        received = self.all_to_all(torch.cat([part.cpu() for part in parts], dim=1))
        return lambda: received

    def all_to_all(self, values: Tensor) -> Tensor:
        """Row r of `values` (int64 `[num_ranks, n]`, on the CPU) goes to rank r; row r of the result came from it."""
        received = torch.empty_like(values)
        self.exchange(list(values.view(torch.uint8)), list(received.view(torch.uint8)))
        return received

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank passed as `data`, in rank order."""
        sizes = (
            self.all_to_all(torch.full((self.num_ranks, 1), len(data), device="cpu", dtype=torch.int64))
            .flatten()
            .tolist()
        )
        own = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        received = [torch.empty(size, device="cpu", dtype=torch.uint8) for size in sizes]
        self.exchange([own] * self.num_ranks, received)
        return [part.numpy().tobytes() for part in received]

    def close(self) -> None:
        """Frees what the transport holds. May be called more than once."""
        self._unusable = self._unusable or "it is closed"
