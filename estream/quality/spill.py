"""One run's logits on disk, until another's are compared with them."""

from __future__ import annotations

import os
import shutil
import tempfile
from types import TracebackType

import numpy as np

from estream.errors import EStreamError
from estream.units import format_bytes


class Spill:
    """float32 [rows, columns] in a temporary file without a name, gone with the process. A context manager.

    Written and read by pwrite and pread: a memory map's pages would count as this process's memory. Raises EStreamError
    where the folder for temporary files has no room.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._columns, folder = columns, tempfile.gettempdir()
        nbytes = rows * columns * 4
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 -- `close` closes it
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(nbytes, 1))
        except OSError as error:
            self.close()
            raise EStreamError(
                f"{folder} has no room for the logits of one run: {error.strerror}",
                asked=format_bytes(nbytes),
                had=f"{format_bytes(shutil.disk_usage(folder).free)} free",
                next_step="Give a smaller --limit, or name a larger disk in $TMPDIR",
            ) from error

    def write(self, row: int, column: int, block: np.ndarray) -> None:
        """block: float32 [rows, width]."""
        for index, values in enumerate(block):
            raw = values.astype("<f4").tobytes()
            if os.pwrite(self._file.fileno(), raw, self._offset(row + index, column)) != len(raw):
                raise EStreamError("logits could not be written to the temporary file", asked=f"{len(raw)} bytes")

    def read(self, row: int, column: int, rows: int, width: int) -> np.ndarray:
        """What was written there, float32 [rows, width]."""
        file, nbytes = self._file.fileno(), width * 4
        raw = b"".join(os.pread(file, nbytes, self._offset(row + index, column)) for index in range(rows))
        return np.frombuffer(raw, "<f4").reshape(rows, width)

    def _offset(self, row: int, column: int) -> int:
        return 4 * (row * self._columns + column)

    def close(self) -> None:
        """Gives the room back. Twice is harmless."""
        self._file.close()

    def __enter__(self) -> Spill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
