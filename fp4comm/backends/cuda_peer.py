"""Signals and numbers between the GPUs of a group, through memory that all have mapped (`csrc/cuda/peer.cu`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from . import cuda_compile
from .rows import Arrivals, PeerRows

NUM_SLOTS = 2
MAIL_NUMBERS = 2048
NUM_COUNTERS = 4096
ROWS_PER_COUNTER = 64
_THREADS = 256


def board_bytes(num_ranks: int) -> int:
    """Size of the board of a rank, see `peer.cu`."""
    return counters_offset(num_ranks, NUM_SLOTS)


def counters_offset(num_ranks: int, slot: int) -> int:
    """Where the counters of a slot are on a board."""
    return 8 * num_ranks * (1 + 2 * MAIL_NUMBERS) + 4 * slot * NUM_COUNTERS


def state_numbers(num_ranks: int) -> tuple[int, int]:
    """How many int64 the state of a rank has, on its device, and the report of a failure, in host memory."""
    return 4 + NUM_SLOTS, 2 + num_ranks


@dataclass(frozen=True)
class PeerGroup:
    """What the kernels must know of the group. All of its memory is zero at first.

    Attributes:
        boards: int64 `[num_ranks]` on the device, addresses of the boards of all ranks.
        rank: of this process.
        state: int64 on the device.
        failure: int64 in pinned memory.
        timeout_ns: for how long a kernel waits.
    """

    boards: Tensor
    rank: int
    state: Tensor
    failure: Tensor
    timeout_ns: int

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return len(self.boards)

    def arrivals(self, board: int, slot: int, rows_from_rank: Sequence[int]) -> tuple[list[int], int]:
        """The facts, and number of turns, of an `Arrivals`.

        Args:
            board: address of the own one.
            slot: that the rows arrive in.
            rows_from_rank: how many.
        """
        starts = [0, *accumulate(rows_from_rank)]
        counters = board + counters_offset(self.num_ranks, slot)
        places = (self.failure.data_ptr(), self.state.data_ptr(), board)
        facts = [counters, starts[-1], self.timeout_ns, *places, self.num_ranks, *starts]
        return facts, self.num_ranks * max(rows_from_rank)

    def open_slot(self, slot: int, is_counted: bool = False) -> None:
        """Later work on the current stream can write to the slots of that number. `meet` must follow, or, if the rows
        are counted, what waits for them.

        Not needed where the last kernel was one of `exchange_numbers`: until then all ranks have read everything.
        """
        self._launch("open_slot", (slot, int(is_counted)))

    @property
    def has_failed_address(self) -> int:
        """Of the member of the state with that name."""
        return self.state.data_ptr() + 2 * self.state.element_size()

    def meet(self, slot: int) -> None:
        """Later work on the current stream can read what all ranks have written to the slots of that number."""
        self._launch("meet", (slot,))

    def await_rows(self, arrivals: Arrivals) -> None:
        """Later work on the current stream can read all rows that are counted."""
        cuda_compile.launch("peer.cu", "await_rows", self._constants(), 1, _THREADS, (arrivals.facts.data_ptr(),))

    def exchange_numbers(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Row r of up to three int64 matrices side by side goes to rank r; row r of `out` will have come from it.

        Args:
            parts: `[num_ranks, n]` each, in memory of the device or pinned, any strides.
            out: `[num_ranks, sum of n]`, pinned.
        """
        assert len(parts) <= 3
        assert sum(part.shape[1] for part in parts) <= MAIL_NUMBERS
        args: list[int] = []
        for part in parts:
            args += (part.data_ptr(), *part.stride(), part.shape[1])
        args += [0] * (12 - len(args))
        self._launch("exchange_numbers", (*args, out.data_ptr()))

    def put_slots(self, values: Tensor, rows: PeerRows, weight_offset: int) -> None:
        """float32 `[num_rows, num_slots]` become the weights of the rows on their ranks."""
        assert values.is_contiguous()
        assert rows.peers is not None
        num_rows, num_slots = values.shape
        args = (values.data_ptr(), num_rows, num_slots, rows.peers.data_ptr(), rows.address[1], weight_offset)
        grid = -(-values.numel() // _THREADS)
        cuda_compile.launch("peer.cu", "put_slots", self._constants(), grid, _THREADS, args)

    def _launch(self, name: str, args: tuple[int, ...]) -> None:
        group = (self.boards.data_ptr(), self.rank, self.state.data_ptr(), self.failure.data_ptr(), self.timeout_ns)
        cuda_compile.launch("peer.cu", name, self._constants(), 1, _THREADS, (*group, *args))

    def _constants(self) -> dict[str, int]:
        sizes = {"NUM_SLOTS": NUM_SLOTS, "MAIL_NUMBERS": MAIL_NUMBERS, "NUM_COUNTERS": NUM_COUNTERS}
        return {"NUM_RANKS": self.num_ranks, **sizes}
