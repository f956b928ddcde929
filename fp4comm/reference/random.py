"""Random numbers of the codec: Philox4x32-10 (Salmon et al., SC'11), stochastic rounding bits, random Hadamard.

Everything is a pure function of the seed and of the position in the tensor, so results do not depend on how a tensor
is cut into pieces.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
HADAMARD_STREAM = 0xFFFFFFFF
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1
LOW_32 = np.uint64(0xFFFFFFFF)


def philox4x32(counter: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Ten rounds of Philox4x32.

    Args:
        counter: [..., 4] words below 2**32.
        seed: 64-bit integer; the key is its low and its high word.

    Returns:
        [..., 4] words below 2**32.
    """
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    words = [counter[..., i].astype(np.uint64) for i in range(4)]
    for _ in range(10):
        product0, product1 = MULTIPLIERS[0] * words[0], MULTIPLIERS[1] * words[2]
        words = [
            (product1 >> np.uint64(32)) ^ words[1] ^ np.uint64(key[0]),
            product1 & LOW_32,
            (product0 >> np.uint64(32)) ^ words[3] ^ np.uint64(key[1]),
            product0 & LOW_32,
        ]
        key = [(k + step) & 0xFFFFFFFF for k, step in zip(key, KEY_STEPS, strict=True)]
    return np.stack(words, axis=-1)


def rounding_bits(row_index: NDArray[np.int64], hidden: int, seed: int, stream: int) -> NDArray[np.uint64]:
    """The 16 random bits of every element: [rows, hidden].

    One Philox call serves eight neighbours: its word j // 2 holds elements j (low half if j is even, else high half).
    """
    rows = np.asarray(row_index, np.uint64)[:, None]
    octets = np.arange(-(-hidden // 8), dtype=np.uint64)[None, :]
    rows, octets = np.broadcast_arrays(rows, octets)
    counter = np.stack([octets, rows & LOW_32, rows >> np.uint64(32), np.full_like(rows, stream)], axis=-1)
    words = philox4x32(counter, seed)
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1)
    return halves.reshape(len(rows), -1)[:, :hidden]


def hadamard_signs(num_blocks: int, seed: int) -> NDArray[np.float32]:
    """The +1 or -1 of every element, [num_blocks, 32]; the same for all rows."""
    counter = np.zeros((num_blocks, 4), np.uint64)
    counter[:, 0] = np.arange(num_blocks)
    counter[:, 3] = HADAMARD_STREAM
    mask = philox4x32(counter, seed)[:, 0]
    bits = mask[:, None] >> np.arange(BLOCK, dtype=np.uint64) & np.uint64(1)
    return np.where(bits == 1, -1, 1).astype(np.float32)


def butterflies(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Walsh-Hadamard transform of the last axis (32), without normalisation; every step rounds to float32."""
    for half in (1, 2, 4, 8, 16):
        pairs = blocks.reshape(*blocks.shape[:-1], BLOCK // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        with np.errstate(over="ignore", invalid="ignore"):
            blocks = np.stack([a + b, a - b], axis=-2).reshape(blocks.shape)
    return blocks


def hadamard_forward(blocks: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Random signs, then the transform, times 1/4: [rows, num_blocks, 32] float32.

    1/4 here and 1/8 in the inverse are powers of two whose product is 1/32, hence exact away from the float32 limits.
    """
    with np.errstate(invalid="ignore"):
        y: NDArray[np.float32] = butterflies(blocks * hadamard_signs(blocks.shape[-2], seed)) * np.float32(0.25)
    return y


def hadamard_inverse(blocks: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Undoes `hadamard_forward` up to float32 rounding."""
    x: NDArray[np.float32] = butterflies(blocks) * np.float32(0.125) * hadamard_signs(blocks.shape[-2], seed)
    return x
