"""What the bandwidth benchmark sends: its configuration with the bytes that follow from it, and tokens with routes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fp4comm import FP8Tensor, quantize_fp8

WIRE_BITS = {"fp32": 32, "bf16": 16, "fp8": 8, "mxfp4": 4}
WIRE_BLOCK = {"fp8": 128, "mxfp4": 32}  # elements per scale byte
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TRACE_ARRAYS = ("x_bits", "topk_idx", "topk_weights", "num_experts")


@dataclass(frozen=True)
class Config:
    """One case of the benchmark. Sizes are per rank."""

    num_ranks: int
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    layout: str = "expert"
    input: str = "bf16"
    output: str = "bf16"
    skew: float = 0.0
    is_cached: bool = False
    trace: str = ""
    seed: int = 0
    has_capacity: bool = False

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def __str__(self) -> str:
        routes = f"trace {self.trace}" if self.trace else f"skew {self.skew:g}"
        return (
            f"{self.num_tokens} tokens per rank x {self.hidden}, top-{self.num_topk} of {self.num_experts} experts, "
            f"{routes}{', cached routes' if self.is_cached else ''}"
            f"{', fixed capacity' if self.has_capacity else ''}, layout {self.layout}, "
            f"{self.input} in, {self.output} out"
        )

    def row_bytes(self, wire: str, leg: str) -> int:
        """Bytes of a row on the wire: numbers, scales and, when routes are new, 6 bytes per slot of the top-k."""
        size = self.hidden * WIRE_BITS[wire] // 8
        if wire in WIRE_BLOCK:
            size += -(-self.hidden // WIRE_BLOCK[wire])
        if leg == "dispatch" and not self.is_cached:
            size = -(-size // 4) * 4 + 6 * self.num_topk
        return -(-size // 32) * 32

    @property
    def bf16_row_bytes(self) -> int:
        """Bytes of the bare numbers of a row in BF16."""
        return 2 * self.hidden

    def rows_to_rank(self, topk_idx: Tensor) -> Tensor:
        """int64 `[num_ranks]`: one row per token and rank with an expert of it."""
        ranks = torch.arange(self.num_ranks)
        is_on_rank = (topk_idx.div(self.num_local_experts, rounding_mode="floor")[:, :, None] == ranks) & (
            topk_idx >= 0
        )[:, :, None]
        return is_on_rank.any(1).sum(0)


@dataclass(frozen=True)
class Variant:
    """What moves the rows of a case: a wire format on both legs, and a transport.

    Attributes:
        num_sms: multiprocessors that it may take, None = all.
    """

    transport: str
    wire: str
    num_sms: int | None = None

    def __str__(self) -> str:
        limit = "" if self.num_sms is None else f" on {self.num_sms} multiprocessors"
        return f"{self.wire} over {self.transport}{limit}"


@dataclass(frozen=True)
class Batch:
    """One round's routes on one rank: `[num_tokens, num_topk]` int64 and float32."""

    topk_idx: Tensor
    topk_weights: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same there."""
        return Batch(self.topk_idx.to(device), self.topk_weights.to(device))


@dataclass(frozen=True)
class Trace:
    """Tokens and routes of a real layer, in the order in which they came."""

    x: Tensor  # bfloat16 [num_tokens, hidden]
    topk_idx: Tensor  # int64 [num_tokens, num_topk]
    topk_weights: Tensor  # float32
    num_experts: int

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Reads the arrays x_bits (uint16 BF16 patterns), topk_idx, topk_weights and num_experts.

        Raises:
            ValueError: there is no such file, or it holds something else.
        """
        try:
            with np.load(path) as arrays:
                x_bits, idx, weights, num_experts = (arrays[name] for name in TRACE_ARRAYS)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"--trace {path}: {error}; accepted: an npz file with {', '.join(TRACE_ARRAYS)}") from None
        if not (x_bits.ndim == idx.ndim == 2 and idx.shape == weights.shape and len(idx) == len(x_bits) > 0):
            shapes = f"x_bits {x_bits.shape}, topk_idx {idx.shape}, topk_weights {weights.shape}"
            raise ValueError(f"--trace {path} has {shapes}; accepted: [T, hidden] and twice [T, num_topk], T > 0")
        return cls(
            torch.from_numpy(x_bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16),
            torch.from_numpy(idx.astype(np.int64)),
            torch.from_numpy(weights.astype(np.float32)),
            int(num_experts),
        )


@dataclass(frozen=True)
class Workload:
    """Tokens and routes of every rank, a pure function of the configuration, so that any rank can make any other's.

    Random tokens are normal, with a scale per token and a few large channels, as activations have them.
    """

    config: Config
    trace: Trace | None = None

    def x(self, rank: int, num_tokens: int | None = None) -> Tensor | FP8Tensor:
        """The tokens of a rank in the input format; `num_tokens` replaces the configured number."""
        config = self.config
        num_tokens = config.num_tokens if num_tokens is None else num_tokens
        if self.trace is not None:
            x = self.trace.x[self._trace_rows(rank, num_tokens, 0)]
        else:
            generator = self._generator("x", rank)
            x = torch.randn(num_tokens, config.hidden, generator=generator).to(torch.bfloat16)
            x *= torch.rand(num_tokens, 1, generator=generator).mul(3).exp().to(x.dtype)
            x[:, :: 1 + config.hidden // 8] *= 16
        return quantize_fp8(x) if config.input == "fp8" else x.to(DTYPES[config.input])

    def batch(self, rank: int, index: int, num_tokens: int | None = None) -> Batch:
        """The routes of a rank in round `index`."""
        config = self.config
        num_tokens = config.num_tokens if num_tokens is None else num_tokens
        if self.trace is not None:
            rows = self._trace_rows(rank, num_tokens, index)
            return Batch(self.trace.topk_idx[rows], self.trace.topk_weights[rows])
        generator = self._generator("routes", rank, index)
        # The largest of log p + Gumbel noise are a sample without replacement that follows the popularities p.
        noise = torch.empty(num_tokens, config.num_experts).exponential_(generator=generator).log_().neg_()
        scores, topk_idx = (noise + self._log_popularity).topk(config.num_topk)
        return Batch(topk_idx, torch.sigmoid(scores))

    @cached_property
    def _log_popularity(self) -> Tensor:
        """Zipf's law with exponent `skew` over the experts in random order."""
        order = torch.randperm(self.config.num_experts, generator=self._generator("popularity"))
        return -self.config.skew * torch.log1p(order.float())

    def _generator(self, *purpose: object) -> torch.Generator:
        key = np.random.SeedSequence([self.config.seed, *(ord(char) for char in repr(purpose))])
        return torch.Generator().manual_seed(int(key.generate_state(1, np.uint64)[0] >> 1))

    def _trace_rows(self, rank: int, num_tokens: int, index: int) -> Tensor:
        """Consecutive tokens, each rank after the one before it; each round goes on where the last one ended."""
        assert self.trace is not None
        start = (index * self.config.num_ranks + rank) * num_tokens
        return torch.arange(start, start + num_tokens) % len(self.trace.topk_idx)
