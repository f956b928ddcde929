"""Text that every machine has: sources of the Python standard library or of all installed packages, as bytes."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Not part of every installation, or hardly text: tests, tables of character sets, installed packages.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}
_PACKAGES = ("site-packages", "dist-packages")
_SUFFIXES = (".py", ".pyi", ".pyx", ".pxd", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
_MIN_BYTES = 1_000_000
_MAX_BYTES = 200_000_000
_MAX_FILE_BYTES = 1_000_000  # what is larger is a table rather than text
_VALIDATION_SHARE = 10  # one file in so many is for validation
_READERS = 16  # threads: a disk that is slow to answer is asked for many files at once
_COUNTED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to validate on.

    Attributes:
        train: uint8 `[num_bytes]`.
        validation: uint8, from other files.
        num_files: files read.
        digest: of all bytes, to tell whether two machines have trained on the same text.
    """

    train: Tensor
    validation: Tensor
    num_files: int
    digest: str

    @classmethod
    def of(cls, text: str) -> Corpus:
        """That of the name `text`, a key of `TEXTS`."""
        return TEXTS[text]()

    @classmethod
    def of_standard_library(cls) -> Corpus:
        """Reads the library of the running Python.

        A file goes to validation by a checksum of its name, so its side doesn't depend on which other files there are.

        Raises:
            FileNotFoundError: the library is not there as source files (it may be zipped).
        """
        root = Path(sysconfig.get_path("stdlib"))
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        names = [name for name in names if not _LEFT_OUT & set(name.split("/"))]
        return cls._of_files(((name, (root / name).read_bytes()) for name in names), f"{root} holds")

    @classmethod
    def of_installed_packages(cls, max_bytes: int = _MAX_BYTES) -> Corpus:
        """Reads code and text of the standard library and of all packages that can be imported, each content once.

        Files come in the order of a checksum of their names: where there is more than `max_bytes`, what is left out is
        a fair sample. One file in ten goes to validation by its name, as in `of_standard_library`.

        Raises:
            FileNotFoundError: there are hardly any source files.
        """
        return cls._of_files(_once(_read(_choose(_installed_files(), max_bytes))), "the installed packages hold")

    @classmethod
    def _of_files(cls, files: Iterable[tuple[str, bytes]], source: str) -> Corpus:
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for name, content in files:
            sides[_checksum(name) % _VALIDATION_SHARE == 0].append(content)
        train, validation = (b"".join(side) for side in sides)
        if min(len(train), _VALIDATION_SHARE * len(validation)) < _MIN_BYTES:
            raise FileNotFoundError(f"{source} less than {_MIN_BYTES:,} bytes of sources; that is what this trains on")
        digest = hashlib.sha256(train)
        digest.update(validation)
        num_files = len(sides[0]) + len(sides[1])
        return cls(_tensor(train), _tensor(validation), num_files, digest.hexdigest()[:16])

    def to(self, device: torch.device) -> Corpus:
        """The same bytes on a device."""
        return replace(self, train=self.train.to(device), validation=self.validation.to(device))

    def starts(self, num_steps: int, size: int, length: int, generator: torch.Generator) -> Tensor:
        """Where the windows of all steps begin in the training bytes, int64 `[num_steps, size]`, on the CPU."""
        last = self.train.numel() - length
        return torch.stack([torch.randint(last, (size,), generator=generator) for _ in range(num_steps)])

    def batch(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Windows of the training bytes: inputs and targets (the next bytes), int64 `[len(starts), length]`."""
        return _windows(self.train, starts, length)

    def validation_batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """As `batch`, but the same windows every time, evenly spaced over the validation bytes."""
        starts = torch.linspace(0, self.validation.numel() - length - 1, size, dtype=torch.float64).long()
        return _windows(self.validation, starts.to(self.validation.device), length)

    def entropies(self) -> tuple[float, float]:
        """Nats per validation byte of the best that counting can do: order 0 (frequencies) and order 1 (pairs).

        Counts of the training bytes, plus 0.1 each so that no byte is impossible.
        """
        pairs = _pair_counts(self.train) + 0.1
        seen = _pair_counts(self.validation)
        order_0 = -(seen.sum(0) * np.log(pairs.sum(0) / pairs.sum())).sum() / seen.sum()
        order_1 = -(seen * np.log(pairs / pairs.sum(1, keepdims=True))).sum() / seen.sum()
        return float(order_0), float(order_1)


TEXTS = {"stdlib": Corpus.of_standard_library, "packages": Corpus.of_installed_packages}


def _checksum(name: str) -> int:
    return zlib.crc32(name.encode(errors="surrogateescape"))


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(length + 1, device=text.device)].long()
    return windows[:, :-1], windows[:, 1:]


def _pair_counts(text: Tensor) -> np.ndarray:
    data = text.numpy()
    counts = np.zeros(65536, dtype=np.int64)
    for start in range(0, len(data) - 1, _COUNTED_AT_ONCE):
        part = data[start : start + _COUNTED_AT_ONCE + 1].astype(np.int64)
        counts += np.bincount(part[:-1] * 256 + part[1:], minlength=65536)
    return counts.reshape(256, 256).astype(np.float64)


def _installed_files() -> dict[str, tuple[str, int]]:
    """Path and size of each text file by its name below the folder of packages; of two with one name, the first."""
    roots = [sysconfig.get_path("stdlib"), *(path for path in sys.path if Path(path).name in _PACKAGES)]
    found: dict[str, tuple[str, int]] = {}
    for root in dict.fromkeys(roots):
        for entry in _text_files(root):
            found.setdefault(os.path.relpath(entry.path, root), (entry.path, entry.stat().st_size))
    return found


def _text_files(folder: str) -> Iterator[os.DirEntry[str]]:
    """Those below a folder, without the folders of packages in it and without links to folders."""
    try:
        entries = list(os.scandir(folder))
    except OSError:  # this user may not look
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _PACKAGES:
                yield from _text_files(entry.path)
        elif entry.name.endswith(_SUFFIXES) and entry.is_file():
            yield entry


def _choose(files: dict[str, tuple[str, int]], max_bytes: int) -> Iterator[tuple[str, str]]:
    """Names and paths, by checksum, until there are `max_bytes`."""
    total = 0
    for name in sorted(files, key=lambda name: (_checksum(name), name)):
        path, size = files[name]
        if 0 < size <= _MAX_FILE_BYTES:
            total += size
            if total > max_bytes:
                return
            yield name, path


def _read(files: Iterable[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
    names, paths = [], []
    for name, path in files:
        names.append(name)
        paths.append(path)
    with ThreadPoolExecutor(_READERS) as readers:
        yield from zip(names, readers.map(_content, paths), strict=True)


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # this user may not read it
        return b""


def _once(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Without files whose content has come before."""
    seen = set()
    for name, content in files:
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield name, content
