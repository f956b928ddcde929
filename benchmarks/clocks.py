"""Clocks for intervals that all ranks enter together: of the host, and of a GPU.

On a GPU a call is timed in up to three ways, by events on each rank's device, with all devices idle and all ranks at
the start together:

- "alone" is one call. The device waits for Python to come to each launch, as in a program that does nothing else.
- The main figure is several calls in a row, enqueued while the device is still busy with a pause, divided by their
  number. That is what a call adds to a training step: there the host is ahead of the device, which has the work of
  earlier layers to do, and launches cost nothing. A call that makes the host wait has that wait in this figure, too.

- "graph" is the same number of calls captured in a CUDA graph, where calls can be: nothing but the device's own time.

"host" is the time after which a call alone returns to Python: where it is longer than the main figure, a program that
does nothing else is bound by the host.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from .common import Times
from .device import gpu_seconds
from .ranks import Ranks

HEAD_START_US = 8000.0  # what Python may lag behind in a series of calls
Result = TypeVar("Result")
Interval = Callable[[str], AbstractContextManager[None]]


class HostClock:
    """Wall-clock time from the moment when all ranks have arrived."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.times: Times = {}

    def call(self, name: str, function: Callable[[], Result], in_graph: bool = False) -> Result:
        """Times one call."""
        with self._interval(name):
            return function()

    @contextmanager
    def stages(self) -> Iterator[Interval]:
        """What times a stage, after a barrier, so that none waits for another rank's earlier stage."""
        yield self._interval

    @contextmanager
    def _interval(self, name: str) -> Iterator[None]:
        self.ranks.barrier()
        start = time.perf_counter()
        yield
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> Times:
        """What was timed since the last call of this."""
        times, self.times = self.times, {}
        return times


class GpuClock:
    """Device time, see above.

    Args:
        ranks: that start together.
        num_calls: in a row.
    """

    def __init__(self, ranks: Ranks, num_calls: int) -> None:
        self.ranks, self.num_calls = ranks, num_calls
        self.times: Times = {}
        self._is_by_stage = False
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    def call(self, name: str, function: Callable[[], Result], in_graph: bool = False) -> Result:
        """Times a call in a graph, if that is possible, alone and in a row of calls; the result is that of the last."""
        results: list[Result] = []

        def once() -> None:
            results.clear()  # first, so that the next result can take its memory
            results.append(function())

        def alone() -> None:
            start = time.perf_counter()
            once()
            self.times[f"{name}.host"] = time.perf_counter() - start

        def in_a_row() -> None:
            for _ in range(self.num_calls):
                once()

        if in_graph and not self._is_by_stage and self.ranks.device.type == "cuda":
            self.times[f"{name}.graph"] = self._graph_seconds(in_a_row) / self.num_calls
            once()  # a capture empties the allocator's cache
        if not self._is_by_stage:
            self.times[f"{name}.alone"] = gpu_seconds(alone, before=self.ranks.barrier)
        self.times[name] = gpu_seconds(in_a_row, HEAD_START_US, self.ranks.barrier) / self.num_calls
        return results[0]

    def _graph_seconds(self, function: Callable[[], None]) -> float:
        """Device time of a replay."""
        function()  # what must not happen first in a capture, such as compiling
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        stream = None if current == torch.cuda.default_stream() else current  # which no graph can capture
        with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
            function()
        gpu_seconds(graph.replay, before=self.ranks.barrier)
        seconds = gpu_seconds(graph.replay, HEAD_START_US, self.ranks.barrier)
        graph.reset()  # NCCL waits for living graphs when it is closed
        return seconds

    @contextmanager
    def stages(self) -> Iterator[Interval]:
        """What times a stage, by events in the stream; a wait for another rank counts where it occurs."""
        self._is_by_stage = True
        yield self._interval
        self._is_by_stage = False

    @contextmanager
    def _interval(self, name: str) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._events[name].append((start, end))

    def take(self) -> Times:
        """What was timed since the last call of this."""
        torch.cuda.synchronize()
        for name, pairs in self._events.items():
            self.times[name] = sum(start.elapsed_time(end) for start, end in pairs) / 1e3 / self.num_calls
        self._events.clear()
        times, self.times = self.times, {}
        return times


def make_clock(ranks: Ranks, num_calls: int) -> HostClock | GpuClock:
    """The clock for the device of the run; `num_calls` in a row are timed on a GPU."""
    return HostClock(ranks) if ranks.device.type == "cpu" else GpuClock(ranks, num_calls)
