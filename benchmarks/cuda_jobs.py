"""What a case of the GPU codec benchmark is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .cuda_data import Data


@dataclass(frozen=True)
class Job:
    """A case on certain data.

    Attributes:
        run: does it, into memory of its own.
        outputs: what `run` has written, in an order that all devices share.
        num_elements: numbers converted; one that goes to several rows counts once for each that is computed.
        num_bytes: numbers, scales and maps, each once as it is read and once as it is written.
    """

    run: Callable[[], None]
    outputs: Callable[[], list[Tensor]]
    num_elements: int
    num_bytes: int


@dataclass(frozen=True)
class GpuCase:
    """One line of the table.

    Attributes:
        name: what it is called.
        build: makes the job.
        in_graph: whether a CUDA graph can capture it.
        is_latency: so small that time counts, not bandwidth.
        max_error: of each result beside the CPU's, as a part of its norm; 0 = the same bits.
    """

    name: str
    build: Callable[[Data], Job]
    in_graph: bool = True
    is_latency: bool = False
    max_error: float = 0.0
