"""The kernels compile for every generation of GPUs, without a warning, as CuPy would compile them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from cuda_emulator.emulator import CSRC, Emulator, Launch, emulated, kernels_of, translate
from cuda_targets import Target, row_bytes
from numerics import SCALE_MODES
from nvrtc_log import compiler_log, missing
from test_cuda_route import received
from test_cuda_rows import FAST_PAIRS, OPTIONS, PAIRS
from test_cuda_sums import SUM_PAIRS, Packing

from fp4comm.backends import Arrivals, PeerRows, Rows, cpu
from fp4comm.errors import InvalidArgument
from fp4comm.formats import Kind
from fp4comm.fp8_rows import FP8Rows
from fp4comm.moe.gemm import BlockGemms, FloatGemms, RowGemms

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
HIDDEN = 7168


class Recorder(Emulator):
    """Launches nothing."""

    def launch(
        self,
        file: str,
        name: str,
        constants: dict[str, int],
        grid: int,
        block: int,
        args: tuple[int, ...],
        shared: int = 0,
        early: bool = False,
    ) -> None:
        self.launches.append(Launch(file, name, tuple(constants.items()), grid, block, shared))


def rows(target: Target, kind: Kind, num_rows: int = 64) -> Rows:
    return Rows(kind, *(torch.zeros((num_rows, n), dtype=torch.uint8) for n in row_bytes(kind, HIDDEN)))


def use_rows(t: Target, fast: bool) -> None:
    """Conversions; in all ways that must be fast, or of all pairs of kinds."""
    index = torch.zeros(64, dtype=torch.int64)
    slots, weights = index.view(8, 8), torch.zeros(64)
    for src, dst in FAST_PAIRS if fast else PAIRS:
        x, out = rows(t, src), rows(t, dst)
        t.backend.convert_rows(x, out, index)
        if fast:
            if src in (Kind.MXFP4, Kind.FP8_E8M0):
                t.backend.expand_rows(rows(t, src, 8), out, index, slots)
            if dst in (Kind.MXFP4, Kind.FP8_E8M0):
                Packing(src, dst, HIDDEN, 64, num_topk=8, capacity=64).pack(t)
    for options in () if fast else (t.backend.options(**chosen) for chosen in OPTIONS.values()):
        t.backend.convert_rows(rows(t, Kind.BF16), rows(t, Kind.MXFP4), options=options)
        t.backend.convert_rows(rows(t, Kind.MXFP4), rows(t, Kind.F32), options=options)
    if fast:
        t.backend.expand_rows(rows(t, Kind.MXFP4, 8), rows(t, Kind.BF16), index, slots, weights)
        Packing(Kind.BF16, Kind.MXFP4, HIDDEN, 64, num_topk=8, index=np.int32, with_routing=False).pack(t)


def use_sums(t: Target, fast: bool) -> None:
    terms, weights = torch.zeros((64, 8), dtype=torch.int64), torch.zeros(64, 8)
    for src, dst in SUM_PAIRS if fast else PAIRS:
        t.backend.sum_rows(rows(t, src), rows(t, dst), terms, weights)
        if not fast:
            t.backend.dot_rows(rows(t, src), rows(t, dst))
    if fast:
        t.backend.sum_rows(rows(t, Kind.BF16), rows(t, Kind.BF16), terms)
        t.backend.dot_rows(rows(t, Kind.BF16), rows(t, Kind.MXFP4))
        t.backend.dot_rows(rows(t, Kind.F32), rows(t, Kind.F32))


def use_columns(t: Target) -> None:
    for kind in (Kind.MXFP4, Kind.FP8, Kind.FP8_E8M0):
        for index in (None, torch.zeros(64, dtype=torch.int64)):
            with contextlib.suppress(InvalidArgument):  # as nothing counts the bad scales
                t.backend.fp8_columns(rows(t, kind), index, (60, 4))
            if kind == Kind.MXFP4:
                t.backend.fp8_rows_and_columns(rows(t, kind), index, (60, 4))
                for mode in SCALE_MODES:
                    t.backend.mxfp4_columns(rows(t, kind), index, (60, 4), t.backend.options(mode))


def use_routing(t: Target) -> None:
    from fp4comm.backends import cuda_route

    for dtype, num_experts in ((torch.int64, 256), (torch.int32, 16384)):
        cuda_route.route(torch.zeros((64, 8), dtype=dtype), num_experts, 8)
        buffer, layout, _ = received(np.random.default_rng(0), np.zeros((64, 8), np.int64))
        cuda_route.read_routing(torch.from_numpy(buffer), layout, 8, num_experts // 8 * 7, 16, 999)
        cuda_route.read_routing(torch.from_numpy(buffer), layout, 8, num_experts // 8 * 7)


def use_gemm_rows(t: Target) -> None:
    """What experts add: rows with one scale each, their columns, and SwiGLU."""
    from fp4comm.moe import cuda_swiglu

    index, slots = torch.zeros(64, dtype=torch.int64), torch.zeros((8, 8), dtype=torch.int64)
    out = FP8Rows.empty(64, HIDDEN)
    of_rows, groups = torch.ones(64), torch.tensor([60, 64], dtype=torch.int32)
    t.backend.expert_scales(of_rows, groups)
    for kind in (Kind.MXFP4, Kind.FP8_E8M0):
        t.backend.expand_rows(rows(t, kind, 8), out._rows, index, slots)
        for most_blocks in (0, 2):
            arriving = rows(t, kind)
            arriving.arrivals = Arrivals(slots, 128, most_blocks)
            t.backend.expand_rows(arriving, out._rows, index, torch.zeros((64, 8), dtype=torch.int64))
    t.backend.gemm_columns(rows(t, Kind.MXFP4, 8), index, of_rows)
    t.backend.gemm_columns(out._rows, None, of_rows, (60, 4))
    for dtype in (torch.bfloat16, torch.float32):
        t.backend.quantize_gemm_rows(torch.zeros((64, HIDDEN), dtype=dtype))
        gate_up, weights = torch.zeros((64, 4096), dtype=dtype), torch.zeros(64)
        for gemms in (FloatGemms(), BlockGemms(), RowGemms()):
            cuda_swiglu.forward(gate_up, weights, gemms)
            for makes_act in (True, False):
                cuda_swiglu.backward(gate_up, weights, gate_up[:, :2048].contiguous(), gemms, makes_act)


def use_peers(t: Target) -> None:
    """Rows that go to the memory of other ranks, and loops that take few multiprocessors."""
    from fp4comm.backends import cuda_peer

    terms = torch.zeros((64, 8), dtype=torch.int64)
    for num_ranks, num_sms in ((2, None), (8, None), (8, 16)):
        for dst in (Kind.MXFP4, Kind.BF16):
            pack_for_peers(t, dst, num_ranks, num_sms)
        for src, dst in ((Kind.BF16, Kind.BF16), (Kind.BF16, Kind.MXFP4)):
            t.backend.convert_rows(rows(t, src), peer_rows(dst, num_ranks, num_sms))
            t.backend.sum_rows(rows(t, src), peer_rows(dst, num_ranks, num_sms), terms)
    for kind in (Kind.MXFP4, Kind.BF16):
        pack_for_peers(t, kind, 2, None, counting_blocks=2)
        for dst in (Kind.FP8, Kind.BF16):
            arriving = rows(t, kind)
            for most_blocks in (0, 2):
                arriving.arrivals = Arrivals(terms, 128, most_blocks)
                t.backend.convert_rows(arriving, rows(t, dst))
                t.backend.expand_rows(arriving, rows(t, dst), terms[0], terms)
    few = rows(t, Kind.BF16)
    few.num_sms = 16
    t.backend.expand_rows(rows(t, Kind.MXFP4, 8), few, terms[0], terms[:8])
    for num_ranks in (2, 8):
        boards, numbers = torch.zeros(num_ranks, dtype=torch.int64), torch.zeros((num_ranks, 3), dtype=torch.int64)
        group = cuda_peer.PeerGroup(boards, 0, boards, boards, 10**9)
        group.open_slot(0)
        group.meet(0)
        group.exchange_numbers([numbers], numbers)
        group.put_slots(torch.zeros(64, 8), peer_rows(Kind.BF16, num_ranks), 0)
        group.await_rows(Arrivals(boards, 8))


def peer_rows(kind: Kind, num_ranks: int, num_sms: int | None = None, counting_blocks: int = 0) -> PeerRows:
    table = torch.zeros(4 * num_ranks + 1, dtype=torch.int64)
    return PeerRows(kind, 64, cpu.row_layout(kind, HIDDEN, 8), table, num_ranks, 64, num_sms, counting_blocks)


def pack_for_peers(t: Target, dst: Kind, num_ranks: int, num_sms: int | None, counting_blocks: int = 0) -> None:
    from fp4comm.backends import cuda_rows

    token_rows = torch.zeros((64, num_ranks), dtype=torch.int64)
    send = peer_rows(dst, num_ranks, num_sms, counting_blocks)
    layout = cpu.row_layout(dst, HIDDEN, 8)
    for capacity in (None, 64) if num_sms is None and not counting_blocks else (None,):
        meta = cuda_rows.Meta(layout, torch.zeros((64, 8), dtype=torch.int64), None, 256, token_rows[0], capacity)
        cuda_rows.pack_tokens(rows(t, Kind.BF16), send, token_rows, meta=meta)


@functools.cache
def recorded() -> tuple[list[Launch], list[Launch]]:
    """One launch of each kind that must be fast; those of all pairs of kinds of rows."""
    found = []
    for fast in (True, False):
        with emulated(Recorder()) as recorder:
            from fp4comm.backends import cuda

            target = Target(cuda, torch.device("cpu"))
            use_rows(target, fast)
            use_sums(target, fast)
            if fast:
                use_columns(target)
                use_routing(target)
                use_gemm_rows(target)
                use_peers(target)
        found.append(list({(launch.file, launch.constants): launch for launch in recorder.launches}.values()))
        names = {(launch.file, launch.name) for launch in recorder.launches}
        if fast:
            assert names == all_kernels()
    return found[0], found[1]


def all_kernels() -> set[tuple[str, str]]:
    return {(path.name, name) for path in (CSRC / "cuda").glob("*.cu") for name in kernels_of(translate(path))}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """Helpers that run `compiler_log`."""
    reason = missing()
    if reason is not None:
        assert not os.environ.get("CI"), f"the kernels can't be compiled: {reason}"
        pytest.skip(reason)
    # NVRTC compiles one program at a time in a process.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield pool


def assert_silent(compiler: ProcessPoolExecutor, launches: list[Launch], architecture: str) -> None:
    """Compiles each specialisation as CuPy does."""
    with emulated():
        from fp4comm.backends import cuda_compile
    added_by_cupy = ("-ftz=true", f"-arch={architecture}", "--device-as-default-execution-space")
    sources = [f'#include "{launch.file}"\n' for launch in launches]
    options = [cuda_compile.options(launch.constants) + added_by_cupy for launch in launches]
    for launch, log in zip(launches, compiler.map(compiler_log, sources, options), strict=True):
        assert not log, f"{launch.file} {dict(launch.constants)} for {architecture}:\n{log}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_must_be_fast(compiler: ProcessPoolExecutor, architecture: str) -> None:
    assert_silent(compiler, recorded()[0], architecture)


def test_every_pair_of_kinds(compiler: ProcessPoolExecutor) -> None:
    """To PTX, which takes less time than machine code."""
    assert_silent(compiler, recorded()[1], "compute_90a")


def test_messages_are_seen(compiler: ProcessPoolExecutor) -> None:
    """The test of the tests."""
    kernel = 'extern "C" __global__ void kernel(int* x) {{ {} }}'
    for statement, message in (("x[0] = 1;", ""), ("int y;", "never referenced"), ("x[0] = z;", "undefined")):
        log = compiler.submit(compiler_log, kernel.format(statement), ("-arch=sm_80",)).result()
        assert message in log if message else not log
    negation = 'extern "C" __global__ void kernel(float* x) { x[0] = -x[0]; }'
    log = compiler.submit(compiler_log, negation, ("-arch=compute_90a", "-ftz=true")).result()
    assert "use sub_rn" in log
