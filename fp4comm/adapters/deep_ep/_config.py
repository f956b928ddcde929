"""What callers ask before they make a `Buffer`. Nothing here changes what a buffer does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

topk_idx_t = torch.int64

_RANKS_OF_A_NODE = 8
_METADATA_BYTES = 2048  # of a row
_ALIGNMENT = 128


@dataclass
class Config:
    """Tuning of DeepEP's kernels, which fp4comm has no use for, and the two size hints that callers take from it."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """A number of bytes for `Buffer(num_nvl_bytes=...)`, which takes none of them."""
        num_rows = self.num_sms // 2 * min(num_ranks, _RANKS_OF_A_NODE) * self.num_max_nvl_chunked_recv_tokens
        return _aligned(num_rows * (hidden_bytes + _METADATA_BYTES))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """A number of bytes for `Buffer(num_rdma_bytes=...)`, which takes none of them. 0 up to 8 ranks."""
        if num_ranks <= _RANKS_OF_A_NODE:
            return 0
        num_nodes = -(-num_ranks // _RANKS_OF_A_NODE)
        num_rows = self.num_sms // 2 * num_nodes * self.num_max_rdma_chunked_recv_tokens
        return _aligned(2 * num_rows * (hidden_bytes + _METADATA_BYTES))


def low_latency_size_hint(num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of the rows that may arrive at all ranks and be sent back, twice."""
    return _aligned(2 * 2 * num_experts * num_max_tokens * (2 * hidden + 16))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
