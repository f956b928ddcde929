"""CUDA kernels on the CPU: the sources of `csrc/cuda`, compiled as C++ with `emulator.h`, run on CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
RUNTIME = ("emulator.h", "intrinsics.h", "emulator.cpp")
KEEP_SECS = 7 * 24 * 3600
MAX_SHARED_BYTES = 48 << 10  # more needs an attribute of the kernel
FLAGS = (
    "-O1",
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",
)
GCC_FLAGS = ("-fno-gnu-unique", "-ftrivial-auto-var-init=pattern")

_torch_empty = torch.empty
_KERNEL = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*|ROW_BOUNDS\s+)?(\w+)\s*\(([^)]*)\)"
)
_ALIGNAS = r"(?P<align{n}>(?:alignas|__align__)\s*\([^)]*\)\s*)?"
_SHARED = re.compile(
    _ALIGNAS.format(n=1)
    + r"(?P<storage>static\s+|extern\s+)?__shared__\s+"
    + _ALIGNAS.format(n=2)
    + r"(?P<rest>[^;]+);"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Subnormals survive in these three, as in the PTX that they are on a device.
_KEEPS_SUBNORMALS = {
    "return a * b;": "return fp4comm_emulator::mul_rn(a, b);",
    "return a + b;": "return fp4comm_emulator::add_rn(a, b);",
    "return a - b;": "return fp4comm_emulator::sub_rn(a, b);",
}


class EmulatorError(AssertionError):
    """A kernel did what a device does not allow."""


Constants = tuple[tuple[str, int], ...]


@functools.cache
def compiler() -> str | None:
    """The C++ compiler: $CXX, or what the machine has."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


@functools.cache
def flags() -> tuple[str, ...]:
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    return FLAGS if "clang" in version else FLAGS + GCC_FLAGS


def _declare_shared(match: re.Match[str]) -> str:
    """Shared memory is static, filled with a pattern by the first thread of each block that declares it."""
    alignment = match["align1"] or match["align2"] or ""
    rest = match["rest"]
    name = re.sub(r"\[[^\]]*\]|\s+$", "", rest).split()[-1]
    assert not set("=,") & set(re.sub(r"<[^>]*>", "", rest)), f"one shared array at a time: {match[0]}"
    if match["storage"] and match["storage"].startswith("extern"):
        kind = rest[: rest.rindex(name)].strip()
        return f"{kind}* const {name} = static_cast<{kind}*>(fp4comm_emulator::dynamic_shared());"
    fresh = f"static uint64_t {name}_epoch; fp4comm_emulator::fresh(&{name}, sizeof {name}, &{name}_epoch);"
    return f"{alignment} static {rest}; {fresh}"


def translate(path: Path) -> str:
    """A source with shared memory as C++ knows it. Lines keep their numbers."""
    text = _COMMENT.sub(lambda match: "\n" * match[0].count("\n") or " ", path.read_text())
    if path.name == "macros.h":
        for plain, kept in _KEEPS_SUBNORMALS.items():
            assert text.count(plain) == 1, f"macros.h has another {plain!r}"
            text = text.replace(plain, kept)
    text = _SHARED.sub(_declare_shared, text)
    assert "__shared__" not in text, f"{path.name}: cannot translate {text[text.index('__shared__') :][:80]!r}"
    return f'#line 1 "{path}"\n{text}'


def sources_of(file: str, csrc: Path = CSRC) -> dict[str, str]:
    """Translated text of a source and of all that it includes, by path relative to `csrc`."""
    found: dict[str, str] = {}
    queue = [csrc / "cuda" / file]
    while queue:
        path = queue.pop()
        name = str(path.relative_to(csrc))
        if name in found:
            continue
        found[name] = translate(path)
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', found[name], re.MULTILINE):
            places = (path.parent / included, csrc / "cuda" / included, csrc / "include" / included)
            queue.append(next(place for place in places if place.exists()))
    return found


def kernels_of(text: str) -> dict[str, int]:
    """Kernels defined in a source and how many arguments they take, all of them pointers or int64."""
    kernels = {}
    for name, arguments in _KERNEL.findall(text):
        kinds = [argument for argument in arguments.split(",") if argument.strip()]
        assert all("*" in kind or re.search(r"\bu?int64_t\b", kind) for kind in kinds), f"{name}({arguments})"
        kernels[name] = len(kinds)
    return kernels


@functools.cache
def _forget_old(folder: Path) -> None:
    """Removes what no run has used for a while."""
    for path in folder.iterdir():
        if path.suffix == ".so" and path.stat().st_mtime < time.time() - KEEP_SECS:
            path.unlink(missing_ok=True)


def _cached(name: str, parts: object, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes, kept in a temporary folder for as long as `parts` stay the same."""
    folder = Path(tempfile.gettempdir(), f"fp4comm-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    _forget_old(folder)
    stem, suffix = name.split(".")
    digest = hashlib.sha256(repr((compiler(), flags(), parts)).encode()).hexdigest()[:24]
    path = folder / f"{stem}-{digest}.{suffix}"
    # ranks need the same at the same time: one of them makes it
    with Path(folder, f"lock-{digest[:2]}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            path.touch()
        else:
            with tempfile.TemporaryDirectory(dir=folder) as work:
                make(Path(work, "made"))
                os.replace(Path(work, "made"), path)
    return path


def _run(what: str, *command: object) -> None:
    result = subprocess.run([str(compiler()), *map(str, command)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise EmulatorError(f"{what}:\n{result.stderr[:8000]}")


@functools.cache
def runtime() -> Path:
    """The library that all kernels share."""
    parts = [(HERE / name).read_text() for name in RUNTIME]
    options = ("-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared")
    return _cached("emulator.so", parts, lambda made: _run("emulator", *options, HERE / "emulator.cpp", "-o", made))


def build(file: str, constants: Constants, csrc: Path = CSRC) -> Path:
    """The shared library of a source with these macros."""
    sources = sources_of(file, csrc)
    macros = [f"-D{name}={value}" for name, value in constants]
    what = f"{file} {dict(constants)}"

    def make(made: Path) -> None:
        work = made.parent
        for name, text in sources.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(text)
        includes = [f"-I{work}/include", f"-I{work}/cuda", f"-I{HERE}"]
        source = ["-include", "emulator.h", "-x", "c++", work / "cuda" / file]
        compiled = work / "kernel.o"
        _run(what, *flags(), "-DFP4COMM_EMULATOR", *macros, *includes, *source, "-c", "-o", compiled)
        _run(what, "-shared", compiled, runtime(), "-o", made)

    return _cached(f"{Path(file).stem}.so", (file, macros, sources, str(runtime())), make)


class GuardedMemory:
    """Takes the place of `torch.empty`: fills tensors with a pattern, and knows when a kernel writes beside them."""

    SIZE = 64
    PATTERN = 0xA5

    def __init__(self) -> None:
        self._recent: deque[NDArray[np.uint8]] = deque(maxlen=100)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        plain = _torch_empty(*args, **options)
        if plain.device.type != "cpu" or options.keys() - {"dtype", "device"}:
            return plain
        memory = _torch_empty(plain.nbytes + 2 * self.SIZE, dtype=torch.uint8).fill_(self.PATTERN)
        self._recent.append(memory.numpy())
        return memory[self.SIZE : self.SIZE + plain.nbytes].view(plain.dtype).view(plain.shape)

    def check(self) -> bool:
        """Whether what lies around the tensors is as it was; forgets them if not."""
        guards = [part for x in list(self._recent) for part in (x[: self.SIZE], x[-self.SIZE :])]
        if all((part == self.PATTERN).all() for part in guards):
            return True
        self._recent.clear()
        return False


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    file: str
    name: str
    constants: Constants
    grid: int
    block: int
    shared: int


@dataclass
class Emulator:
    """Takes the place of `cuda_compile.launch`.

    Attributes:
        csrc: where the sources lie.
        backwards: whether the last block runs first; None = now so, now so.
        memory: makes tensors, of `torch.empty`.
        launches: what was launched so far.
    """

    csrc: Path = CSRC
    backwards: bool | None = None
    launches: list[Launch] = field(default_factory=list)
    memory: GuardedMemory = field(default_factory=GuardedMemory)
    _prepared: list[Launch] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

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
        """As `cuda_compile.launch`.

        Raises:
            EmulatorError: the geometry or the arguments are wrong, or a kernel did what is undefined on a device.
        """
        if grid == 0:
            return
        if not (0 < grid < 2**31 and 0 < block <= 1024 and 0 <= shared <= MAX_SHARED_BYTES):
            raise EmulatorError(f"{name}: grid {grid}, block {block}, {shared} bytes of shared memory")
        num_args = _num_args(file, self.csrc).get(name)
        if num_args != len(args):
            raise EmulatorError(f"{name} of {file} takes {num_args} arguments (None: no such kernel), not {len(args)}")
        if not all(type(arg) is int and -(2**63) <= arg < 2**64 for arg in args):
            raise EmulatorError(f"{name}: arguments are integers of 64 bits, not {args}")
        key = tuple(constants.items())
        launch = Launch(file, name, key, grid, block, shared)
        if self._prepared is not None:
            self._prepared.append(launch)
            return
        with self._lock:
            self.launches.append(launch)
            kernel = ctypes.cast(getattr(_library(file, key, self.csrc), name), ctypes.c_void_p)
            run = ctypes.CDLL(str(runtime())).fp4comm_emulator_run
            run.restype = ctypes.c_char_p
            values = (ctypes.c_uint64 * max(len(args), 1))(*(arg % 2**64 for arg in args))
            backwards = self._random.random() < 0.5 if self.backwards is None else self.backwards
            sizes = map(ctypes.c_int64, (len(args), shared, backwards))
            error = run(kernel, ctypes.c_int64(grid), ctypes.c_int64(block), values, *sizes)
        if error:
            raise EmulatorError(f"{name} of {file} {constants}: {error.decode()}")
        if not self.memory.check():
            raise EmulatorError(f"{name} of {file} {constants} has written beside a tensor")

    def record(self, call: Callable[[], object]) -> list[Launch]:
        """What `call` would launch."""
        launches: list[Launch] = []
        self._prepared = launches
        try:
            call()
        finally:
            self._prepared = None
        return launches

    def prepare(self, calls: Iterable[Callable[[], object]]) -> None:
        """Compiles what the calls will launch, as much at a time as there are processors."""
        needed = {(launch.file, launch.constants) for call in calls for launch in self.record(call)}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda key: build(key[0], key[1], self.csrc), sorted(needed)))


@functools.cache
def _library(file: str, constants: Constants, csrc: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(file, constants, csrc)))


@functools.cache
def _num_args(file: str, csrc: Path) -> dict[str, int]:
    """Kernels of a source and of what it includes, and their number of arguments."""
    kernels: dict[str, int] = {}
    for text in sources_of(file, csrc).values():
        kernels |= kernels_of(text)
    return kernels


def _import_cuda_compile() -> types.ModuleType:
    """`fp4comm.backends.cuda_compile`, for which CuPy need not be installed as long as nothing is launched by it."""
    try:
        from fp4comm.backends import cuda_compile
    except ImportError:
        with mock.patch.dict(sys.modules, {"cupy": types.ModuleType("cupy")}):
            cuda_compile = importlib.import_module("fp4comm.backends.cuda_compile")
        sys.modules[cuda_compile.__name__] = cuda_compile
    return cuda_compile


@contextlib.contextmanager
def emulated(emulator: Emulator | None = None) -> Iterator[Emulator]:
    """Meanwhile the functions of `fp4comm.backends.cuda_*` take CPU tensors and launch their kernels in an emulator."""
    emulator = emulator or Emulator()
    cuda_compile = _import_cuda_compile()

    with (
        mock.patch.object(cuda_compile, "launch", emulator.launch),
        mock.patch.object(torch, "empty", emulator.memory.empty),
    ):
        yield emulator
