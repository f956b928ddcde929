"""Text that every machine has: the sources of the Python standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Not part of every installation, or hardly text: tests, tables of character sets, installed packages.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}
_MIN_BYTES = 1_000_000
_VALIDATION_SHARE = 10  # one file in so many is for validation


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
    def of_standard_library(cls) -> Corpus:
        """Reads the library of the running Python.

        A file goes to validation by a checksum of its name, so its side doesn't depend on which other files there are.

        Raises:
            FileNotFoundError: the library is not there as source files (it may be zipped).
        """
        root = Path(sysconfig.get_path("stdlib"))
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        names = [name for name in names if not _LEFT_OUT & set(name.split("/"))]
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for name in names:
            sides[zlib.crc32(name.encode()) % _VALIDATION_SHARE == 0].append((root / name).read_bytes())
        train, validation = (b"".join(side) for side in sides)
        if min(len(train), _VALIDATION_SHARE * len(validation)) < _MIN_BYTES:
            raise FileNotFoundError(
                f"{root} holds less than {_MIN_BYTES:,} bytes of Python sources; that is what this trains on"
            )
        return cls(_tensor(train), _tensor(validation), len(names), hashlib.sha256(train + validation).hexdigest()[:16])

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows of the training bytes: inputs and targets (the next bytes), int64 `[size, length]`."""
        starts = torch.randint(self.train.numel() - length, (size,), generator=generator)
        return _windows(self.train, starts, length)

    def validation_batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """As `batch`, but the same windows every time, evenly spaced over the validation bytes."""
        starts = torch.linspace(0, self.validation.numel() - length - 1, size, dtype=torch.float64).long()
        return _windows(self.validation, starts, length)

    def entropies(self) -> tuple[float, float]:
        """Nats per validation byte of the best that counting can do: order 0 (frequencies) and order 1 (pairs).

        Counts of the training bytes, plus 0.1 each so that no byte is impossible.
        """
        pairs = _pair_counts(self.train) + 0.1
        seen = _pair_counts(self.validation)
        order_0 = -(seen.sum(0) * np.log(pairs.sum(0) / pairs.sum())).sum() / seen.sum()
        order_1 = -(seen * np.log(pairs / pairs.sum(1, keepdims=True))).sum() / seen.sum()
        return float(order_0), float(order_1)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _pair_counts(text: Tensor) -> np.ndarray:
    data = text.numpy().astype(np.int64)
    return np.bincount(data[:-1] * 256 + data[1:], minlength=65536).reshape(256, 256).astype(np.float64)
