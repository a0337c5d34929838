"""Writes a float32 matrix into a .npy file block by block, in any order, with flat memory."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from estream.errors import EStreamError
from estream.whole_file import WholeFile


class NpySink:
    """A context manager that is called as `sink(row_start, column_start, block)`, block float32 [rows, width].

    The file appears under its name when the context is left without an error, every cell written; until then it has a
    temporary name beside it.
    Blocks go through pwrite, not through a memory map, whose dirty pages would count as this process's memory.

    Raises:
        OSError: no space, or the folder cannot be written; before the first block. It names `path`.
        UsageError: there is something else than a regular file.
        EStreamError: cells were left out, or a block lies outside the matrix.
    """

    def __init__(self, path: Path, rows: int, columns: int) -> None:
        self.path = path
        self.rows = rows
        self.columns = columns
        self._missing = rows * columns
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)})
        self._start = header.tell()
        self._output = WholeFile(path)
        try:
            with self._output.errors():
                os.posix_fallocate(self._output.file, 0, self._start + rows * columns * 4)
            self._output.write(header.getvalue())
        except BaseException:
            self._output.discard()
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
            self._output.write(block[row].astype("<f4").tobytes(), offset)
        self._missing -= rows * width

    def row(self, index: int) -> np.ndarray:
        """One row back, float32 [columns]."""
        raw = os.pread(self._output.file, 4 * self.columns, self._start + 4 * index * self.columns)
        return np.frombuffer(raw, dtype="<f4")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._output.discard()
            return
        if self._missing:
            self._output.discard()
            raise EStreamError(
                f"{self.path}: {self._missing} cells were not written", had=f"[{self.rows}, {self.columns}]"
            )
        self._output.commit()
