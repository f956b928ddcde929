"""Rows written straight into the memory of the GPUs of one NVLink domain by the kernels that make them.

Every rank has NUM_SLOTS slots that rows arrive in. An exchange is: `open_window`, after which kernels may write to a
slot of every rank; the kernels, which write; `meet`, after which all rows are there. Exchanges take the slots in
turn, so that a rank that is ahead can write while others still read what came before. All that keeps ranks apart in time is on
the devices (`csrc/cuda/peer.cu`), so a CUDA graph can hold any number of exchanges and be replayed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..backends.rows import PeerRows
from ..errors import InvalidArgument, NotAvailable, TransportError
from .base import RowMatrix, Transport, Window, wait_on_host
from .shared_memory import SharedBlock, copy_bytes, current_gpu

_FIRST_IN_GRAPH = "a CUDA graph captures the first exchange of this size; make the same calls once before capturing"
_ALIGNMENT = 512
_CLOSE_SECS = 10.0
_MAX_WINDOWS = 256


class PeerTransport(Transport):
    """GPUs that have mapped each other's memory.

    Args:
        control: the same ranks, for what is exchanged on the host; closed with this.
        timeout_secs: for how long a kernel waits for a rank. After that work on the stream goes on with undefined rows,
            and the next call raises `TransportError`.
        max_buffer_bytes: at most so many for the slots of a rank. They grow to what is needed, all ranks together,
            which waits for the devices.

    Raises:
        NotAvailable: on all ranks: CuPy or a GPU is missing, or a rank can't map another's memory.
    """

    name = "peer"

    def __init__(self, control: Transport, timeout_secs: float, max_buffer_bytes: int) -> None:
        super().__init__(control.rank, control.num_ranks, timeout_secs)
        _check_machine(control)
        from ..backends import cuda_peer  # here, since CuPy is optional

        self._cuda_peer = cuda_peer
        self.device: torch.device = current_gpu()
        self.max_buffer_bytes = max_buffer_bytes
        self._control = control
        self._board = SharedBlock(cuda_peer.board_bytes(self.num_ranks), self.device, control)
        num_state, num_failure = cuda_peer.state_numbers(self.num_ranks)
        self._failure = torch.full((num_failure,), -1, dtype=torch.int64, device="cpu", pin_memory=_can_pin())
        self._failure[0] = 0
        self._failure_words = self._failure.numpy()
        self._group = cuda_peer.PeerGroup(
            torch.tensor(self._board.addresses, dtype=torch.int64, device=self.device),
            self.rank,
            torch.zeros(num_state, dtype=torch.int64, device=self.device),
            self._failure,
            int(timeout_secs * 1e9),
        )
        self._slots: SharedBlock | None = None
        self._slot_bytes = 0
        self._next_slot = 0
        self._uses = [0] * cuda_peer.NUM_SLOTS
        self._windows: dict[tuple[RowMatrix, int, int], Window] = {}
        self._kept: list[object] = []  # what captured graphs use
        self._last_stream: torch.cuda.Stream | None = None
        self._is_open = False  # between the two steps of an exchange
        self._is_closed = False
        torch.cuda.synchronize(self.device)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the slots of this rank."""
        return len(self._uses) * self._slot_bytes

    def describe(self) -> str:
        """With the size of the slots."""
        used, most = self.buffer_bytes / 2**20, self.max_buffer_bytes / 2**20
        return f"peer with {used:.0f} MiB of at most {most:.0f} MiB of buffers"

    # ---- rows ----

    @property
    def has_windows(self) -> bool:
        return self.num_ranks > 1

    def open_window(self, rows_of_all: RowMatrix, row_bytes: int) -> Window:
        """See `Transport`.

        Raises:
            InvalidArgument: on all ranks: the slots would have to be larger than they may be, or they have to grow
                while a CUDA graph is captured.
            TransportError: a rank was late before.
        """
        self._check_usable()
        self._reserve(rows_of_all, row_bytes)
        slot = self._next_slot
        key = (rows_of_all, row_bytes, slot)
        if key not in self._windows:
            self._make_windows(rows_of_all, row_bytes)
        window = self._windows[key]
        self._follow_last_stream()
        if _is_capturing():
            self._kept.append((window, self._slots))
        self._next_slot = (slot + 1) % len(self._uses)
        self._uses[slot] += 1
        self._is_open = True
        self._group.wait_for_slot(slot)
        return window

    def meet(self) -> None:
        self._group.meet()
        self._is_open = False

    def lease(self, window: Window) -> Callable[[], bool]:
        use = self._uses[window.slot]
        return lambda: self._uses[window.slot] == use

    def put_slots(self, values: Tensor, rows: PeerRows, weight_offset: int) -> None:
        self._group.put_slots(values, rows, weight_offset)

    def _make_windows(self, rows_of_all: RowMatrix, row_bytes: int) -> None:
        """For that exchange in every slot."""
        if _is_capturing():
            raise InvalidArgument(_FIRST_IN_GRAPH)
        assert self._slots is not None
        assert self._slots.own is not None
        if len(self._windows) >= _MAX_WINDOWS:
            self._windows.clear()
        *starts, num_rows = 0, *accumulate(rows_of_all[self.rank])
        places = [sum(row[rank] for row in rows_of_all[: self.rank]) for rank in range(self.num_ranks)]
        num_arriving = sum(row[self.rank] for row in rows_of_all)
        for slot in range(len(self._uses)):
            offset = slot * self._slot_bytes
            bases = [
                address + offset + (place - start) * row_bytes
                for address, place, start in zip(self._slots.addresses, places, starts, strict=True)
            ]
            table = torch.tensor([bases, starts], dtype=torch.int64, device="cpu", pin_memory=_can_pin())
            memory = self._slots.own.tensor[offset : offset + num_arriving * row_bytes]
            self._windows[rows_of_all, row_bytes, slot] = Window(
                slot, table.to(self.device, non_blocking=True), num_rows, memory.view(num_arriving, row_bytes)
            )

    def _reserve(self, rows_of_all: RowMatrix, row_bytes: int) -> None:
        """Slots for that exchange; all ranks come to the same conclusion."""
        most = max(sum(row[rank] for row in rows_of_all) for rank in range(self.num_ranks)) * row_bytes
        if most <= self._slot_bytes:
            return
        num_slots = len(self._uses)
        if most * num_slots > self.max_buffer_bytes:
            raise InvalidArgument(
                f"max_buffer_bytes is {self.max_buffer_bytes}; accepted: at least {most * num_slots} for this "
                f"exchange, {num_slots} slots for the rows that one rank receives"
            )
        if _is_capturing():
            raise InvalidArgument(_FIRST_IN_GRAPH)
        size = min(most * 9 // 8, self.max_buffer_bytes // num_slots) // _ALIGNMENT * _ALIGNMENT
        size = max(size, -(-most // _ALIGNMENT) * _ALIGNMENT)
        torch.cuda.synchronize(self.device)
        slots = SharedBlock(size * num_slots, self.device, self._control)  # all have come here: all have read
        if self._slots is not None and not any(kept[1] is self._slots for kept in self._kept):  # type: ignore[index]
            self._slots.close()
        self._slots, self._slot_bytes = slots, size
        self._windows.clear()
        self._uses = [use + 1 for use in self._uses]

    # ---- numbers and messages ----

    def begin_all_to_all(self, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """By a kernel that writes to the ranks' memory and waits for theirs; parts may have any strides."""
        self._check_usable()
        width = sum(part.shape[1] for part in parts)
        if self.num_ranks == 1 or width > self._cuda_peer.MAIL_NUMBERS or len(parts) > 3:
            return super().begin_all_to_all(parts)
        self._follow_last_stream()
        reachable = [part if part.device.type == "cuda" else _pinned(part) for part in parts]
        received = torch.empty((self.num_ranks, width), dtype=torch.int64, device="cpu", pin_memory=_can_pin())
        self._group.exchange_numbers(reachable, received)
        done = None if self.device.type == "cpu" else torch.cuda.Event()
        if done is not None:
            done.record()

        def wait() -> Tensor:
            if done is not None:
                wait_on_host(done)
            reachable.clear()  # in use until now
            self._check_usable()
            return received

        return wait

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], purpose: str) -> None:
        if outgoing[0].device.type == "cpu":
            return self._control.exchange(outgoing, incoming, purpose)
        sizes = torch.tensor([len(message.view(-1)) for message in outgoing], device="cpu", dtype=torch.int64)
        gathered = self.begin_all_to_all([sizes.expand(self.num_ranks, -1)])().tolist()
        rows_of_all = tuple(tuple(row) for row in gathered)
        window = self.open_window(rows_of_all, 1)
        bases, starts = window.table.tolist()
        for message, base, start in zip(outgoing, bases, starts, strict=True):
            if message.numel():
                copy_bytes(base + start, message.data_ptr(), message.numel())
        self.meet()
        arrived = window.buffer.view(-1).split([len(message.view(-1)) for message in incoming])
        for target, source in zip(incoming, arrived, strict=True):
            target.view(-1).copy_(source)

    def _exchange_with_peers(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        raise AssertionError("_exchange does that too")

    # ---- order and failures ----

    def _follow_last_stream(self) -> None:
        """Exchanges are one after the other, whatever stream they are on."""
        current = torch.cuda.current_stream(self.device)
        if self._last_stream not in (None, current) and not _is_capturing():
            current.wait_stream(self._last_stream)
        self._last_stream = current

    def _check_usable(self) -> None:
        if self._is_open:
            self._unusable = self._unusable or "an exchange was broken off between its two steps"
        self._require_usable()
        if self._failure_words[0]:
            awaited, seen = int(self._failure_words[1]), self._failure_words[2:].tolist()
            late = tuple(rank for rank, signals in enumerate(seen) if signals >= 0)
            counts = ", ".join(f"rank {rank} at {seen[rank]}" for rank in late)
            self._unusable = (
                f"rank {self.rank} waited {self.timeout_secs:g} s for signal {awaited} of rank(s) {list(late)} "
                f"({counts}); they ended, never made this call, or need a larger timeout_secs"
            )
            raise TransportError(self._unusable, late)

    def close(self) -> None:
        """Waits for the exchanges under way. Waits for the other ranks to close as well, a few seconds at most."""
        if self._is_closed:
            return
        self._is_closed = True
        was_usable = not self._unusable
        torch.cuda.synchronize(self.device)
        super().close()
        self._control.timeout_secs = min(self._control.timeout_secs, _CLOSE_SECS)
        for block in (self._slots, self._board):
            if block is None:
                continue
            try:
                block.close(may_wait=was_usable)
            except (TransportError, RuntimeError):
                was_usable = False
        self._control.close()


def _check_machine(control: Transport) -> None:
    machines = control.all_gather_bytes(socket.gethostname().encode())
    if len(set(machines)) > 1:
        raise NotAvailable(f"transport 'peer' is for one machine; the ranks are on {len(set(machines))}")


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _can_pin() -> bool:
    return torch.cuda.is_available()


def _pinned(part: Tensor) -> Tensor:
    return part.pin_memory() if _can_pin() else part
