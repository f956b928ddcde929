"""Byte messages between GPUs over NCCL, through CuPy's binding of it.

Rows travel as one message per pair of ranks, sent and received in one NCCL group; a rank's own rows are copied beside
it. All of that runs on a stream of the transport, which waits for the caller's stream and is waited for by it, so that
callers see the order of their own stream and memory needs no further care. A thread watches the exchanges under way:
NCCL itself waits for a lost rank for ever, and takes the stream with it. (Nobody watches what a graph replays.)
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidArgument, NotAvailable, TransportError
from .base import Transport, wait_on_host

_WATCH_SECS = 0.1
_RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def load_nccl() -> Any:
    """`cupy.cuda.nccl`.

    Raises:
        NotAvailable: CuPy, NCCL or a GPU is missing.
    """
    if not torch.cuda.is_available():
        raise NotAvailable("NCCL can't be used: torch finds no CUDA device")
    try:
        import cupy.cuda.nccl as nccl
    except ImportError as error:
        raise NotAvailable(f"NCCL can't be used ({error}); install CuPy: pip install 'fp4comm[cuda12]'") from error
    if not nccl.available:
        raise NotAvailable("NCCL can't be used: CuPy finds no libnccl; install it: pip install 'fp4comm[cuda12]'")
    return nccl


def own_device() -> str | None:
    """Names this process's current GPU among all machines; None if NCCL can't be used here."""
    try:
        load_nccl()
    except NotAvailable:
        return None
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


@dataclass
class _Flight:
    """An exchange under way. `done` is None while it is being enqueued, in which NCCL may wait for a rank too."""

    deadline: float
    purpose: str
    done: torch.cuda.Event | None = None

    @property
    def is_over(self) -> bool:
        return self.done is not None and bool(self.done.query())


class NCCLTransport(Transport):
    """Grouped sends and receives of bytes between GPUs, one per rank.

    Args:
        rank: of this process.
        num_ranks: size of the group.
        gather: what gathers bytes from all ranks, in rank order: how the ranks find each other.
        timeout_secs: see `Transport`; it counts from when an exchange is enqueued. When it is over, the NCCL
            communicator is aborted, so that work enqueued after it goes on with undefined rows, and the next call
            raises `TransportError`.

    Raises:
        InvalidArgument: on all ranks: ranks share a GPU.
        NotAvailable: on all ranks: NCCL is missing on one of them.
    """

    name = "nccl"

    def __init__(self, rank: int, num_ranks: int, gather: Callable[[bytes], list[bytes]], timeout_secs: float) -> None:
        super().__init__(rank, num_ranks, timeout_secs)
        device, unique_id = own_device(), None
        if device is not None and rank == 0:
            unique_id = load_nccl().get_unique_id()  # bytes since CuPy 14, before that a tuple of signed numbers
        first = None if unique_id is None else [isinstance(unique_id, bytes), list(unique_id)]
        replies = [json.loads(reply) for reply in gather(json.dumps([device, first]).encode())]
        _check_devices([device for device, _ in replies])
        self._nccl = load_nccl()
        self.device: torch.device = torch.device("cuda", torch.cuda.current_device())
        is_bytes, numbers = replies[0][1]
        self._comm = self._nccl.NcclCommunicator(num_ranks, bytes(numbers) if is_bytes else tuple(numbers), rank)
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._ready = torch.cuda.Event()
        self._buffers = _BufferPool(self.device)
        self._numbers: dict[tuple[int, ...], _Numbers] = {}
        self._flights: collections.deque[_Flight] = collections.deque()
        self._failure: TransportError | None = None  # of an exchange under way, not raised yet
        self._closing = threading.Event()
        atexit.register(self._closing.set)
        self._watcher: threading.Thread | None = None
        if num_ranks > 1:  # NCCL connects ranks at their first message: now, while all are here
            self.all_to_all(torch.zeros(num_ranks, 1, device="cpu", dtype=torch.int64))

    def send_buffer(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        if self.num_ranks == 1 or device != self.device:
            return super().send_buffer(shape, device)
        return self._buffers.take(shape[0] * shape[1]).view(shape)

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], purpose: str = "agreement") -> None:
        self._raise_failure()
        super().exchange(outgoing, incoming, purpose)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], purpose: str) -> None:
        if outgoing[0].device.type == "cpu":
            return self._exchange_on_host(outgoing, incoming, purpose)
        current = torch.cuda.current_stream(self.device)
        self._follow(current)
        done = self._enqueue([(outgoing, incoming)], purpose)
        if incoming[self.rank].numel():
            self._copy_own(outgoing, incoming)  # on the caller's stream, while the others travel
        current.wait_event(done)

    def _follow(self, stream: torch.cuda.Stream) -> None:
        """Has what is enqueued next on the transport's stream wait for what is on `stream`."""
        self._ready.record(stream)
        self._stream.wait_event(self._ready)

    def _enqueue(self, messages: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]], purpose: str) -> torch.cuda.Event:
        """Enqueues one NCCL group of (outgoing, incoming) messages; returns the event of its end, which is watched."""
        flight = _Flight(time.monotonic() + self.timeout_secs, purpose)
        if not torch.cuda.is_current_stream_capturing():  # else nothing runs now
            self._watch(flight)
        try:
            if torch.cuda.current_device() == self.device.index:
                self._group(messages)
            else:
                with torch.cuda.device(self.device):
                    self._group(messages)
        except RuntimeError as error:  # CuPy's NcclError
            self._unusable = f"rank {self.rank}: {purpose} over NCCL failed: {error}"
            raise TransportError(self._unusable) from error
        done = torch.cuda.Event()
        done.record(self._stream)
        flight.done = done
        return done

    def _group(self, messages: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        self._nccl.groupStart()
        try:
            for outgoing, incoming in messages:
                self._exchange_with_peers(outgoing, incoming)
        finally:  # an open group would hold back all of this thread's later ones
            self._nccl.groupEnd()

    def _exchange_with_peers(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        for distance in range(1, self.num_ranks):
            target, source = (self.rank + distance) % self.num_ranks, (self.rank - distance) % self.num_ranks
            self._send(outgoing[target], target)
            self._recv(incoming[source], source)

    def _send(self, message: Tensor, peer: int) -> None:
        if message.numel():
            count, dtype = message.nbytes, self._nccl.NCCL_UINT8
            self._comm.send(message.data_ptr(), count, dtype, peer, self._stream.cuda_stream)

    def _recv(self, message: Tensor, peer: int) -> None:
        if message.numel():
            count, dtype = message.nbytes, self._nccl.NCCL_UINT8
            self._comm.recv(message.data_ptr(), count, dtype, peer, self._stream.cuda_stream)

    def _exchange_on_host(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], purpose: str) -> None:
        """CPU tensors, for what is small: through the device and back, waiting for the end."""
        with torch.cuda.stream(self._stream):
            send = [message.to(self.device) for message in outgoing]
            received = [torch.empty_like(message, device=self.device) for message in incoming]
            done = self._enqueue([(send, received)], purpose)
            self._copy_own(send, received)
            self._wait(done)
            for target, message in zip(incoming, received, strict=True):
                target.copy_(message)

    def begin_all_to_all(self, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Without waiting for the device: it goes on with what the caller enqueues meanwhile."""
        self._raise_failure()
        if self.num_ranks == 1 or self._unusable:
            return super().begin_all_to_all(parts)
        widths = tuple(part.shape[1] for part in parts)
        if widths not in self._numbers:
            self._numbers[widths] = _Numbers(self.num_ranks, widths, self.device)
        numbers = self._numbers[widths]
        self._follow(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            outgoing = [numbers.to_send(index, part) for index, part in enumerate(parts)]
            messages = [(_rows(out), _rows(into)) for out, into in zip(outgoing, numbers.incoming, strict=True)]
            self._enqueue(messages, "agreement")
            for out, into in messages:
                self._copy_own(out, into)
            done = numbers.read()

        def wait() -> Tensor:
            self._wait(done)
            return torch.cat(numbers.received, dim=1)

        return wait

    def _watch(self, flight: _Flight) -> None:
        self._flights.append(flight)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._keep_watch, name="fp4comm nccl", daemon=True)
            self._watcher.start()

    def _keep_watch(self) -> None:
        """Aborts NCCL when something is wrong: until then it occupies the device."""
        torch.cuda.set_device(self.device)
        # Looking at events must not spoil a graph that another thread captures.
        mode = ctypes.c_int(_RELAXED_CAPTURE)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        while not self._closing.wait(_WATCH_SECS):
            while self._flights and self._flights[0].is_over:
                self._flights.popleft()
            problem = self._unusable or self._problem()
            if problem:
                if not self._unusable:
                    self._unusable = f"rank {self.rank}: {problem}"
                    others = tuple(rank for rank in range(self.num_ranks) if rank != self.rank)
                    self._failure = TransportError(self._unusable, others)
                self._comm.abort()
                return

    def _problem(self) -> str:
        """What is wrong with the exchanges under way; empty if nothing is."""
        try:
            self._comm.check_async_error()
        except Exception as error:
            return f"NCCL reports {error}"
        if self._flights and time.monotonic() > self._flights[0].deadline:
            purpose = self._flights[0].purpose
            return f"{purpose} over NCCL took longer than {self.timeout_secs:g} s; a rank ended or never made this call"
        return ""

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _wait(self, done: torch.cuda.Event) -> None:
        """Waits for an event on the host; the watcher ends the wait if the exchange fails."""
        wait_on_host(done)
        self._raise_failure()

    def close(self) -> None:
        """Waits for the exchanges under way. CUDA graphs that captured some must be destroyed before: NCCL waits for
        them without end."""
        if self._closing.is_set():
            return
        if not self._unusable:
            self._stream.synchronize()  # the watcher ends this if a rank is lost
        was_usable = not self._unusable
        super().close()
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        if was_usable:
            self._comm.destroy()


class _BufferPool:
    """A block of device memory for outgoing rows, which only grows. Blocks that a captured graph uses are kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block: Tensor | None = None
        self._captured: list[Tensor] = []
        self._last_stream: torch.cuda.Stream | None = None

    def take(self, num_bytes: int) -> Tensor:
        """Memory that was last used in the order of the current stream."""
        current = torch.cuda.current_stream(self._device)
        is_captured = torch.cuda.is_current_stream_capturing()
        if self._last_stream not in (None, current) and not is_captured:
            current.wait_stream(self._last_stream)
        self._last_stream = current
        if self._block is None or self._block.numel() < num_bytes:
            self._block = self._allocate(num_bytes, is_captured)
        if is_captured and not any(block is self._block for block in self._captured):
            self._captured.append(self._block)
        return self._block[:num_bytes]

    def _allocate(self, num_bytes: int, is_captured: bool) -> Tensor:
        import cupy

        if is_captured:
            raise InvalidArgument(
                "a CUDA graph captures the first exchange of this size; make the same calls once before capturing"
            )
        with cupy.cuda.Device(self._device.index):
            block = cupy.zeros(num_bytes * 9 // 8, cupy.uint8)
            cupy.cuda.get_current_stream().synchronize()
        return torch.from_dlpack(block)


class _Numbers:
    """Memory for an agreement of tensors `[num_ranks, width]`, in use until its result has been read.

    Attributes:
        incoming: where each tensor is received, on the device.
        received: the same on the host, after `read` and its event.
    """

    def __init__(self, num_ranks: int, widths: Sequence[int], device: torch.device) -> None:
        sizes = [num_ranks * width for width in widths]
        self._on_device = torch.empty(sum(sizes), dtype=torch.int64, device=device)
        self._on_host = torch.empty(sum(sizes), device="cpu", dtype=torch.int64, pin_memory=True)
        self._outgoing = [torch.empty(num_ranks, width, dtype=torch.int64, device=device) for width in widths]
        self._staged = [
            torch.empty(num_ranks, width, device="cpu", dtype=torch.int64, pin_memory=True) for width in widths
        ]
        self._is_staged = [False] * len(widths)
        self.incoming = [part.view(num_ranks, -1) for part in self._on_device.split(sizes)]
        self.received = [part.view(num_ranks, -1) for part in self._on_host.split(sizes)]

    def to_send(self, index: int, part: Tensor) -> Tensor:
        """The tensor with that index on the device; the current stream copies one from the CPU."""
        if part.device.type != "cpu":
            return part.contiguous()
        staged, numbers = self._staged[index].numpy(), part.numpy()
        if self._is_staged[index] and np.array_equal(staged, numbers):  # as in most steps
            return self._outgoing[index]
        np.copyto(staged, numbers)
        self._is_staged[index] = True
        return self._outgoing[index].copy_(self._staged[index], non_blocking=True)

    def read(self) -> torch.cuda.Event:
        """Copies what was received to the host on the current stream; returns the event of its end."""
        self._on_host.copy_(self._on_device, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return done


def _rows(values: Tensor) -> list[Tensor]:
    return list(values.view(torch.uint8))


def _check_devices(devices: list[str | None]) -> None:
    without = [rank for rank, device in enumerate(devices) if device is None]
    if without:
        raise NotAvailable(f"NCCL can't be used on rank(s) {without}: no CUDA device, CuPy or libnccl there")
    shared = {device for device in devices if devices.count(device) > 1}
    if shared:
        ranks = [rank for rank, device in enumerate(devices) if device in shared]
        raise InvalidArgument(
            f"ranks {ranks} share a GPU; accepted: one GPU per rank, chosen by torch.cuda.set_device before this call"
        )
