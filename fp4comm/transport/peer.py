"""Rows written straight into the memory of the GPUs of one NVLink domain by the kernels that make them.

Every rank has NUM_SLOTS slots that rows arrive in. An exchange is: `open_window`, after which kernels may write to a
slot of every rank; the kernels, which write; `meet`, after which all rows are there. Exchanges take the slots in
turn, so that a rank that is ahead can write while others still read what came before. All that keeps ranks apart in
time is on the devices (`csrc/cuda/peer.cu`), so a CUDA graph can hold any number of exchanges and be replayed.
"""

from __future__ import annotations

import json
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ..backends.rows import Arrivals, PeerRows
from ..errors import InvalidArgument, NotAvailable, TransportError
from .base import RowMatrix, Transport, Window, wait_on_host
from .peer_memory import SharedBlock, copy_bytes, current_gpu, have_atomics, name_of_gpu

_FIRST_IN_GRAPH = "a CUDA graph captures the first exchange of this size; make the same calls once before capturing"
_ALIGNMENT = 512
_CLOSE_SECS = 10.0
_LONGEST_SECS = 1e8  # in nanoseconds an int64
_MAX_WINDOWS = 256
_MIN_COUNTED_ROWS = 4096
_BLOCKS_OF_TWO_KERNELS = 4  # that have room on a multiprocessor, see ROW_BOUNDS of csrc/cuda/rows.cuh
_LIVE: weakref.WeakSet[PeerTransport] = weakref.WeakSet()


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
        self._can_count = _check_ranks(control)
        from ..backends import cuda_peer

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
            int(min(timeout_secs, _LONGEST_SECS) * 1e9),
        )
        self._slots: SharedBlock | None = None
        self._slot_bytes = 0
        self._next_slot = 0
        self._num_signals = 0  # so far, and times that the slots were replaced
        self._windows: dict[tuple[RowMatrix, int, int], Window] = {}
        self._captured: list[tuple[Window, SharedBlock]] = []  # what graphs use
        self._last_stream: torch.cuda.Stream | None = None
        self._is_open = False  # between the two steps of an exchange
        self._is_closed = False
        _LIVE.add(self)
        torch.cuda.synchronize(self.device)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the slots of this rank, those that only captured graphs use included."""
        return sum(block.num_bytes for block in self._blocks())

    def _blocks(self) -> set[SharedBlock]:
        return {block for _, block in self._captured} | ({self._slots} if self._slots is not None else set())

    def describe(self) -> str:
        """With the size of the slots."""
        used, most = self.buffer_bytes / 2**20, self.max_buffer_bytes / 2**20
        return f"peer with {used:.0f} MiB of at most {most:.0f} MiB of buffers"

    # ---- rows ----

    @property
    def has_windows(self) -> bool:
        return self.num_ranks > 1

    def open_window(
        self, rows_of_all: RowMatrix, row_bytes: int, just_met: bool = False, counting_blocks: int = 0
    ) -> Window:
        """See `Transport`.

        Raises:
            InvalidArgument: on all ranks: the slots would have to be larger than they may be, or they have to grow
                while a CUDA graph is captured.
            TransportError: a rank was late before.
        """
        self._check_usable()
        most = max(sum(row[rank] for row in rows_of_all) for rank in range(self.num_ranks))  # alike on all ranks
        self._reserve(most * row_bytes)
        slot = self._next_slot
        key = (rows_of_all, row_bytes, slot)
        if key not in self._windows:
            self._make_windows(rows_of_all, row_bytes)
        window = self._windows[key]
        self._follow_last_stream()
        if _is_capturing():
            assert self._slots is not None
            self._captured.append((window, self._slots))
        self._next_slot = (slot + 1) % self._cuda_peer.NUM_SLOTS
        self._num_signals += 1
        self._is_open = True
        if just_met:
            return window
        # Reading rows while others arrive must gain more than counting them costs.
        most_counted = self._cuda_peer.NUM_COUNTERS * self._cuda_peer.ROWS_PER_COUNTER
        if not (self._can_count and _MIN_COUNTED_ROWS <= most <= most_counted):
            counting_blocks = 0
        self._group.open_slot(slot, counting_blocks > 0)
        if not counting_blocks:
            return window
        arrivals = replace(window.arrivals, most_blocks=self._most_blocks(counting_blocks))
        return replace(window, counting_blocks=counting_blocks, arrivals=arrivals)

    def _most_blocks(self, counting_blocks: int) -> int:
        """Of a kernel that waits for rows, per multiprocessor; 0 = as many as have room.

        Exchanges on several streams at once must leave room for each other's kernels that send, or two ranks could wait
        for each other's with devices full of kernels that wait.
        """
        if all(other is self or other._last_stream == self._last_stream for other in _LIVE):
            return 0
        return _BLOCKS_OF_TWO_KERNELS - counting_blocks

    def meet(self, window: Window) -> None:
        self._group.meet(window.slot)
        self._is_open = False

    def close_window(self) -> Callable[[], bool]:
        self._is_open = False
        return self.lease()

    def await_rows(self, arrivals: Arrivals) -> None:
        self._group.await_rows(arrivals)

    def lease(self) -> Callable[[], bool]:
        count, is_captured = self._num_signals, _is_capturing()
        # What graphs do, only the device counts.
        on_device = self._group.state[:1].clone() if self._captured and not is_captured else None

        def holds() -> bool:
            """Once this rank signals again, others may write there."""
            self._follow_last_stream()  # what reads the rows now is one of the exchanges, in order
            if self._num_signals != count or self._is_closed or is_captured != _is_capturing():
                return False
            if is_captured or not self._captured:
                return True
            return on_device is not None and torch.equal(on_device, self._group.state[:1])

        return holds

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
        rows_from_rank = [row[self.rank] for row in rows_of_all]
        num_arriving = sum(rows_from_rank)
        for slot in range(self._cuda_peer.NUM_SLOTS):
            offset = slot * self._slot_bytes
            bases = [
                address + offset + (place - start) * row_bytes
                for address, place, start in zip(self._slots.addresses, places, starts, strict=True)
            ]
            counters = [
                address + self._cuda_peer.counters_offset(self.num_ranks, slot) for address in self._board.addresses
            ]
            shifts = [place - start for place, start in zip(places, starts, strict=True)]
            facts, num_turns = self._group.arrivals(self._board.addresses[self.rank], slot, rows_from_rank)
            has_failed = self._group.has_failed_address
            on_device = self._to_device([*bases, *starts, *counters, *shifts, has_failed, *facts])
            num = 4 * self.num_ranks + 1
            memory = self._slots.own.tensor[offset : offset + num_arriving * row_bytes]
            self._windows[rows_of_all, row_bytes, slot] = Window(
                slot,
                on_device[:num],
                self.num_ranks,
                num_rows,
                self.num_ranks * max(rows_of_all[self.rank]),
                memory.view(num_arriving, row_bytes),
                Arrivals(on_device[num:], num_turns),
            )

    def _to_device(self, numbers: Sequence[int]) -> Tensor:
        on_host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=_can_pin())
        return on_host.to(self.device, non_blocking=True)

    def _reserve(self, num_bytes: int) -> None:
        """Slots of that size; all ranks come to the same conclusion.

        Raises:
            NotAvailable: on all ranks: one of them has no memory left. There are no slots then.
        """
        if self._slots is not None and num_bytes <= self._slot_bytes:
            return
        num_slots = self._cuda_peer.NUM_SLOTS
        captured = sum(block.num_bytes for block in {block for _, block in self._captured})
        least = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if captured + least * num_slots > self.max_buffer_bytes:
            kept = f" and {captured} bytes that captured graphs use" if captured else ""
            raise InvalidArgument(
                f"max_buffer_bytes is {self.max_buffer_bytes}; accepted: at least {captured + least * num_slots} for "
                f"this exchange: {num_slots} slots for the rows that one rank receives{kept}"
            )
        if _is_capturing():
            raise InvalidArgument(_FIRST_IN_GRAPH)
        room = (self.max_buffer_bytes - captured) // num_slots
        size = max(least, min(num_bytes * 9 // 8, room) // _ALIGNMENT * _ALIGNMENT)
        torch.cuda.synchronize(self.device)  # what is in the old ones has been read then
        old, self._slots, self._slot_bytes = self._slots, None, 0
        if old is not None and not any(block is old for _, block in self._captured):
            old.close()
        self._slots, self._slot_bytes = SharedBlock(size * num_slots, self.device, self._control), size
        known = {(key[0], key[1]) for key in self._windows}  # a graph may be captured next, where none can be made
        self._windows.clear()
        for exchange in known:
            self._make_windows(*exchange)
        self._num_signals += 1

    # ---- numbers and messages ----

    def begin_all_to_all(self, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """By a kernel that writes to the ranks' memory and waits for theirs; parts may have any strides."""
        self._check_usable()
        width = sum(part.shape[1] for part in parts)
        self._follow_last_stream()
        if self.num_ranks == 1 or width > self._cuda_peer.MAIL_NUMBERS or len(parts) > 3:
            return super().begin_all_to_all(parts)  # which waits for the device, so that all have read everything
        reachable = [part if part.device.type == "cuda" else _pinned(part) for part in parts]
        received = torch.empty((self.num_ranks, width), dtype=torch.int64, device="cpu", pin_memory=_can_pin())
        self._num_signals += 1
        self._group.exchange_numbers(reachable, received)
        self._numbers = (reachable, received)  # in use until that has run, whoever waits for it
        done = None if self.device.type == "cpu" else torch.cuda.Event()
        if done is not None:
            done.record()

        def wait() -> Tensor:
            if done is not None:
                wait_on_host(done)
            self._check_usable()
            return received

        return wait

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], purpose: str) -> None:
        if outgoing[0].device.type == "cpu":
            return self._control.exchange(outgoing, incoming, purpose)
        sizes = torch.tensor([len(message.view(-1)) for message in outgoing], device="cpu", dtype=torch.int64)
        gathered = self.begin_all_to_all([sizes.expand(self.num_ranks, -1)])().tolist()
        rows_of_all = tuple(tuple(row) for row in gathered)
        window = self.open_window(rows_of_all, 1, just_met=True)
        bases, starts = window.table[: 2 * self.num_ranks].view(2, -1).tolist()
        for message, base, start in zip(outgoing, bases, starts, strict=True):
            if message.numel():
                copy_bytes(base + start, message.data_ptr(), message.numel())
        self.meet(window)
        arrived = window.buffer.view(-1).split([len(message.view(-1)) for message in incoming])
        for target, source in zip(incoming, arrived, strict=True):
            target.view(-1).copy_(source)

    def _exchange_with_peers(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        raise AssertionError("_exchange does that too")

    # ---- order and failures ----

    def _follow_last_stream(self) -> None:
        """Exchanges are one after the other, whatever stream they are on."""
        current, last = torch.cuda.current_stream(self.device), self._last_stream
        if last is not None and last != current and _is_capturing(last) == _is_capturing():
            current.wait_stream(last)
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
        _LIVE.discard(self)
        try:
            torch.cuda.synchronize(self.device)
            may_wait = not self._unusable and not self._failure_words[0]
            super().close()
            self._control.timeout_secs = min(self._control.timeout_secs, _CLOSE_SECS)
            for block in (*self._blocks(), self._board):
                try:
                    block.close(may_wait)
                except (TransportError, RuntimeError):
                    may_wait = False
        finally:
            self._control.close()


def _check_ranks(control: Transport) -> bool:
    """All ranks are on one machine, and have what is needed. Returns whether all can count in each other's memory."""
    problem = gpu = ""
    try:
        from ..backends import cuda_peer  # noqa: F401  here, since CuPy is optional

        gpu = name_of_gpu(current_gpu())
    except Exception as error:  # the others must not wait for this rank
        problem = f"{type(error).__name__}: {error}"
    own = json.dumps([socket.gethostname(), gpu, problem]).encode()
    machines, gpus, problems = zip(*(json.loads(text) for text in control.all_gather_bytes(own)), strict=True)
    if any(problems):
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        raise NotAvailable(f"transport 'peer' can't be used: {'; '.join(texts)}")
    if len(set(machines)) > 1:
        raise NotAvailable(f"transport 'peer' is for one machine; the ranks are on {len(set(machines))}")
    return all(control.all_gather_bytes(b"1" if have_atomics(gpu, gpus) else b""))


def _is_capturing(stream: torch.cuda.Stream | None = None) -> bool:
    if stream is None:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _can_pin() -> bool:
    return torch.cuda.is_available()


def _pinned(part: Tensor) -> Tensor:
    return part.contiguous().pin_memory() if _can_pin() else part
