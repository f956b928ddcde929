"""The correctness gate of the bandwidth benchmark: what arrives and comes back equals the reference, to the bit.

The same few tokens give the signal-to-noise ratios, against an exchange without any rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4comm import EPCommunicator, FP8Tensor, Precision, Received
from fp4comm.reference import codec
from fp4comm.reference import exchange as reference

from .device import on_device
from .per_choice import PerChoice
from .ranks import Ranks
from .workload import DTYPES, Batch, Config, Variant, Workload

F32 = reference.F32
MAX_ELEMENTS = 1 << 18  # of the tokens of all ranks: the reference is slow


@dataclass(frozen=True)
class Noise:
    """Energies of a signal and of the deviation from it."""

    signal: float
    noise: float

    @classmethod
    def between(cls, exact: F32, got: F32) -> Noise:
        exact64 = exact.astype(np.float64)
        return cls(float((exact64**2).sum()), float(((got - exact64) ** 2).sum()))


def sqnr_db(ranks: Ranks, noise: Noise) -> float | None:
    """Signal-to-quantization-noise ratio over all ranks; None = not a single deviation."""
    pairs = ranks.gather([noise.signal, noise.noise])
    signal, deviation = (sum(column) for column in zip(*pairs, strict=True))
    return 10 * math.log10(signal / deviation) if deviation and signal else None


class Gate:
    """The small problem and what the reference makes of it. Made alike on every rank."""

    def __init__(self, ranks: Ranks, workload: Workload) -> None:
        config = workload.config
        most = max(1, MAX_ELEMENTS // (config.hidden * config.num_ranks))
        num_tokens = min(config.num_tokens, most)
        self.ranks = ranks
        self.config = replace(config, num_tokens=num_tokens)
        self.inputs = [workload.x(rank, num_tokens) for rank in range(ranks.num_ranks)]
        self.batches = [workload.batch(rank, 0, num_tokens) for rank in range(ranks.num_ranks)]
        self.exact = self._reference(unchanged, unchanged, unchanged)
        self._wanted = cache(self._through_wire)  # the same over every transport

    @property
    def my_input(self) -> Tensor | FP8Tensor:
        return self.inputs[self.ranks.rank]

    @property
    def my_batch(self) -> Batch:
        return self.batches[self.ranks.rank]

    def check(self, variant: Variant) -> tuple[str | None, dict[str, float | None]]:
        """What is wrong with the variant on this rank, if anything, and the ratios in dB by leg (of all ranks)."""
        received, combined = self._run(variant)
        wanted = self._wanted(variant.wire)
        problem, sqnr = None, {}
        for leg, got, want, exact in zip(
            ("dispatch", "combine"), (received, combined), wanted, self.exact, strict=True
        ):
            if not np.array_equal(got, want, equal_nan=True):
                problem = problem or f"{leg} of {variant} on rank {self.ranks.rank} differs from the reference exchange"
            sqnr[leg] = sqnr_db(self.ranks, Noise(0.0, 0.0) if problem else Noise.between(exact, got))
        return problem, sqnr

    def check_per_choice(self) -> str | None:
        """What is wrong with the baseline on this rank, if anything."""
        batch, x, device = self.my_batch, bf16_rows(self.my_input), self.ranks.device
        baseline = PerChoice(self.ranks.transport, self.config.num_experts, self.config.layout == "expert", device)
        routed = batch.to(device)
        received, routes = baseline.dispatch(x.to(device), routed.topk_idx, routed.topk_weights)
        if self.config.is_cached:
            received, _ = baseline.dispatch(x.to(device), routed.topk_idx, routed.topk_weights, routes)
        combined = baseline.combine(received, routes)
        tokens = np.where(batch.topk_idx.numpy() >= 0, np.arange(len(x))[:, None], -1)
        wanted = round_bf16(codec.weighted_sum(x.float().numpy(), tokens, batch.topk_weights.numpy()))
        if np.array_equal(combined.float().cpu().numpy(), wanted):
            return None
        return f"the baseline's combine on rank {self.ranks.rank} differs from the weighted sum"

    def _through_wire(self, wire: str) -> tuple[F32, F32]:
        """The same by the reference."""
        finish = unchanged if self.config.output == "fp32" else round_bf16
        return self._reference(reference.through_wire(wire), self._output(wire), finish)

    def _run(self, variant: Variant) -> tuple[F32, F32]:
        """What arrives on this rank and comes back to it, as float32 numbers."""
        config, batch = self.config, self.my_batch.to(self.ranks.device)
        x, layout = on_device(self.my_input, self.ranks.device), config.layout
        with make_communicator(self.ranks, config, variant) as comm:
            out = "fp8" if config.output == "fp8" else DTYPES[config.output]
            received, handle = comm.dispatch(x, batch.topk_idx, batch.topk_weights, layout=layout, out=out)
            if config.is_cached:
                received, handle = comm.dispatch(x, handle=handle, out=out)
            recv_x = float_rows(received.x)
            y = torch.from_numpy(experts(recv_x, comm.rank)).to(DTYPES.get(config.output, torch.bfloat16))
            combined = comm.combine(y.to(self.ranks.device), handle)
        return recv_x[self._used_rows(received)], combined.float().cpu().numpy()

    def _used_rows(self, received: Received) -> NDArray[np.bool_]:
        """Which rows are received tokens: a fixed capacity leaves others, in the expert layout at the end."""
        if self.config.layout == "rank":
            return (received.topk_idx >= 0).any(1).cpu().numpy()
        num_used = sum(received.num_rows_per_expert)
        return np.arange(len(received.x.data)) < num_used

    def _reference(
        self, wire: reference.Wire, output: Callable[[F32], F32], finish: Callable[[F32], F32]
    ) -> tuple[F32, F32]:
        """What this rank receives and what it gets back, as float32 numbers."""
        config, rank = self.config, self.ranks.rank
        xs = [float_rows(x) for x in self.inputs]
        idx = [batch.topk_idx.numpy() for batch in self.batches]
        weights = [batch.topk_weights.numpy() for batch in self.batches]
        arrived = reference.dispatch(xs, idx, weights, config.num_experts, wire)
        sums, mine = [], np.zeros((0, config.hidden), np.float32)
        for there, on_rank in enumerate(arrived):
            x = output(on_rank.x)
            y = finish(experts(x, there))
            if config.layout == "expert":
                rows = reference.expert_rows(on_rank, config.num_local_experts, 1)
                index = [row_and_slot[0] for row_and_slot in rows if row_and_slot is not None]
                x, y = x[index], reference.local_sums(y[index], rows, on_rank, weighted=True)
            sums.append(y)
            mine = x if there == rank else mine
        combined = reference.combine(sums, arrived, [config.num_tokens] * config.num_ranks, wire)[rank]
        return mine, finish(combined)

    def _output(self, wire: str) -> Callable[[F32], F32]:
        """What becomes of received numbers in the output format."""

        def fp8(x: F32) -> F32:
            if wire == "mxfp4":
                return codec.decode_fp8(*codec.mxfp4_to_fp8(*codec.encode_mxfp4(x)))
            return codec.decode_fp8(*codec.encode_fp8(x))

        return {"fp8": fp8, "bf16": round_bf16, "fp32": unchanged}[self.config.output]


def make_communicator(
    ranks: Ranks, config: Config, variant: Variant, check_inputs: bool | None = None
) -> EPCommunicator:
    """A communicator with one wire format on all legs, over a transport of the run: those of GPUs start slowly."""
    wire = variant.wire
    return EPCommunicator(
        ranks.transports[variant.transport],
        num_experts=config.num_experts,
        hidden=config.hidden,
        precision=Precision(wire, wire, wire, wire),
        num_max_tokens_per_rank=config.num_tokens if config.has_capacity else None,
        check_inputs=check_inputs,
        num_sms=variant.num_sms,
    )


def experts(x: F32, rank: int) -> F32:
    """What stands for the experts of a rank: a factor of its own, so that rows which are summed do not just repeat."""
    return x * np.float32(1 + 0.3 * rank)


def unchanged(x: F32) -> F32:
    """`x` itself: the exchange without rounding."""
    return x


def round_bf16(x: F32) -> F32:
    """Numbers rounded to BF16."""
    return codec.widen_bf16(codec.round_bf16(x))


def float_rows(x: Tensor | FP8Tensor) -> F32:
    """The numbers of an input, by the oracle."""
    if isinstance(x, FP8Tensor):
        return codec.decode_fp8(x.data.view(torch.uint8).cpu().numpy(), x.scales.cpu().numpy())
    return x.float().cpu().numpy()


def bf16_rows(x: Tensor | FP8Tensor) -> Tensor:
    """An input as the plain dispatcher takes it."""
    return x.dequantize(torch.bfloat16) if isinstance(x, FP8Tensor) else x.to(torch.bfloat16)
