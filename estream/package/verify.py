"""`verify`: reads every byte of a packed model and names what is damaged."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from estream.errors import PackageError
from estream.package.contexts import ContextManifest, context_folders, damaged_files
from estream.package.files import Progress
from estream.package.manifest import CHECKSUMS, DENSE, POOL, FileEntry, Manifest
from estream.package.reader import Package, Piece
from estream.small_file import open_regular

_CHUNK = 1 << 22


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found. `damaged` names records by panel (`layers.3.experts.17 panel 0`), dense tensors, and files.

    `unreadable` names files that this user may not read: whether they are damaged is not known. `bytes` were read in
    `seconds`.
    """

    path: Path
    damaged: tuple[str, ...]
    files: int
    bytes: int
    seconds: float
    unreadable: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damaged and not self.unreadable

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        lists = {"damaged": list(self.damaged), "unreadable": list(self.unreadable)}
        return asdict(self) | {"path": str(self.path), **lists, "ok": self.ok}


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> VerifyReport:
    """Compares every file of the package with its size, SHA-256 and, by panel and dense tensor, CRC-32; compiled
    contexts with their own manifest.

    `progress(file name, done, total)` is called with bytes of the package.

    Raises:
        PackageError: there is no package, or its model.json is damaged: then nothing can be compared.
    """
    started = time.monotonic()
    folder = Path(path)
    manifest = Manifest.read(folder)
    package = Package(folder, manifest)
    damaged: list[str] = []
    unreadable: list[str] = []
    done, total = 0, sum(entry.bytes for entry in manifest.files.values())

    def step(name: str, nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(name, done, total)

    def check(name: str, pieces: Iterator[Piece] | tuple[()] = ()) -> bool:
        """Whether nothing is wrong with the file."""
        try:
            found = _check(folder, name, manifest.files[name], pieces, step)
        except PermissionError as problem:
            unreadable.append(f"{name}: {problem.strerror}")
            return False
        damaged.extend(found)
        return not found

    # Checksums first: without them damage cannot be located, only seen.
    pieces: dict[str, Iterator[Piece]] = {}
    if check(CHECKSUMS):
        pieces = {POOL: _pool_pieces(package), DENSE: package.dense_pieces()}
    for name in manifest.files:
        if name != CHECKSUMS:
            check(name, pieces.get(name, ()))
    contexts = 0
    for compiled in context_folders(folder):
        try:
            own = ContextManifest.read(compiled)
        except PackageError as problem:
            damaged.append(problem.thing)
            continue
        damaged += damaged_files(compiled, own)
        contexts += 2 * len(own.graphs) + 1
    seconds = time.monotonic() - started
    return VerifyReport(folder, tuple(damaged), len(manifest.files) + contexts, done, seconds, tuple(unreadable))


def _pool_pieces(package: Package) -> Iterator[Piece]:
    pool = package.pool
    for layer in pool.moe_layers:
        for panel in range(pool.panels_per_layer):
            expert, part = divmod(panel, pool.panels_per_expert)
            label = f"layers.{layer}.experts.{expert} panel {part}"
            yield label, pool.panel_offset(layer, panel), pool.panel.panel_bytes, package.checksum(layer, panel)


def _check(
    folder: Path, name: str, entry: FileEntry, pieces: Iterator[Piece] | tuple[()], step: Callable[[str, int], None]
) -> list[str]:
    """What is wrong with one file; empty if nothing is. Raises PermissionError."""
    located = pieces != ()
    try:
        with open(open_regular(folder / name), "rb", buffering=0) as file, ThreadPoolExecutor(max_workers=1) as thread:
            scan = _Scan(file, name, thread, step)
            damaged = [label for label, offset, nbytes, crc in pieces if scan.crc(offset, nbytes) != crc]
            scan.rest()
    except PermissionError:
        raise
    except OSError as problem:
        return [f"{name}: {problem.strerror}"]
    if scan.position != entry.bytes:
        return [f"{name}: {scan.position} bytes instead of {entry.bytes}", *damaged]
    if not damaged and scan.sha256.hexdigest() != entry.sha256:
        return [f"{name}: header or fill" if located else name]
    return damaged


class _Scan:
    """Reads a file once from front to back; SHA-256 of everything, CRC-32 of pieces. Two processors share the work."""

    def __init__(self, file: BinaryIO, name: str, thread: ThreadPoolExecutor, step: Callable[[str, int], None]) -> None:
        self._file, self._name, self._thread, self._step = file, name, thread, step
        self.sha256 = hashlib.sha256()
        self.position = 0

    def crc(self, offset: int, nbytes: int) -> int | None:
        """CRC-32 of a piece at or after the position; None if the file ends before the piece does."""
        self._read(offset - self.position)
        return self._read(nbytes)

    def rest(self) -> None:
        while self._read(_CHUNK) is not None:
            pass

    def _read(self, nbytes: int) -> int | None:
        crc = 0
        while nbytes > 0:
            chunk = self._file.read(min(nbytes, _CHUNK))
            if not chunk:
                return None
            hashed = self._thread.submit(self.sha256.update, chunk)
            crc = zlib.crc32(chunk, crc)
            hashed.result()
            nbytes -= len(chunk)
            self.position += len(chunk)
            self._step(self._name, len(chunk))
        return crc
