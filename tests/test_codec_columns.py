"""MXFP4 and FP8 rows to FP8 and MXFP4 with shared scales, row-wise and column-wise."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numerics import (
    RAGGED_GROUPS,
    SCALE_MODES,
    assert_same_bits,
    convert,
    from_bits,
    hard_fp8,
    hard_mxfp4,
    on_device,
    torch_rows,
)
from numpy.typing import NDArray

from fp4comm import _cpu
from fp4comm.backends import cpu
from fp4comm.codec import FP8Columns, FP8Tensor, MXFP4Tensor
from fp4comm.errors import InvalidArgument
from fp4comm.formats import Kind
from fp4comm.reference import codec as oracle

pytestmark = pytest.mark.usefixtures("everywhere")
RNG = np.random.default_rng
Payload = tuple[NDArray[np.uint8], NDArray[np.uint8]]
LOSSLESS_SPREAD = 14
ALL_CODES = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)


def mxfp4_tensor(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> MXFP4Tensor:
    return MXFP4Tensor(on_device(packed), on_device(scales))


def fp8_tensor(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> FP8Tensor:
    return FP8Tensor(on_device(codes).view(torch.float8_e4m3fn), on_device(scales))


def take(payload: Payload, rows: NDArray[np.int64]) -> Payload:
    return oracle.take_rows(payload[0], rows), oracle.take_rows(payload[1], rows)


def assert_columns(actual: FP8Columns, expected: tuple[NDArray[np.uint8], NDArray[np.float32]]) -> None:
    assert_same_bits(actual.scales, expected[1], "scales")
    assert_same_bits(actual.data, expected[0], "data")


def exponent_tuples(anchor: int, depth: int) -> Payload:
    """Rows of four blocks of all 16 codes, for every tuple of exponents from `depth` below `anchor` to `anchor`."""
    below = np.array(list(product(range(depth + 1), repeat=4)))
    below = below[below.min(axis=1) == 0]
    scales = np.clip(anchor - below, 0, 254).astype(np.uint8)
    return np.tile(ALL_CODES, (len(scales), 8)), scales


class TestRowWise:
    @pytest.mark.parametrize("anchor", [20, 127, 254])
    def test_lossless_up_to_14_binades(self, anchor: int) -> None:
        """All 14,911 exponent tuples of a group that spread over at most 14 binades: not one number changes."""
        payload = exponent_tuples(anchor, LOSSLESS_SPREAD)
        assert len(payload[1]) == 15**4 - 14**4
        x = mxfp4_tensor(*payload)
        y = x.to_fp8()
        exact = oracle.mxfp4_values(*payload)
        codes, scales = y.data.view(torch.uint8).cpu().numpy(), y.scales.double().cpu().numpy()
        restored = oracle.E4M3_VALUES[codes] * scales
        np.testing.assert_array_equal(restored, exact)
        assert_same_bits(y.dequantize(torch.float32), x.dequantize(torch.float32))

    @pytest.mark.parametrize("anchor", [3, 10, 21, 130, 254])
    def test_wider_spreads_round_to_nearest(self, anchor: int) -> None:
        below = np.array(list(product((0, 1, 6, 14, 15, 16, 17, 18, 19, 20, 21), repeat=4)))
        scales = np.clip(anchor - below, 0, 254).astype(np.uint8)
        packed = np.tile(ALL_CODES, (len(scales), 8))
        y = mxfp4_tensor(packed, scales).to_fp8()
        codes, fp8_scales = oracle.mxfp4_to_fp8(packed, scales)
        assert_same_bits(y.scales, fp8_scales)
        assert_same_bits(y.data, codes)

    def test_beyond_14_by_hand(self) -> None:
        """What remains of 0.5, 1, 1.5, 2, 3, 4 and 6 of a block d binades below the largest, in its own unit."""
        table = {
            15: [0, 1, 2, 2, 3, 4, 6],
            16: [0, 0, 2, 2, 4, 4, 6],
            17: [0, 0, 0, 0, 4, 4, 8],
            18: [0, 0, 0, 0, 0, 0, 8],
            19: [0] * 7,
        }
        packed = np.zeros((len(table), 64), np.uint8)
        packed[:, 16:20] = [0x21, 0x43, 0x65, 0x07]
        scales = np.array([[200, 200 - d, 0, 0] for d in table], np.uint8)
        y = mxfp4_tensor(packed, scales).to_fp8().dequantize(torch.float32).cpu().numpy().astype(np.float64)
        unit = np.ldexp(1.0, scales[:, 1:2].astype(int) - 127)
        assert (y[:, 32:39] / unit).tolist() == list(table.values())

    @pytest.mark.parametrize("hidden", [32, 64, 96, 128, 160, 288])
    @pytest.mark.parametrize("spread", [0, 6, 30])
    def test_hard_payload(self, hidden: int, spread: int) -> None:
        payload = hard_mxfp4(RNG(hidden + spread), 500, hidden, spread)
        y = mxfp4_tensor(*payload).to_fp8()
        codes, scales = oracle.mxfp4_to_fp8(*payload)
        assert_same_bits(y.scales, scales)
        assert_same_bits(y.data, codes)

    def test_zero_blocks_have_no_say(self) -> None:
        """Blocks of zeros and NaN beside a small block: the others come out as if they were not there."""
        packed = np.tile(ALL_CODES, (2, 8))
        packed[0, 16:48] &= 0x88
        scales = np.array([[1, 0, 0, 255], [1, 1, 1, 1]], np.uint8)
        y = mxfp4_tensor(packed, scales).to_fp8()
        assert y.scales.tolist() == [[2.0**-126], [2.0**-126]]
        assert_same_bits(y.data[0, :32], y.data[1, :32])
        assert (y.data[0, 96:].view(torch.uint8) == 0x7F).all()
        all_zero = mxfp4_tensor(np.full((1, 64), 0x80, np.uint8), np.zeros((1, 4), np.uint8)).to_fp8()
        assert all_zero.scales.item() == 1
        assert (all_zero.data.view(torch.uint8).view(-1, 2).cpu() == torch.tensor([0, 0x80])).all()


class TestColumnWise:
    @pytest.mark.parametrize("hidden", [32, 96, 160, 288])
    @pytest.mark.parametrize("spread", [0, 6, 30])
    def test_ragged_groups(self, hidden: int, spread: int) -> None:
        payload = hard_mxfp4(RNG(hidden + spread), sum(RAGGED_GROUPS), hidden, spread)
        actual = mxfp4_tensor(*payload).to_fp8_columns(RAGGED_GROUPS)
        assert_columns(actual, oracle.mxfp4_to_fp8_columns(*payload, RAGGED_GROUPS))

    @pytest.mark.parametrize("num_rows", [0, 1, 31, 127, 128, 129, 256, 257])
    def test_one_group(self, num_rows: int) -> None:
        payload = hard_mxfp4(RNG(num_rows), num_rows, 96)
        actual = mxfp4_tensor(*payload).to_fp8_columns()
        assert_columns(actual, oracle.mxfp4_to_fp8_columns(*payload))
        assert actual.num_rows_per_expert == (num_rows,)

    def test_same_numbers_as_row_wise(self) -> None:
        """Every full tile holds all exponents from 14 below its largest: rows, columns and payload still agree."""
        anchor, rng = 100, RNG(0)
        scales = (anchor - rng.integers(0, LOSSLESS_SPREAD + 1, (1024, 8))).astype(np.uint8)
        for below in range(LOSSLESS_SPREAD + 1):
            scales[below::128] = anchor - below
        packed = np.tile(ALL_CODES, (1024, 16))
        packed = rng.permuted(packed, axis=1)
        x = mxfp4_tensor(packed, scales)
        sizes = (300, 0, 129, 595)
        original = x.dequantize(torch.float32)
        assert_same_bits(x.to_fp8().dequantize(torch.float32), original, "row-wise")
        assert_same_bits(x.to_fp8_columns(sizes).dequantize(), original, "column-wise")

    def test_every_exponent_difference(self) -> None:
        """One tile per anchor and difference: the shift of every code by every number of binades."""
        anchors, below = (6, 7, 8, 60, 254), range(40)
        packed = np.tile(ALL_CODES, (128 * len(anchors) * len(below), 2))
        scales = np.empty((len(anchors) * len(below), 128, 1), np.uint8)
        for tile, (anchor, d) in enumerate(product(anchors, below)):
            scales[tile] = max(anchor - d, 0)
            scales[tile, tile % 128] = anchor
        actual = mxfp4_tensor(packed, scales.reshape(-1, 1)).to_fp8_columns()
        assert_columns(actual, oracle.mxfp4_to_fp8_columns(packed, scales.reshape(-1, 1)))

    def test_row_map(self) -> None:
        """Rows picked, repeated and left out (-1, a padding row of zeros), as an exchange does."""
        rng = RNG(1)
        payload = hard_mxfp4(rng, 200, 160)
        rows = rng.integers(-1, 200, sum(RAGGED_GROUPS))
        rows[300:330] = -1
        data, scales = cpu.fp8_columns(torch_rows(Kind.MXFP4, *payload), torch.from_numpy(rows), RAGGED_GROUPS)
        expected = oracle.mxfp4_to_fp8_columns(*take(payload, rows), RAGGED_GROUPS)
        assert_columns(FP8Columns(data, scales, RAGGED_GROUPS), expected)

    def test_padding_rows_change_nothing(self) -> None:
        payload = hard_mxfp4(RNG(2), 100, 64)
        padded = tuple(np.concatenate([part, np.zeros((28, part.shape[1]), np.uint8)]) for part in payload)
        columns, padded_columns = mxfp4_tensor(*payload).to_fp8_columns(), mxfp4_tensor(*padded).to_fp8_columns()
        assert_same_bits(padded_columns.scales, columns.scales)
        assert_same_bits(padded_columns.expert(0)[0][:, :100].contiguous(), columns.expert(0)[0])


class TestFP8Columns:
    @pytest.mark.parametrize("hidden", [32, 96, 128, 160, 288])
    def test_ragged_groups(self, hidden: int) -> None:
        codes, scales = hard_fp8(RNG(hidden), sum(RAGGED_GROUPS), hidden, power_of_two=True)
        actual = fp8_tensor(codes, scales).to_columns(RAGGED_GROUPS)
        assert_columns(actual, oracle.fp8_to_fp8_columns(codes, scales, RAGGED_GROUPS))

    def test_every_code_and_shift(self) -> None:
        """Tiles of all 256 codes, one row at the largest scale and the rest d binades below it."""
        shifts = range(26)
        codes = np.resize(np.arange(256, dtype=np.uint8), (128 * len(shifts), 256))
        scales = np.ldexp(1.0, 3 - np.repeat(shifts, 128))[:, None].repeat(2, axis=1).astype(np.float32)
        scales[::128] = 8
        for bias in (2.0**-100, 1.0, 2.0**124):
            actual = fp8_tensor(codes, (scales * bias).astype(np.float32)).to_columns()
            assert_columns(actual, oracle.fp8_to_fp8_columns(codes, (scales * bias).astype(np.float32)))

    def test_zeros_and_nan_have_no_say(self) -> None:
        codes = np.full((4, 128), 0x38, np.uint8)
        codes[1] = 0x80  # a zero row with a huge scale
        codes[2] = np.resize(np.array([0x7F, 0xFF, 0], np.uint8), 128)
        scales = np.array([[2.0**-60], [2.0**120], [2.0**100], [2.0**-61]], np.float32)
        columns = fp8_tensor(codes, scales).to_columns()
        assert (columns.scales == 2.0**-60).all()
        data = columns.data.view(torch.uint8).view(128, 4)
        assert data[0].tolist() == [0x38, 0x80, 0x7F, 0x30]
        assert data[1].tolist() == [0x38, 0x80, 0xFF, 0x30]
        nothing = fp8_tensor(codes[1:3], scales[1:3]).to_columns()
        assert (nothing.scales == 1).all()

    def test_e8m0_scales(self) -> None:
        codes, scales = hard_fp8(RNG(3), 400, 160, power_of_two=True)
        _, scale_bytes = oracle.fp8_to_e8m0(codes, scales)
        data, tile_scales = cpu.fp8_columns(torch_rows(Kind.FP8_E8M0, codes, scale_bytes), None, (129, 271))
        expected = oracle.fp8_to_fp8_columns(codes, scales, (129, 271))
        assert_columns(FP8Columns(data, tile_scales, (129, 271)), expected)

    @pytest.mark.parametrize("bits", [0, 0x00400000, 0x3FC00000, 0x3F800001, 0x7F800000, 0x7FC00000, 0xBF800000])
    def test_backend_counts_bad_scales(self, bits: int) -> None:
        """Also in a group of zeros, and without the check of the codec before it."""
        codes, scales = hard_fp8(RNG(6), 200, 160, power_of_two=True)
        codes[150, 128:] = 0
        scales[[3, 150], [0, 1]] = from_bits([bits])
        with pytest.raises(InvalidArgument, match=r"2 .*not positive normal powers of two"):
            cpu.fp8_columns(torch_rows(Kind.FP8, codes, scales), None, (129, 71))
        if bits in (0, 0x7F800000):  # bytes 0 and 255 of E8M0
            scale_bytes = np.full((200, 2), 120, np.uint8)
            scale_bytes[199, 1] = bits >> 23
            with pytest.raises(InvalidArgument, match=r"1 .*not positive normal powers of two"):
                cpu.fp8_columns(torch_rows(Kind.FP8_E8M0, codes, scale_bytes), None, (129, 71))

    def test_row_map(self) -> None:
        rng = RNG(4)
        codes, scales = hard_fp8(rng, 100, 288, power_of_two=True)
        rows = rng.integers(-1, 100, 300)
        picked_scales = np.where(rows[:, None] >= 0, scales[rows], np.float32(1))
        data, tile_scales = cpu.fp8_columns(torch_rows(Kind.FP8, codes, scales), torch.from_numpy(rows), (140, 160))
        expected = oracle.fp8_to_fp8_columns(oracle.take_rows(codes, rows), picked_scales, (140, 160))
        assert_columns(FP8Columns(data, tile_scales, (140, 160)), expected)


class TestMXFP4Columns:
    @pytest.mark.parametrize("hidden", [32, 96, 160])
    @pytest.mark.parametrize("spread", [0, 6, 30])
    def test_ragged_groups(self, hidden: int, spread: int) -> None:
        payload = hard_mxfp4(RNG(hidden + spread), sum(RAGGED_GROUPS), hidden, spread)
        actual = mxfp4_tensor(*payload).to_mxfp4_columns(RAGGED_GROUPS)
        packed, scales = oracle.mxfp4_to_mxfp4_columns(*payload, RAGGED_GROUPS)
        assert_same_bits(actual.scales, scales, "scales")
        assert_same_bits(actual.packed, packed, "packed")

    def test_every_exponent_and_largest_code(self) -> None:
        """A column whose largest number is any code under any byte, the ends of the range included, beside others."""
        rng = RNG(5)
        blocks = list(product(range(255), range(1, 8)))
        codes = np.zeros((len(blocks), 32, 32), np.uint8)
        scales = np.empty((len(blocks), 32, 1), np.uint8)
        for i, (byte, code) in enumerate(blocks):
            codes[i] = rng.integers(0, code + 1, (32, 32)) | rng.integers(0, 2, (32, 32)) << 3
            codes[i, i % 32] = code
            scales[i] = np.maximum(byte - rng.integers(0, 6, (32, 1)), 0)
            scales[i, i % 32] = byte
        packed = oracle.pack(codes.reshape(-1, 32))
        x = mxfp4_tensor(packed, scales.reshape(-1, 1))
        expected_packed, expected_scales = oracle.mxfp4_to_mxfp4_columns(packed, scales.reshape(-1, 1))
        for mode in SCALE_MODES:  # the numbers have mantissas 1 and 1.5, where the modes agree
            actual = x.to_mxfp4_columns(scale_mode=mode)
            assert_same_bits(actual.scales, expected_scales, f"{mode} scales")
            assert_same_bits(actual.packed, expected_packed, f"{mode} packed")

    def test_row_map(self) -> None:
        rng = RNG(6)
        payload = hard_mxfp4(rng, 60, 64)
        rows = rng.integers(-1, 60, 150)
        actual = cpu.mxfp4_columns(torch_rows(Kind.MXFP4, *payload), torch.from_numpy(rows), (33, 117))
        expected = oracle.mxfp4_to_mxfp4_columns(*take(payload, rows), (33, 117))
        assert_same_bits(actual[0], expected[0], "packed")
        assert_same_bits(actual[1], expected[1], "scales")

    def test_dequantize(self) -> None:
        payload = hard_mxfp4(RNG(7), sum(RAGGED_GROUPS), 64)
        payload[1][payload[1] > 250] = 250
        actual = mxfp4_tensor(*payload).to_mxfp4_columns(RAGGED_GROUPS)
        columns = oracle.mxfp4_to_mxfp4_columns(*payload, RAGGED_GROUPS)
        expected = oracle.mxfp4_columns_values(*columns, 64, RAGGED_GROUPS)
        assert_same_bits(actual.dequantize(), expected)
        packed, scales = actual.expert(5)
        assert packed.shape == (64, 80)
        assert scales.shape == (64, 5)


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.FP8, Kind.FP8_E8M0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("sizes", [(1,), (33, 0, 130)])
def test_nothing_beside_the_columns_is_touched(kind: Kind, sizes: tuple[int, ...]) -> None:
    num_rows, hidden = sum(sizes), 160
    codes, scales = hard_fp8(RNG(9), num_rows, hidden, power_of_two=True)
    payload = hard_mxfp4(RNG(9), num_rows, hidden)
    data: NDArray[Any]
    factors: NDArray[Any]
    data, factors = payload if kind == Kind.MXFP4 else convert(Kind.FP8, kind, codes, scales)
    src = _cpu.Rows(kind, data.ctypes.data, data.strides[0], factors.ctypes.data, factors.strides[0])
    group_sizes = np.array(sizes, np.int64)
    groups = (src, hidden, 0, group_sizes.ctypes.data, len(sizes))

    expected = oracle.mxfp4_to_fp8_columns(*payload, sizes)
    if kind != Kind.MXFP4:
        expected = oracle.fp8_to_fp8_columns(codes, scales, sizes)
    out = [np.full(part.nbytes + 128, 0xA5, np.uint8) for part in expected]
    assert _cpu.fp8_columns(*groups, out[0].ctypes.data + 64, out[1].ctypes.data + 64) == 0
    for result, part in zip(out, expected, strict=True):
        guard = np.full(64, 0xA5, np.uint8)
        assert_same_bits(result, np.concatenate([guard, np.ascontiguousarray(part).view(np.uint8).ravel(), guard]))

    if kind == Kind.MXFP4:
        columns = oracle.mxfp4_to_mxfp4_columns(*payload, sizes)
        out = [np.full(part.nbytes + 128, 0xA5, np.uint8) for part in columns]
        _cpu.mxfp4_columns(*groups, out[0].ctypes.data + 64, out[1].ctypes.data + 64, _cpu.Options())
        for result, part in zip(out, columns, strict=True):
            assert_same_bits(result, np.concatenate([guard, part, guard]))


def test_fp8_columns_dequantize() -> None:
    payload = hard_mxfp4(RNG(8), sum(RAGGED_GROUPS), 96)
    columns = mxfp4_tensor(*payload).to_fp8_columns(RAGGED_GROUPS)
    expected = oracle.fp8_columns_values(*oracle.mxfp4_to_fp8_columns(*payload, RAGGED_GROUPS), 96, RAGGED_GROUPS)
    np.testing.assert_array_equal(columns.dequantize().cpu().numpy(), expected)
    data, scales = columns.expert(6)
    assert data.shape == (96, 300)
    assert scales.shape == (3, 96)
