"""Hard inputs for codec tests, and a comparison of bits that says where two arrays differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp4comm.backends import Rows
from fp4comm.formats import Kind
from fp4comm.reference import codec as oracle

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SCALE_MODES = ("floor", "even", "rceil")
# Rows of an expert group: none, one, below, at and above a tile.
RAGGED_GROUPS = (0, 1, 16, 127, 128, 129, 300)
_device: torch.device = torch.device("cpu")


def to_numpy(x: Any) -> NDArray[Any]:
    """The bits of a tensor or an array as unsigned integers of the element size."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().contiguous().view(TORCH_BITS[x.element_size()]).numpy()
    x = np.ascontiguousarray(x)
    bits: NDArray[Any] = x.view(BITS[x.itemsize])
    return bits


def assert_same_bits(actual: Any, expected: Any, what: str = "result") -> None:
    """Fails with the first differing coordinate, both bit patterns and the number of differences."""
    a, b = to_numpy(actual), to_numpy(expected)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    assert a.dtype == b.dtype, f"{what}: {a.itemsize} bytes per element, expected {b.itemsize}"
    if np.array_equal(a, b):
        return
    differing = np.argwhere(a != b)
    first = tuple(int(i) for i in differing[0])
    digits = 2 * a.itemsize
    raise AssertionError(
        f"{what}: {len(differing)} of {a.size} elements differ, first at {first}: "
        f"got 0x{int(a[first]):0{digits}x}, expected 0x{int(b[first]):0{digits}x}"
    )


def on_device(x: NDArray[Any]) -> torch.Tensor:
    """A tensor where the test's tensors lie: on the CPU unless `tensors_on` says otherwise."""
    return torch.from_numpy(x).to(_device)


def tensors_device() -> torch.device:
    """Where `on_device` puts tensors."""
    return _device


@contextlib.contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Meanwhile `on_device` puts tensors there."""
    global _device
    before = _device
    _device = torch.empty(0, device=device).device  # with the number of the current one, if none is given
    try:
        yield
    finally:
        _device = before


def bf16_tensor(bits: NDArray[np.uint16]) -> torch.Tensor:
    return on_device(bits.view(np.int16).copy()).view(torch.bfloat16)


def fp16_tensor(bits: NDArray[np.uint16]) -> torch.Tensor:
    return on_device(bits.view(np.int16).copy()).view(torch.float16)


def from_bits(bits: Any) -> NDArray[np.float32]:
    """float32 numbers of bit patterns."""
    return np.asarray(bits, np.uint32).view(np.float32)


def all_16_bits() -> NDArray[np.uint16]:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def neighbours(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Every positive number with the floats just below and above it."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return np.concatenate([bits - np.uint32(1), bits, bits + np.uint32(1)]).view(np.float32)


def powers_of_two(low: int, high: int) -> NDArray[np.float64]:
    return np.ldexp(1.0, np.arange(low, high + 1))


def scale_thresholds() -> NDArray[np.float32]:
    """Block maxima one ulp around every number at which a scale changes, and the ends of the range."""
    corners = np.outer([1.0, 1.25, 1.5, 1.75], powers_of_two(-130, 127)).ravel().astype(np.float32)
    ends = from_bits([1, 2, 3, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFE, 0x7F7FFFFF])
    return np.unique(np.concatenate([neighbours(corners), ends]).view(np.uint32)).view(np.float32)


def e2m1_ties() -> NDArray[np.float32]:
    """All midpoints of the E2M1 grid and the largest value, each with its float32 neighbours."""
    return neighbours(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], np.float32))


def e4m3_ties() -> NDArray[np.float32]:
    grid = oracle.E4M3_MAGNITUDES
    return neighbours(((grid[:-1] + grid[1:]) / 2).astype(np.float32))


def hard_floats(rng: np.random.Generator, num_rows: int, hidden: int) -> NDArray[np.float32]:
    """Blocks of 32 of many kinds: ordinary, wide-range, tie-ridden, zero, subnormal, huge, NaN, Inf, any bits."""
    shape = (num_rows * hidden // 32, 32)
    gauss = rng.standard_normal(shape)
    ties = rng.choice(e2m1_ties(), shape) * rng.choice([-1, 1], shape)
    signed_zeros = np.where(gauss > 0, 0.0, -0.0)
    kinds = [
        gauss,
        gauss * np.exp(2 * rng.standard_normal(shape)),
        gauss * np.ldexp(1.0, rng.integers(-140, 120, (shape[0], 1))),
        np.ldexp(gauss, rng.integers(-30, 30, shape)),
        ties,
        ties * np.ldexp(1.0, rng.integers(-120, 120, (shape[0], 1))),
        signed_zeros,
        np.where(rng.random(shape) < 0.05, gauss, signed_zeros),
        gauss * 2.0**-130,
        np.clip(gauss * 2.0**126, -3.4e38, 3.4e38),
    ]
    choice = rng.integers(0, len(kinds) + 3, shape[0])
    with np.errstate(under="ignore"):
        x = np.stack(kinds)[np.minimum(choice, len(kinds) - 1), np.arange(shape[0])].astype(np.float32)
    special = from_bits([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001])
    hit = np.flatnonzero(choice == len(kinds))
    x[hit, rng.integers(0, 32, len(hit))] = rng.choice(special, len(hit))
    raw = choice == len(kinds) + 1
    x[raw] = from_bits(rng.integers(0, 1 << 32, (int(raw.sum()), 32), dtype=np.uint32))
    return x.reshape(num_rows, hidden)


def hard_mxfp4(
    rng: np.random.Generator, num_rows: int, hidden: int, spread: int = 6
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Packed codes and scale bytes: exponents `spread` apart around a level per row, zero and NaN blocks, the ends."""
    shape = (num_rows, hidden // 32)
    packed = rng.integers(0, 256, (num_rows, hidden // 2), dtype=np.uint8)
    level = rng.choice([3, 7, 60, 127, 130, 200, 250], (num_rows, 1))
    scales = np.clip(level + rng.integers(-spread, spread + 1, shape), 0, 254).astype(np.uint8)
    draw = rng.random(shape)
    scales[draw < 0.02] = 255
    ends = rng.choice(np.array([0, 1, 253, 254], np.uint8), shape)
    scales = np.where((draw >= 0.02) & (draw < 0.04), ends, scales)
    zero = (draw >= 0.04) & (draw < 0.15)
    scales[zero] = 0
    packed[np.repeat(zero, 16, axis=1)] &= 0x88
    packed[rng.random(num_rows) < 0.05] &= 0x88  # zeros under scales that the encoder would not have chosen
    return packed, scales


def hard_fp8(
    rng: np.random.Generator, num_rows: int, hidden: int, *, power_of_two: bool, with_nan: bool = True
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """E4M3 codes of every value and scales per 128: powers of two of the whole range, or any positive float32."""
    shape = (num_rows, -(-hidden // 128))
    codes = rng.integers(0, 256, (num_rows, hidden), dtype=np.uint8)
    nan = codes % 128 == 127
    codes[nan & ~(rng.random(codes.shape) < (0.02 if with_nan else 0))] -= 1
    draw = np.repeat(rng.random(shape), 128, axis=1)[:, :hidden]
    codes[draw < 0.1] &= 0x80
    if with_nan:
        codes[(draw >= 0.1) & (draw < 0.15) & (codes % 2 == 1)] |= 0x7F
        codes[(draw >= 0.1) & (draw < 0.15) & (codes % 2 == 0)] &= 0x80
    exponent = rng.choice([-126, -120, -20, 0, 3, 100, 119, 127], (num_rows, 1)) + rng.integers(-12, 13, shape)
    scales = np.ldexp(1.0, np.clip(exponent, -126, 127))
    if not power_of_two:
        scales = np.minimum(scales * rng.uniform(1, 2, shape), 3e38)
    return codes, scales.astype(np.float32)


def torch_rows(kind: Kind, data: NDArray[Any], scales: NDArray[Any] | None = None) -> Rows:
    """The arrays of `hard_rows`, `encode` or `convert` as an argument of a backend function (shares memory)."""
    return Rows(kind, torch.from_numpy(data), None if scales is None else torch.from_numpy(scales))


def hard_rows(rng: np.random.Generator, kind: Kind, num_rows: int, hidden: int) -> tuple[NDArray[Any], ...]:
    """Arrays (data,) or (data, scales) of hard rows of `kind`."""
    if kind == Kind.MXFP4:
        return hard_mxfp4(rng, num_rows, hidden)
    if kind in (Kind.FP8, Kind.FP8_E8M0):
        codes, scales = hard_fp8(rng, num_rows, hidden, power_of_two=bool(rng.integers(2)))
        if kind == Kind.FP8:
            special = from_bits(
                [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 1, 0x00400000, 0x00800001, 0xBF800000]
            )
            odd = rng.random(scales.shape) < 0.05
            return codes, np.where(odd, rng.choice(special, scales.shape), scales)
        scale_bytes = rng.choice(np.array([0, 1, 2, 60, 127, 128, 200, 253, 254, 255], np.uint8), scales.shape)
        return codes, scale_bytes
    x = hard_floats(rng, num_rows, hidden)
    if kind == Kind.F32:
        return (x,)
    (bits,) = encode(kind, x)
    raw = rng.random(num_rows) < 0.2
    bits[raw] = rng.integers(0, 1 << 16, (int(raw.sum()), hidden), dtype=np.uint16)
    return (bits,)


def decode(kind: Kind, data: NDArray[Any], scales: NDArray[Any] | None = None, **hadamard: Any) -> NDArray[np.float32]:
    """The oracle's float32 numbers of rows of any kind; `hadamard` and `seed` count for MXFP4."""
    if kind == Kind.F32:
        return data
    if kind == Kind.BF16:
        return oracle.widen_bf16(data)
    if kind == Kind.F16:
        return oracle.widen_fp16(data)
    assert scales is not None
    if kind == Kind.FP8:
        return oracle.decode_fp8(data, scales)
    if kind == Kind.FP8_E8M0:
        return oracle.decode_fp8(data, oracle.e8m0_scales(scales))
    return oracle.decode_mxfp4(data, scales, **hadamard)


def encode(kind: Kind, x: NDArray[np.float32], **options: Any) -> tuple[NDArray[Any], ...]:
    """The oracle's arrays (data,) or (data, scales) of rows of any kind; the options count for MXFP4."""
    if kind == Kind.F32:
        return (oracle.canonical(x),)
    if kind == Kind.BF16:
        return (oracle.round_bf16(x),)
    if kind == Kind.F16:
        return (oracle.round_fp16(x),)
    if kind == Kind.FP8:
        return oracle.encode_fp8(x)
    if kind == Kind.FP8_E8M0:
        return oracle.fp8_to_e8m0(*oracle.encode_fp8(x))
    return oracle.encode_mxfp4(x, **options)


def convert(src: Kind, dst: Kind, *arrays: NDArray[Any], **options: Any) -> tuple[NDArray[Any], ...]:
    """The oracle's conversion of rows of any kind to any kind."""
    if src == dst:
        return arrays
    if src == Kind.BF16 and dst == Kind.F32:
        return (oracle.widen_bf16(*arrays),)  # NaN payloads included
    if src == Kind.MXFP4 and dst == Kind.FP8:
        return oracle.mxfp4_to_fp8(*arrays)
    if src == Kind.MXFP4 and dst == Kind.FP8_E8M0:
        return oracle.fp8_to_e8m0(*oracle.mxfp4_to_fp8(*arrays))
    if src == Kind.FP8 and dst == Kind.FP8_E8M0:
        return oracle.fp8_to_e8m0(*arrays)
    if src == Kind.FP8_E8M0 and dst == Kind.FP8:
        return arrays[0], oracle.e8m0_scales(arrays[1])
    hadamard = {key: options[key] for key in ("hadamard", "seed") if key in options}
    return encode(dst, decode(src, *arrays, **hadamard), **options)
