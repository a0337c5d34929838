"""The embedding table: read by row, through one file that stays open.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from types import TracebackType

import numpy as np

from estream.errors import PackageError, PromptError
from estream.package.dense import DenseTensor
from estream.package.layout import DTYPES

_PIECE_BYTES = 4 << 20
Identity = tuple[int, int, int, int]


def identity(stat: os.stat_result) -> Identity:
    """What tells a file from another one and from itself after a write: device, inode, size, mtime."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class Embedding:
    """Rows of `tensor` [V, H] in the file `path`. The open file goes on when its name is removed or replaced.

    Raises PackageError if the file cannot be opened.
    """

    def __init__(self, path: Path, tensor: DenseTensor) -> None:
        self._path, self._tensor = path, tensor
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._identity = identity(os.fstat(self._fd))
        except OSError as problem:
            raise PackageError(f"{path}: cannot be opened: {problem.strerror}") from problem

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Embeddings float32 [N, H] of token ids [N]; each distinct row is read once.

        Raises:
            PromptError: an id outside the vocabulary.
            PackageError: the file was written to since it was opened, ends early, or cannot be read.
        """
        vocab, hidden = self._tensor.shape
        distinct, inverse = np.unique(np.asarray(ids, dtype=np.int64), return_inverse=True)
        if len(distinct) and (distinct[0] < 0 or distinct[-1] >= vocab):
            bad = distinct[0] if distinct[0] < 0 else distinct[-1]
            raise PromptError("token id outside the vocabulary", asked=int(bad), had=f"0 to {vocab - 1}")
        rows = np.empty((len(distinct), hidden), dtype=DTYPES[self._tensor.dtype])
        if self._fd < 0:
            raise PackageError(f"{self._path} is closed")
        try:
            if identity(os.fstat(self._fd)) != self._identity:
                raise PackageError(f"{self._path} changed while it was open", next_step="Open the package again")
            for row, index in zip(rows, distinct, strict=True):
                self._read(memoryview(row).cast("B"), int(index))
        except OSError as problem:
            raise PackageError(
                f"{self._path}: reading an embedding row failed: {problem.strerror}",
                next_step="The storage may be failing: run `estream verify`, then copy the package to another place",
            ) from problem
        return rows.astype(np.float32)[inverse.reshape(-1)]

    def check(self, expected: int) -> None:
        """Reads the whole table. Raises PackageError if its CRC-32 is not the expected one."""
        crc, position, end = 0, self._tensor.offset, self._tensor.offset + self._tensor.nbytes
        while position < end:
            try:
                piece = os.pread(self._fd, min(_PIECE_BYTES, end - position), position)
            except OSError as problem:
                raise PackageError(f"{self._path}: cannot be read: {problem.strerror}") from problem
            if not piece:
                break
            crc, position = zlib.crc32(piece, crc), position + len(piece)
        if crc != expected:
            raise PackageError(
                f"{self._path}: {self._tensor.name}: the bytes read are not those that were packed",
                asked=f"CRC-32 {expected:08x}",
                had=f"{crc:08x}",
                next_step="Run `estream verify` to see whether the file or the reading is at fault.",
            )

    def _read(self, row: memoryview, index: int) -> None:
        offset, done = self._tensor.offset + index * row.nbytes, 0
        while done < row.nbytes:
            got = os.preadv(self._fd, [row[done:]], offset + done)
            if got == 0:
                raise PackageError(
                    f"{self._path}: ends within embedding row {index}",
                    asked=row.nbytes,
                    had=done,
                    next_step="Copy the package again, or check it with estream verify",
                )
            done += got

    def close(self) -> None:
        """Twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Embedding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
