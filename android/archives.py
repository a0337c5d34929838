"""Reads what users download: an .aar (a zip) and a .deb (an ar archive of two tar archives).

Nothing is written to disk, so no member can land anywhere; names that lead out of the archive are refused all the same.
"""

from __future__ import annotations

import io
import lzma
import posixpath
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from android.problems import DAMAGED, BundleError
from estream.units import format_bytes

MEMBERS = 100_000  # of one archive
MEMBER_BYTES = 1 << 30  # of one file in it
TOTAL_BYTES = 4 << 30  # of all that is unpacked from it
TERMUX = "data/data/com.termux/files/usr"  # where Termux's packages put everything
_LINKS = 16  # symbolic links in a row
_CONTROL_BYTES = 1 << 20

Read = Callable[[], bytes]


@dataclass(frozen=True)
class Contents:
    """Files by path, each with what reads it; symbolic links by path, each with the path that it leads to."""

    source: Path
    files: Mapping[str, Read]
    links: Mapping[str, str] = field(default_factory=dict)

    def find(self, path: str) -> Read | None:
        """What reads this file, or the file that a link of this name leads to; None if there is none.

        Raises BundleError for links that lead out of the archive, or in a circle.
        """
        at = path
        for _ in range(_LINKS):
            if at in self.files:
                return self.files[at]
            if at not in self.links:
                return None
            at = self.links[at]
            if at.startswith(("/", "../")) or at == "..":
                raise BundleError(
                    f"{self.source.name}: link {path} leads out of the archive", kind=DAMAGED, had=at, next_step=_AGAIN
                )
        raise BundleError(f"{self.source.name}: link {path} leads in a circle", kind=DAMAGED, next_step=_AGAIN)


def read_aar(path: Path) -> Contents:
    """An .aar's files, each read (and checked against its CRC-32) when it is asked for.

    Raises BundleError naming what is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except _BROKEN as problem:
        raise _damaged(path, problem) from problem
    files: dict[str, Read] = {}
    total = 0
    for member in members:
        name = _safe(path, member.filename)
        if member.is_dir():
            continue
        if stat.S_ISLNK(member.external_attr >> 16):
            raise _refused(path, f"holds a symbolic link, {name}")
        total += member.file_size
        _check_limits(path, name, member.file_size, total, len(files))
        if name in files:
            raise _refused(path, f"holds {name} twice")
        files[name] = partial(_from_zip, path, member)
    return Contents(path, files)


def _from_zip(path: Path, member: zipfile.ZipInfo) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member)
    except _BROKEN as problem:
        raise _damaged(path, problem, member.filename) from problem


def read_control(path: Path) -> dict[str, str]:
    """The fields of a .deb's control file, names in lower case. Raises BundleError naming what is damaged."""
    found: list[bytes] = []

    def take(name: str, info: tarfile.TarInfo, read: Read) -> None:
        if name == "control" and info.isreg():
            if info.size > _CONTROL_BYTES:
                raise _refused(path, f"has a control file of {format_bytes(info.size)}")
            found.append(read())

    _each_member(path, "control.tar", take)
    if not found:
        raise _refused(path, "has no control file")
    fields: dict[str, str] = {}
    last = ""
    for line in found[0].decode("utf-8", "replace").splitlines():
        if line[:1] in (" ", "\t") and last:
            fields[last] += "\n" + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            last = name.strip().lower()
            fields[last] = value.strip()
    for name in ("package", "version", "architecture"):
        if not fields.get(name):
            raise _refused(path, f"has no field {name.capitalize()} in its control file")
    return fields


def read_data(path: Path, wanted: Callable[[str], bool]) -> Contents:
    """Those files of a .deb below Termux's prefix that are wanted, in memory; paths without the prefix.

    Raises BundleError naming what is damaged.
    """
    files: dict[str, Read] = {}
    links: dict[str, str] = {}

    def take(name: str, info: tarfile.TarInfo, read: Read) -> None:
        if not name.startswith(TERMUX + "/") or info.isdir():
            return
        name = name.removeprefix(TERMUX + "/")
        if not wanted(name):
            return
        if name in files or name in links:
            raise _refused(path, f"holds {name} twice")
        if info.issym():
            links[name] = _link(name, info.linkname)
        elif info.islnk():
            links[name] = _below_prefix(posixpath.normpath(info.linkname))
        elif info.isreg():
            files[name] = partial(bytes, read())
        else:
            raise _refused(path, f"holds {name}, which is no file")

    _each_member(path, "data.tar", take)
    return Contents(path, files, links)


def _link(name: str, target: str) -> str:
    if target.startswith("/"):
        return _below_prefix(posixpath.normpath(target)[1:]) if target.startswith(f"/{TERMUX}/") else target
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), target))


def _below_prefix(path: str) -> str:
    return path.removeprefix(TERMUX + "/") if path.startswith(TERMUX + "/") else f"/{path}"


def read_ar(file: IO[bytes]) -> dict[str, tuple[int, int]]:
    """Member name → (offset, bytes) of an ar archive, in order. Raises ValueError saying what is wrong."""
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(8) != b"!<arch>\n":
        raise ValueError("it is not an ar archive")
    at, found = 8, {}
    while at < end:
        file.seek(at)
        header = file.read(60)
        if len(header) < 60 or header[58:] != b"`\n":
            raise ValueError(f"the member header at byte {at} is broken")
        name, size = header[:16].decode("latin-1").rstrip(" ").removesuffix("/"), header[48:58].rstrip(b" ")
        if not size.isdigit():
            raise ValueError(f"the member header at byte {at} has no size")
        if at + 60 + int(size) > end:
            raise ValueError(f"member {name} ends early")
        if name in found:
            raise ValueError(f"it holds {name} twice")
        found[name] = at + 60, int(size)
        at += 60 + int(size) + int(size) % 2
    return found


def _each_member(path: Path, which: str, take: Callable[[str, tarfile.TarInfo, Read], None]) -> None:
    """Calls take(name, info, read) for each member of one of a .deb's two tar archives, which is read to its end."""
    try:
        with path.open("rb") as file:
            members = read_ar(file)
            if "debian-binary" not in members:
                raise ValueError("it has no member debian-binary")
            name = next((name for name in members if name == which or name.startswith(f"{which}.")), None)
            if name is None:
                raise ValueError(f"it has no member {which}")
            unpacked = _Limited(path, _unpacked(path, name, _Slice(file, *members[name])))
            total = count = 0
            with tarfile.open(fileobj=unpacked, mode="r|") as archive:  # type: ignore[call-overload]
                for info in archive:
                    member = _safe(path, info.name)
                    total, count = total + info.size, count + 1
                    _check_limits(path, member, info.size, total, count)
                    take(member, info, partial(_extract, archive, info))
            while unpacked.read(1 << 20):  # so that the checksums at the stream's end are looked at
                pass
    except _BROKEN as problem:
        raise _damaged(path, problem) from problem


def _extract(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(info)
    content = file.read() if file is not None else b""
    if len(content) != info.size:
        raise EOFError
    return content


def _unpacked(path: Path, name: str, raw: Any) -> IO[bytes]:
    kind = name.rpartition(".")[2]
    unpacked: IO[bytes]
    if kind == "tar":
        unpacked = raw
        return unpacked
    if kind == "xz":
        return lzma.open(raw)
    if kind == "gz":
        import gzip

        return gzip.open(raw)  # type: ignore[return-value]
    if kind == "zst":
        try:
            from compression import zstd  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise BundleError(
                f"{path.name}: {name} is packed with Zstandard, which Python reads from 3.14 on",
                next_step="Run this command with Python 3.14, or fetch Termux's own package, which is packed with xz",
            ) from None
        unpacked = zstd.open(raw)
        return unpacked
    raise ValueError(f"{name} is packed in a way that is not known")


class _Slice(io.RawIOBase):
    """`size` bytes of a file from `start` on, as a file."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        content = self._file.read(min(len(buffer), self._size - self._at))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class _Limited:
    """A stream that ends with an error instead of unpacking without end."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path, self._stream, self._left = path, stream, TOTAL_BYTES

    def read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise _refused(self._path, f"unpacks to more than {format_bytes(TOTAL_BYTES)}")
        return content


def _safe(path: Path, name: str) -> str:
    """A member's path without './'. Raises BundleError for one that leads out of the archive."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise _refused(path, f"holds {name!r}, which leads out of the archive")
    return posixpath.normpath(name)


def _check_limits(path: Path, name: str, nbytes: int, total: int, count: int) -> None:
    if nbytes > MEMBER_BYTES:
        raise _refused(path, f"holds {name} of {format_bytes(nbytes)}, more than {format_bytes(MEMBER_BYTES)}")
    if total > TOTAL_BYTES:
        raise _refused(path, f"unpacks to more than {format_bytes(TOTAL_BYTES)}")
    if count >= MEMBERS:
        raise _refused(path, f"holds more than {MEMBERS} files")


_AGAIN = "Fetch it again"
_BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error),
    *(EOFError, OSError, ValueError, NotImplementedError, RuntimeError),
)


def _refused(path: Path, reason: str) -> BundleError:
    return BundleError(f"{path.name} {reason}", kind=DAMAGED, next_step=_AGAIN)


def _damaged(path: Path, problem: BaseException, member: str | None = None) -> BundleError:
    reason = "it ends early" if isinstance(problem, EOFError) else getattr(problem, "strerror", None) or str(problem)
    where = f"{path.name}: {member}" if member else path.name
    return BundleError(f"{where} is damaged: {reason}", kind=DAMAGED, next_step=_AGAIN)
