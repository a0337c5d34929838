"""Writes a float32 matrix into a .npy file block by block, in any order, with flat memory."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from estream.errors import EStreamError


class NpySink:
    """A context manager that is called as `sink(row_start, column_start, block)`, block float32 [rows, width].

    The file appears under its name when the context is left without an error, every cell written; until then it has a
    temporary name beside it.
    Blocks go through pwrite, not through a memory map, whose dirty pages would count as this process's memory.

    Raises:
        OSError: no space, or the folder cannot be written; before the first block.
        EStreamError: cells were left out, or a block lies outside the matrix.
    """

    def __init__(self, path: Path, rows: int, columns: int) -> None:
        self.path = path
        self.rows = rows
        self.columns = columns
        self._missing = rows * columns
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)})
        self._start = header.tell()
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(self._file, 0, self._start + rows * columns * 4)
            _write(self._file, header.getvalue(), 0)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> NpySink:
        return self

    def __call__(self, row_start: int, column_start: int, block: np.ndarray) -> None:
        rows, width = block.shape
        if min(row_start, column_start) < 0 or row_start + rows > self.rows or column_start + width > self.columns:
            raise EStreamError(
                f"{self.path}: a block outside the matrix",
                asked=f"rows {row_start}+{rows}, columns {column_start}+{width}",
                had=f"[{self.rows}, {self.columns}]",
            )
        for row in range(rows):
            offset = self._start + 4 * ((row_start + row) * self.columns + column_start)
            _write(self._file, block[row].astype("<f4").tobytes(), offset)
        self._missing -= rows * width

    def row(self, index: int) -> np.ndarray:
        """One row back, float32 [columns]."""
        raw = os.pread(self._file, 4 * self.columns, self._start + 4 * index * self.columns)
        return np.frombuffer(raw, dtype="<f4")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._discard()
            return
        if self._missing:
            self._discard()
            raise EStreamError(
                f"{self.path}: {self._missing} cells were not written", had=f"[{self.rows}, {self.columns}]"
            )
        os.close(self._file)
        os.replace(self._part, self.path)

    def _discard(self) -> None:
        os.close(self._file)
        self._part.unlink(missing_ok=True)


def _write(file: int, data: bytes, offset: int) -> None:
    """All of `data`: pwrite may write less than asked."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
