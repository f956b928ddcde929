"""No byte before or behind the arrays is read or written: they end, or begin, at a page without access rights."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from numerics import encode, hard_rows
from numpy.typing import NDArray

from fp4comm import _cpu
from fp4comm.formats import Kind

pytestmark = [
    pytest.mark.usefixtures("isa"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]
PAGE = mmap.PAGESIZE
PROT_NONE = 0  # of mprotect(2)
Array = NDArray[Any]


class Guarded:
    """Copies of arrays that touch a forbidden page, at their end or at their beginning."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.maps: list[mmap.mmap] = []

    def __call__(self, x: Array) -> Array:
        size = -(-x.nbytes // PAGE) * PAGE
        memory = mmap.mmap(-1, size + 2 * PAGE)
        self.maps.append(memory)
        start = PAGE + (size - x.nbytes if self.at_end else 0)
        copy = np.frombuffer(memory, x.dtype, x.size, start).reshape(x.shape)
        copy[:] = x
        libc = ctypes.CDLL(None, use_errno=True)
        first = copy.ctypes.data - start
        for page in (first, first + PAGE + size):
            assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), PROT_NONE) == 0
        return copy


def native(kind: Kind, data: Array, scales: Array | None = None) -> _cpu.Rows:
    factors = (0, 0) if scales is None else (scales.ctypes.data, scales.strides[0])
    return _cpu.Rows(kind, data.ctypes.data, data.strides[0], *factors)


def survives(run: Callable[[], None]) -> None:
    """Runs in a child process, which a stray access ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads; the child starts and joins none
        child = os.fork()
    if child == 0:
        code = 1
        faulthandler.disable()
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "negative: the signal of a stray access"


@pytest.mark.parametrize("at_end", [True, False], ids=["end", "begin"])
@pytest.mark.parametrize("src", Kind, ids=lambda kind: kind.name)
def test_rows(src: Kind, at_end: bool) -> None:
    guarded = Guarded(at_end)
    cases = []
    for dst, hidden, num_rows in product(Kind, (32, 96, 160, 288), (1, 3)):
        rng = np.random.default_rng(hidden)
        x = [guarded(part) for part in hard_rows(rng, src, num_rows, hidden)]
        y = [guarded(part) for part in encode(dst, np.zeros((num_rows, hidden), np.float32))]
        cases.append((native(src, *x), native(dst, *y), num_rows, hidden))
    terms = guarded(np.array([[0, -1, 0]] * 3, np.int64))
    weights = guarded(np.ones((3, 3), np.float32))
    products = guarded(np.zeros(3, np.float32))

    def run() -> None:
        for stochastic, hadamard in product((0, 1), (False, True)):
            options = _cpu.Options(1, stochastic, hadamard, 0, 0)
            for x, y, num_rows, hidden in cases:
                _cpu.convert_rows(x, y, num_rows, hidden, 0, 0, options)
                _cpu.sum_rows(x, y, num_rows, 3, hidden, terms.ctypes.data, weights.ctypes.data, 0, options)
                _cpu.dot_rows(x, y, num_rows, hidden, 0, 0, products.ctypes.data, options)

    survives(run)


@pytest.mark.parametrize("at_end", [True, False], ids=["end", "begin"])
@pytest.mark.parametrize("src", [Kind.MXFP4, Kind.FP8, Kind.FP8_E8M0], ids=lambda kind: kind.name)
def test_columns(src: Kind, at_end: bool) -> None:
    guarded = Guarded(at_end)
    cases = []
    for num_rows, hidden in product((1, 3, 31, 33, 127, 129, 160), (32, 96, 160)):
        x = [guarded(part) for part in hard_rows(np.random.default_rng(hidden), src, num_rows, hidden)]
        sizes = guarded(np.array([num_rows], np.int64))
        data = guarded(np.zeros(num_rows * hidden, np.uint8))
        scales = guarded(np.zeros((-(-num_rows // 128), hidden), np.float32))
        num_blocks = hidden * -(-num_rows // 32)
        packed, packed_scales = guarded(np.zeros(16 * num_blocks, np.uint8)), guarded(np.zeros(num_blocks, np.uint8))
        cases.append((native(src, *x), hidden, sizes, (data, scales), (packed, packed_scales)))

    def run() -> None:
        for x, hidden, sizes, fp8, mxfp4 in cases:
            group = (x, hidden, 0, sizes.ctypes.data, 1)
            _cpu.fp8_columns(*group, *(part.ctypes.data for part in fp8))
            if src == Kind.MXFP4:
                _cpu.mxfp4_columns(*group, *(part.ctypes.data for part in mxfp4), _cpu.Options())

    survives(run)


def test_a_stray_access_is_noticed() -> None:
    """The test of the tests: one row too many must not survive."""
    x = Guarded(True)(np.zeros((2, 64), np.uint16))
    y = np.zeros((3, 64), np.float32)
    with pytest.raises(AssertionError, match="stray access"):
        survives(lambda: _cpu.convert_rows(native(Kind.BF16, x), native(Kind.F32, y), 3, 64, 0, 0, _cpu.Options()))
