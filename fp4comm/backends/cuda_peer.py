"""Signals and numbers between the GPUs of a group, through memory that all have mapped (`csrc/cuda/peer.cu`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from . import cuda_compile
from .rows import PeerRows

NUM_SLOTS = 2
MAIL_NUMBERS = 2048
_THREADS = 256


def board_bytes(num_ranks: int) -> int:
    """Size of the board of a rank, see `peer.cu`."""
    return 8 * num_ranks * (1 + 2 * MAIL_NUMBERS)


def state_numbers(num_ranks: int) -> tuple[int, int]:
    """How many int64 the state of a rank has, on its device, and the report of a failure, in host memory."""
    return 3 + NUM_SLOTS, 2 + num_ranks


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

    def meet(self) -> None:
        """Later work on the current stream can read what all ranks have written before they called this."""
        self._launch("meet", (-1,))

    def wait_for_slot(self, slot: int) -> None:
        """Later work on the current stream can write to the slots with that number. `meet` must follow, next."""
        self._launch("meet", (slot,))

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
        return {"NUM_RANKS": self.num_ranks, "NUM_SLOTS": NUM_SLOTS, "MAIL_NUMBERS": MAIL_NUMBERS}
