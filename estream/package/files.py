"""Writing one file of a package: hashed while it is written, with a safetensors header of known size in front."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from estream.package.dense import PAD, DenseTensor
from estream.package.layout import ALIGNMENT, align
from estream.package.manifest import FileEntry

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all
Entry = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, bytes


def safetensors_header(entries: Iterable[Entry]) -> bytes:
    """The header of a safetensors file that holds `entries` one after the other, padded with spaces to 16 KiB."""
    tensors: dict[str, object] = {}
    offset = 0
    for name, dtype, shape, nbytes in entries:
        tensors[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(tensors, separators=(",", ":")).encode("ascii")
    text = text.ljust(align(8 + len(text)) - 8)
    return len(text).to_bytes(8, "little") + text


def with_fills(tensors: Iterable[DenseTensor]) -> Iterable[Entry]:
    """Tensors that each start on 16 KiB, with the `__pad.N` tensors that fill the gaps and the end."""
    fills = 0
    for tensor in tensors:
        yield tensor.name, tensor.dtype, tensor.shape, tensor.nbytes
        gap = -tensor.nbytes % ALIGNMENT
        if gap:
            yield f"{PAD}{fills}", "U8", (gap,), gap
            fills += 1


class HashedFile:
    """A new file whose SHA-256 is computed as it is written. A thread hashes and writes while the caller goes on.

    At most two pieces wait: memory stays bounded. A piece must not change after `write`.
    Errors of the thread (OSError) are raised by a later `write` or by `finish`.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()
        self.nbytes = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._file.close()

    def write(self, piece: bytes | np.ndarray) -> None:
        """Appends the bytes of `piece` (a C-contiguous array or bytes)."""
        data = memoryview(piece if isinstance(piece, bytes) else piece.data).cast("B")
        self.nbytes += len(data)
        while len(self._pending) >= 2:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._store, data))

    def _store(self, data: memoryview) -> None:
        self._hash.update(data)
        while data:
            data = data[os.write(self._file.fileno(), data) :]

    def finish(self) -> FileEntry:
        """Waits until everything is on the disk."""
        while self._pending:
            self._pending.popleft().result()
        os.fsync(self._file.fileno())
        return FileEntry(self.nbytes, self._hash.hexdigest())
