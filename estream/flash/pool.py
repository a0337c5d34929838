"""Reading a package's big files: direct I/O where it can be trusted, buffered reads where it cannot."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Protocol

from estream.errors import FlashError
from estream.flash import staging
from estream.flash.staging import Staging
from estream.package.layout import ALIGNMENT

_log = logging.getLogger("estream.flash")
ASKED_FOR = "asked for"  # direct_reason when the caller wanted buffered reads


class Source(Protocol):
    """What lanes read from; PoolFile, or a stand-in with delays and faults."""

    direct: bool
    direct_reason: str | None

    def read_into(self, memory: memoryview, offset: int) -> None: ...

    def check_unchanged(self) -> None: ...


class PoolFile:
    """An open file read in pieces whose offsets and lengths are multiples of 16 KiB; any thread may read.

    `direct`: O_DIRECT is in use; else `direct_reason` says why not. Where memory takes no direct reads they go through
    a buffer: `direct_reason` says so, and `staged_bytes` were copied.
    """

    def __init__(self, path: Path, fd: int, direct: bool, direct_reason: str | None) -> None:
        """Takes over `fd`; use `open`."""
        self.path = path
        self.direct = direct
        self.direct_reason = direct_reason
        self._fd = fd
        self._staging: Staging | None = None
        self._lock = threading.Lock()
        self._identity = _identity(fd)
        self.nbytes = self._identity[2]

    @classmethod
    def open(cls, path: str | os.PathLike[str], direct: bool = True) -> PoolFile:
        """Opens for direct reads if one block read that way equals a buffered read; otherwise for buffered reads, with
        `direct_reason`. Raises FlashError if the file cannot be opened."""
        path = Path(path)
        try:
            buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FlashError(f"cannot open {path}: {error.strerror}") from error
        try:
            fd, reason = _open_direct(path, buffered) if direct else (None, ASKED_FOR)
        except BaseException:
            os.close(buffered)
            raise
        if fd is not None:
            os.close(buffered)
            return cls(path, fd, True, None)
        if hasattr(os, "posix_fadvise"):
            # RANDOM: the kernel then reads exactly the range of each call. Its read-ahead guesses from one position per
            # open file, which Q lanes keep moving, and goes on into panels that are not needed. No DONTNEED after a
            # read: clean pages give way to anything else, and a pool that fits is then read only once.
            with contextlib.suppress(OSError):
                os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_RANDOM)
        return cls(path, buffered, False, reason)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fills `memory` (uint8, a multiple of 16 KiB) from `offset` (likewise). Blocks; releases the GIL.

        Raises FlashError naming file, offset, asked and had for I/O errors and for a file that ends too early.
        """
        wanted = memory.nbytes
        where = f"{self.path} at offset {offset}"
        if self._fd < 0:
            raise FlashError(f"{self.path} is closed")
        if offset % ALIGNMENT or wanted % ALIGNMENT:
            raise FlashError(f"unaligned read of {where}", asked=f"{wanted} bytes", next_step="Align it to 16 KiB.")
        done = 0
        while done < wanted:
            try:
                got = self._read(memory[done:], offset + done)
            except OSError as error:
                raise FlashError(
                    f"reading {where} failed: {error.strerror}",
                    asked=f"{wanted} bytes",
                    had=f"{done} bytes",
                    next_step=self._next_step(error.errno),
                ) from error
            # A direct read may only go on at an aligned offset: the odd bytes of a short one are read again.
            step = got - got % ALIGNMENT if self.direct and done + got < wanted else got
            if step == 0:
                raise FlashError(
                    f"{self.path} ends or was cut short: read at offset {offset}",
                    asked=f"{wanted} bytes",
                    had=f"{done + got} bytes",
                    next_step="Run `estream verify`, then pack or copy the package again.",
                )
            done += step

    @property
    def staged_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.nbytes

    def _read(self, memory: memoryview, offset: int) -> int:
        """Raises OSError."""
        if self._staging is None:
            try:
                return os.preadv(self._fd, [memory], offset)
            except OSError as error:
                if error.errno != errno.EFAULT or not self.direct:
                    raise
            with self._lock:  # lanes that meet it at the same time share one count
                if self._staging is None:
                    self._staging, self.direct_reason = Staging(), staging.REASON
                    _log.warning("%s: %s", self.path, staging.REASON)
        return self._staging.read(self._fd, memory, offset)

    def _next_step(self, code: int | None) -> str:
        if code == errno.EINVAL and self.direct:
            return "This file system may not support direct I/O: try again with --no-direct-io."
        return "The storage may be failing: run `estream verify`, then copy the package to another place."

    def check_unchanged(self) -> None:
        """Raises FlashError if the open file was written to or cut since `open` (device, inode, size, mtime). A file
        renamed over it does no harm: the open one stays as it was."""
        if self._fd < 0:
            raise FlashError(f"{self.path} is closed")
        now = _identity(self._fd)
        if now != self._identity:
            names = ("device", "inode", "size", "mtime")
            changed = [i for i in range(4) if now[i] != self._identity[i]]
            raise FlashError(
                f"{self.path} changed while it was open: {', '.join(names[i] for i in changed)}",
                asked=[self._identity[i] for i in changed],
                had=[now[i] for i in changed],
                next_step="Open the package again.",
            )

    def close(self) -> None:
        """Closes the file, after the last read has returned. Twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> PoolFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _identity(fd: int) -> tuple[int, int, int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _open_direct(path: Path, buffered: int) -> tuple[int | None, str | None]:
    """A descriptor that passed the comparison, or None and the reason. Some FUSE file systems accept O_DIRECT and then
    answer EINVAL, or wrong bytes."""
    if not hasattr(os, "O_DIRECT"):
        return None, "this system has no O_DIRECT"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        return None, f"opening with O_DIRECT failed: {error.strerror}"
    reason: str | None = "interrupted"
    try:
        reason = _compare(fd, buffered)
    except OSError as error:
        reason = f"a direct read failed: {error.strerror}"
    finally:
        if reason is not None:
            os.close(fd)
    return (fd, None) if reason is None else (None, reason)


def _compare(fd: int, buffered: int) -> str | None:
    """None if one direct block equals the buffered one, else what differs. The block is the first of the data."""
    size = os.fstat(buffered).st_size
    offset = ALIGNMENT if size >= 2 * ALIGNMENT else 0
    wanted = min(ALIGNMENT, size - offset)
    expected = os.pread(buffered, wanted, offset)
    with mmap.mmap(-1, ALIGNMENT) as block:  # page-aligned
        block[:wanted] = bytes(255 - byte for byte in expected)  # a read that does nothing must not look right
        memory = memoryview(block)
        try:
            got = os.preadv(fd, [memory], offset)
        finally:
            memory.release()
        if got < wanted:
            return f"a direct read gave {got} of {wanted} bytes"
        if block[:wanted] != expected:
            return "a direct read gave other bytes than a buffered read"
    return None
