"""adb's file sync: what `adb push` and `adb pull` speak."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tests.device.wire import Closed, Stream

_REQUEST = struct.Struct("<4sI")  # name, and mostly the bytes of what follows
_STAT_1 = struct.Struct("<3I")  # mode, size, time of change
_STAT_2 = struct.Struct("<IQQ4IQ3q")  # errno, device, inode, mode, links, user, group, size, three times
_CHUNK = 1 << 16


class Broken(Closed):
    """The connection is to break here."""


@dataclass
class Sync:
    """One sync stream.

    sent: called with path and bytes as a push ends, complete or not. breaks: whether the connection breaks after so
    many bytes of a push.
    """

    stream: Stream
    sent: Callable[[str, int], None]
    breaks: Callable[[int], bool]

    def run(self) -> None:
        """Until QUIT, or the client is gone."""
        try:
            while True:
                name, count = _REQUEST.unpack(self.stream.read(_REQUEST.size))
                path = self.stream.read(count).decode(errors="surrogateescape")
                if name == b"QUIT":
                    break
                if name == b"STAT":
                    self.stream.write(name + _stat_1(path))
                elif name in (b"STA2", b"LST2"):
                    self.stream.write(name + _stat_2(path, follow=name == b"STA2"))
                elif name in (b"LIST", b"LIS2"):
                    self._list(name, path)
                elif name == b"SEND":
                    self._receive_file(path)
                elif name == b"RECV":
                    self._send_file(path)
                else:
                    self._fail(f"unknown request {name!r}")
                    break
            self.stream.close()
        except Broken:
            self.stream.connection.drop()
        except Closed:
            pass

    def _fail(self, message: str) -> None:
        data = message.encode()
        self.stream.write(_REQUEST.pack(b"FAIL", len(data)) + data)

    def _list(self, name: bytes, path: str) -> None:
        entry, answer = (b"DENT", _stat_1) if name == b"LIST" else (b"DNT2", _stat_2)
        with suppress(OSError):  # as adbd: what cannot be read is empty
            for child in sorted(os.listdir(path)):
                text = os.fsencode(child)
                status = answer(os.path.join(path, child))
                self.stream.write(entry + status + struct.pack("<I", len(text)) + text)
        size = (_STAT_1 if name == b"LIST" else _STAT_2).size
        self.stream.write(b"DONE" + bytes(size + 4))

    def _receive_file(self, request: str) -> None:
        path, _, mode = request.rpartition(",")
        failure, file, count = "", -1, 0
        try:
            try:
                file = _create(path)
            except OSError as error:
                failure = f"couldn't create file: {error.strerror}"
            while True:
                name, length = _REQUEST.unpack(self.stream.read(_REQUEST.size))
                if name != b"DATA":
                    break  # DONE; `length` is the time of change
                data = self.stream.read(length)
                if not failure:
                    try:
                        _write(file, data)
                    except OSError as error:
                        failure = f"write failed: {error.strerror}"
                count += length
                if self.breaks(count):
                    raise Broken
            if not failure:
                os.fchmod(file, _widened(int(mode)))
                os.utime(file, (length, length))
        except Closed:
            failure = "the connection was closed"
            raise
        finally:
            self.sent(path, count)
            if file >= 0:
                os.close(file)
                if failure:  # as adbd: nothing is left of a push that failed
                    os.unlink(path)
        if failure:
            self._fail(failure)
        else:
            self.stream.write(_REQUEST.pack(b"OKAY", 0))

    def _send_file(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                while data := file.read(_CHUNK):
                    self.stream.write(_REQUEST.pack(b"DATA", len(data)) + data)
        except OSError as error:
            self._fail(f"open failed: {error.strerror}")
        else:
            self.stream.write(_REQUEST.pack(b"DONE", 0))


def _stat_1(path: str) -> bytes:
    try:
        found = os.lstat(path)
    except OSError:
        return bytes(_STAT_1.size)
    return _STAT_1.pack(found.st_mode, found.st_size & 0xFFFFFFFF, int(found.st_mtime))


def _stat_2(path: str, *, follow: bool = False) -> bytes:
    try:
        found = os.stat(path, follow_symlinks=follow)
    except OSError as error:
        return _STAT_2.pack(error.errno or 0, *[0] * 10)
    times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
    owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid)
    return _STAT_2.pack(0, found.st_dev, found.st_ino, *owner, found.st_size, *times)


def _create(path: str) -> int:
    """As adbd: folders are made, and an old file is removed, not written over."""
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _widened(mode: int) -> int:
    """As adbd: what the owner may do, all may."""
    owner = mode & 0o700
    return owner | owner >> 3 | owner >> 6
