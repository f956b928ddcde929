"""Events, and on which stream of a GPU a call runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class EventHandle:
    """A point in the work of a GPU's current stream: all that was enqueued there before. On the CPU always reached."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """What is enqueued on the current stream from now on runs after that point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event to wait for when its results are needed, by `current_stream_wait` or by leaving a `with` block.

    Args:
        event: None = there is nothing to wait for, and `current_stream_wait` must not be called.
        extra_tensors: kept for as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._releases_on_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream waits for the event, which is then dropped if `release_handle`."""
        assert self.event is not None, "the call was not asynchronous: its results are ordered on the current stream"
        self.event.current_stream_wait()
        if self.hook_after_wait is not None:
            self.hook_after_wait()
            self.hook_after_wait = None
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """`hook_after_wait` is called once, after the next wait."""
        assert self.hook_after_wait is None, "there is a hook already"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For `with event(release_handle=True):`."""
        self._releases_on_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(self._releases_on_exit)
        self._releases_on_exit = False


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """Where asynchronous calls run: one for all buffers, since calls of a communicator must not overlap each other."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def enqueue(work: Callable[[], T], inputs: Any, previous_event: Any, is_async: bool) -> tuple[T, EventHandle | None]:
    """Does the work of one call in the order that streams ask for, without gradients.

    Args:
        work: the call.
        inputs: all tensors that it reads or writes, also in tuples and handles, one of its device first.
        previous_event: an `EventOverlap` or `EventHandle` to wait for as well, or None.
        is_async: on a GPU, run on `communication_stream`, after all that has been enqueued so far; what is enqueued
            later on the current stream doesn't wait.

    Returns:
        What `work` returns, and for an asynchronous call the event to wait for.
    """
    device = next((tensor.device for tensor in _tensors(inputs)), torch.device("cpu"))
    event = getattr(previous_event, "event", previous_event)
    if event is not None:
        event.current_stream_wait()
    if device.type != "cuda":
        with torch.no_grad():
            return work(), EventHandle() if is_async else None
    current = torch.cuda.current_stream(device)
    stream = communication_stream(device) if is_async else current
    for other in (current, *filter(None, [_STREAMS.get(device)])):
        if other != stream:
            stream.wait_stream(other)
    with torch.no_grad(), torch.cuda.stream(stream):
        result = work()
        done = EventHandle() if is_async else None
    if is_async:  # memory belongs to the stream that it was allocated on
        _keep_for(stream, inputs)
        _keep_for(current, result)
    return result, done


def _keep_for(stream: torch.cuda.Stream, value: Any) -> None:
    """Memory of the GPU that is freed from now on is used again only after what is enqueued on the stream so far."""
    for tensor in _tensors(value):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(tuple(vars(value).values()))
