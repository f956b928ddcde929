"""Every instruction set gives the bits of the scalar loops, which are the definition of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4comm.backends import Rows, cpu
from fp4comm.formats import Kind

HIDDENS = (32, 96, 160, 288, 7168)
OPTIONS = {
    "floor": cpu.options("floor"),
    "even": cpu.options("even"),
    "rceil": cpu.options("rceil"),
    "stochastic": cpu.options("rceil", stochastic=True, seed=2**63 + 12345, stream=2**32 - 3),
    "hadamard": cpu.options("even", hadamard=True, seed=77),
    "both": cpu.options("floor", stochastic=True, hadamard=True, seed=3, stream=1),
}
FILL = 0xA5  # what memory that nobody may write holds


@pytest.fixture(params=["avx2", "avx512vbmi"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name not in cpu.supported_isas():
        pytest.skip(f"this processor or build has no {name}")
    before = cpu.isa()
    yield name
    cpu.set_isa(before)


def same_bits(isa: str, run: Callable[[], list[Tensor]]) -> None:
    """Compares what `run` returns under `isa` with what it returns under the scalar loops."""
    cpu.set_isa("scalar")
    expected = run()
    cpu.set_isa(isa)
    for want, got in zip(expected, run(), strict=True):
        if not torch.equal(want.view(torch.uint8), got.view(torch.uint8)):
            differs = (want.view(torch.uint8) != got.view(torch.uint8)).nonzero()
            pytest.fail(f"{len(differs)} of {want.nbytes} bytes differ, first at {differs[0].tolist()}")


# --- data that meet every branch


def floats(num_rows: int, hidden: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Rows of several characters: smooth, spread over all exponents, on ties and their neighbours, tiny, any bits."""
    shape = (num_rows, hidden)
    x = rng.standard_normal(shape).astype(np.float32)
    spread = np.exp2(rng.integers(-140, 125, (num_rows, hidden // 32)).astype(np.float64)).repeat(32, axis=1)
    ties = np.exp2(rng.integers(-130, 120, (num_rows, hidden // 32)).astype(np.float64)).repeat(32, axis=1)
    ties = (rng.integers(-28, 29, shape) / 4 * ties).astype(np.float32)
    ties = (ties.view(np.int32) + rng.integers(-1, 2, shape, dtype=np.int32)).view(np.float32)
    tiny = rng.integers(0, 2**24, shape, dtype=np.uint32) | rng.integers(0, 2, shape, dtype=np.uint32) << 31
    any_bits = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        x[1::6] *= spread[1::6].astype(np.float32)
    x[2::6] = ties[2::6]
    x[3::6] = tiny[3::6].view(np.float32)
    x[4::6] = any_bits[4::6]
    x[5::12] = np.where(rng.random(shape) < 0.9, np.copysign(0, x), x)[5::12]  # blocks of zeros of both signs
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38], np.float32)
    x.flat[rng.integers(0, x.size, max(x.size // 1000, 4))] = rng.choice(special, max(x.size // 1000, 4))
    return x


def fp8_scales(shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.float32]:
    """Powers of two, near 1 and anywhere; then other numbers, tiny, huge, negative, zero, Inf and NaN among them."""
    scales = np.exp2(rng.integers(-8, 9, shape)).astype(np.float32)
    scales[1::4] = np.exp2(rng.integers(-126, 128, shape)[1::4].astype(np.float64)).astype(np.float32)
    scales[2::4] = rng.random(shape, np.float32)[2::4]
    scales[3::4] = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)[3::4]
    special = np.array([0.0, -1.0, 1e-45, 2.0**-127, 2.0**120, np.inf, np.nan], np.float32)
    scales.flat[rng.integers(0, scales.size, scales.size // 16)] = rng.choice(special, scales.size // 16)
    return scales


def e4m3_codes(num_rows: int, hidden: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Any codes but few NaN; every block has a magnitude limit of its own, so that every largest code occurs."""
    limit = rng.integers(1, 0x7F, (num_rows, hidden // 32)).repeat(32, axis=1)
    codes = rng.integers(0, 0x7F, (num_rows, hidden)) % (limit + 1) | rng.integers(0, 2, (num_rows, hidden)) << 7
    codes.flat[rng.integers(0, codes.size, max(codes.size // 2000, 1))] = rng.choice([0x7F, 0xFF])
    return codes.astype(np.uint8)


def block_bytes(shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Scale bytes: close together, spread over 40 binades, anything; rows of zeros; NaN in between."""
    scales = rng.integers(120, 130, shape)
    scales[1::4] = rng.integers(100, 141, shape)[1::4]
    scales[2::4] = rng.integers(0, 256, shape)[2::4]
    scales[3::8] = rng.integers(0, 12, shape)[3::8]
    scales[7::8] = 0
    scales.flat[rng.integers(0, scales.size, scales.size // 50)] = 255
    return scales.astype(np.uint8)


def strided(x: NDArray[np.generic], padding: int) -> Tensor:
    """The bytes of `x` as rows that lie `padding` bytes apart."""
    raw = torch.from_numpy(np.ascontiguousarray(x).view(np.uint8))
    memory = torch.full((raw.shape[0], raw.shape[1] + padding), FILL, dtype=torch.uint8)
    memory[:, : raw.shape[1]] = raw
    return memory[:, : raw.shape[1]]


def make_rows(kind: Kind, num_rows: int, hidden: int, seed: int = 0, padding: int = 36) -> Rows:
    """Rows of random numbers of a kind."""
    rng = np.random.default_rng([seed, kind, hidden])
    num_groups = -(-hidden // 128)
    if kind == Kind.F32:
        return Rows(kind, strided(floats(num_rows, hidden, rng), padding))
    if kind == Kind.BF16:
        upper = floats(num_rows, hidden, rng).view(np.uint32) >> 16
        return Rows(kind, strided(upper.astype(np.uint16), padding))
    if kind == Kind.F16:
        return Rows(kind, strided(rng.integers(0, 2**16, (num_rows, hidden), dtype=np.uint16), padding))
    if kind == Kind.MXFP4:
        packed = rng.integers(0, 256, (num_rows, hidden // 2), dtype=np.uint8)
        packed[rng.random(num_rows) < 0.1] &= 0x88
        return Rows(kind, strided(packed, padding), strided(block_bytes((num_rows, hidden // 32), rng), padding))
    codes = strided(e4m3_codes(num_rows, hidden, rng), padding)
    if kind == Kind.FP8:
        return Rows(kind, codes, strided(fp8_scales((num_rows, num_groups), rng), padding))
    return Rows(kind, codes, strided(block_bytes((num_rows, num_groups), rng), padding))


def empty_rows(kind: Kind, num_rows: int, hidden: int, padding: int = 4) -> tuple[Rows, list[Tensor]]:
    """Rows to be written, and the memory around them."""
    data_bytes = hidden * {Kind.F32: 8, Kind.BF16: 4, Kind.F16: 4, Kind.MXFP4: 1}.get(kind, 2) // 2
    num_groups = -(-hidden // 128)
    scale_bytes = {Kind.FP8: 4 * num_groups, Kind.FP8_E8M0: num_groups, Kind.MXFP4: hidden // 32}.get(kind, 0)
    data = torch.full((num_rows, data_bytes + padding), FILL, dtype=torch.uint8)
    scales = torch.full((num_rows, scale_bytes + padding), FILL, dtype=torch.uint8)
    rows = Rows(kind, data[:, :data_bytes], scales[:, :scale_bytes] if scale_bytes else None)
    return rows, [data, scales]


def powers_of_two(rows: Rows, seed: int) -> Rows:
    """The same FP8 codes under scales that can become column-wise."""
    assert rows.scales is not None
    rng = np.random.default_rng(seed)
    num_groups = -(-rows.hidden // 128)
    exponents = rng.integers(110, 140, (len(rows), num_groups))
    exponents[::3] = rng.integers(1, 255, exponents.shape)[::3]
    scales = exponents.astype(np.uint8) if rows.kind == Kind.FP8_E8M0 else np.exp2(exponents - 127.0).astype(np.float32)
    return Rows(rows.kind, rows.data, strided(scales, 0))


def num_rows_for(hidden: int) -> int:
    return 12 if hidden > 1000 else 72


# --- tests


@pytest.mark.parametrize("hidden", HIDDENS)
@pytest.mark.parametrize("source", Kind)
def test_conversions(isa: str, source: Kind, hidden: int) -> None:
    num_rows = num_rows_for(hidden)
    src = make_rows(source, num_rows, hidden)
    rng = np.random.default_rng(hidden)
    src_row = rng.integers(-1, num_rows, num_rows + 8)
    src_row[3:6] = src_row[2]
    src_row[7:9] = -1
    dst_row = torch.from_numpy(rng.permutation(len(src_row)))
    for target in Kind:
        for options in OPTIONS.values():

            def convert(target: Kind = target, options: cpu.Options = options) -> list[Tensor]:
                dst, memory = empty_rows(target, len(src_row), hidden)
                cpu.convert_rows(src, dst, torch.from_numpy(src_row), dst_row, options)
                whole, whole_memory = empty_rows(target, num_rows, hidden)
                cpu.convert_rows(src, whole, options=options)
                return memory + whole_memory

            same_bits(isa, convert)


@pytest.mark.parametrize("scale_mode", ["floor", "even", "rceil"])
def test_every_fp8_block_under_every_scale(isa: str, scale_mode: str) -> None:
    """Blocks with every largest code and every code below it, under every E8M0 scale."""
    largest = np.arange(128).repeat(4)
    codes = np.minimum(np.arange(128).reshape(4, 32)[None], np.arange(128)[:, None, None]).reshape(-1, 32)
    codes = np.where(codes == 0x7F, 0x7E, codes) | (np.arange(32) % 3 == 0) << 7
    codes[:, 0] = largest
    hidden = codes.size // 32 // 16 * 32
    codes = np.tile(codes.reshape(16, hidden).astype(np.uint8), (256, 1))
    scales = np.arange(256, dtype=np.uint8).repeat(16)[:, None].repeat(hidden // 128, axis=1)
    src = Rows(Kind.FP8_E8M0, torch.from_numpy(codes), torch.from_numpy(scales))

    def convert() -> list[Tensor]:
        dst, memory = empty_rows(Kind.MXFP4, len(src), hidden)
        cpu.convert_rows(src, dst, options=cpu.options(scale_mode))
        return memory

    same_bits(isa, convert)


def test_every_bf16_as_fp8_and_mxfp4(isa: str) -> None:
    """All BF16 numbers that are not the largest of their group, under largest numbers from tiny to huge."""
    bits = np.resize(np.arange(2**16), (2116, 31))
    for exponent in range(0, 255, 14):
        for mantissa in (0, 0x3F, 0x40, 0x60, 0x7F):
            amax = exponent << 7 | mantissa
            below = np.where((bits & 0x7FFF) > amax, bits & 0x807F, bits)
            block = np.concatenate([np.full((len(below), 1), amax), below], axis=1).astype(np.uint16)
            src = Rows(Kind.BF16, torch.from_numpy(block.reshape(-1, 128).view(np.int16)))

            def convert(src: Rows = src) -> list[Tensor]:
                fp4, memory4 = empty_rows(Kind.MXFP4, len(src), 128)
                fp8, memory8 = empty_rows(Kind.FP8_E8M0, len(src), 128)
                cpu.convert_rows(src, fp4)
                cpu.convert_rows(src, fp8)
                return memory4 + memory8

            same_bits(isa, convert)


@pytest.mark.parametrize("hidden", [32, 288, 1184])
@pytest.mark.parametrize("source", Kind)
def test_sums(isa: str, source: Kind, hidden: int) -> None:
    num_rows = num_rows_for(hidden)
    src = make_rows(source, num_rows, hidden, seed=1)
    rng = np.random.default_rng(2)
    terms = torch.from_numpy(rng.integers(-1, num_rows, (40, 5)))
    weights = torch.from_numpy(rng.standard_normal((40, 5)).astype(np.float32))
    for target in Kind:
        for given in (None, weights):
            for options in (OPTIONS["even"], OPTIONS["both"]):

                def add(
                    target: Kind = target, given: Tensor | None = given, options: cpu.Options = options
                ) -> list[Tensor]:
                    dst, memory = empty_rows(target, len(terms), hidden)
                    cpu.sum_rows(src, dst, terms, given, options=options)
                    return memory

                same_bits(isa, add)


@pytest.mark.parametrize("hidden", [32, 288, 1184])
@pytest.mark.parametrize("kind", Kind)
def test_dot_products(isa: str, kind: Kind, hidden: int) -> None:
    a = make_rows(Kind.F32, 48, hidden, seed=3)
    b = make_rows(kind, 48, hidden, seed=4)
    rows = torch.from_numpy(np.random.default_rng(5).integers(-1, 48, 60))
    same_bits(isa, lambda: [cpu.dot_rows(a, b), cpu.dot_rows(b, a, rows, rows.flip(0), OPTIONS["hadamard"])])


@pytest.mark.parametrize("sizes", [(1,), (128, 128), (0, 300, 17, 0, 129), (37, 64, 272)])
@pytest.mark.parametrize("hidden", [32, 96, 160, 512])
@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.FP8, Kind.FP8_E8M0])
def test_columns(isa: str, kind: Kind, hidden: int, sizes: tuple[int, ...]) -> None:
    num_rows = sum(sizes)
    src = make_rows(kind, num_rows, hidden, seed=6)
    if kind != Kind.MXFP4:
        src = powers_of_two(src, seed=7)
    rows = torch.from_numpy(np.random.default_rng(8).integers(-1, num_rows, num_rows))

    def columns() -> list[Tensor]:
        out = [*cpu.fp8_columns(src, None, sizes), *cpu.fp8_columns(src, rows, sizes)]
        if kind == Kind.MXFP4:
            for mode in ("floor", "even", "rceil"):
                out += cpu.mxfp4_columns(src, rows, sizes, cpu.options(mode))
        return out

    same_bits(isa, columns)


@pytest.mark.parametrize("source", Kind)
def test_flush_to_zero_of_the_caller_changes_nothing(isa: str, source: Kind) -> None:
    src = make_rows(source, 48, 160, seed=9)

    def convert() -> list[Tensor]:
        out = []
        for target in Kind:
            dst, memory = empty_rows(target, 48, 160)
            cpu.convert_rows(src, dst)
            out += memory
        return out

    cpu.set_isa(isa)
    expected = convert()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals to zero")
    try:
        got = convert()
        assert (torch.tensor([1e-40]) * 1).item() == 0, "the caller's mode is restored"
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(want, have) for want, have in zip(expected, got, strict=True))
