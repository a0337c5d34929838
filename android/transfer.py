"""Sends files to a folder on the phone: verified there by SHA-256 before they have their names.

Small files go in batches, as tar into a folder of their own: every call of adb takes its time, and a bundle has two
thousand files. A large file is appended to NAME.estream-part, so that an interrupted push goes on where it ended. The
adb client reads it by itself: no byte passes through Python.
"""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from android.client import CABLE, DeviceError
from android.contents import PhoneFile
from android.record import PART, STAGING, PhoneFolder, Verified, parse_stat, parse_sums
from estream.errors import PackageError

SMALL = 4 << 20  # bytes; larger files are resumable
_BATCH_BYTES, _BATCH_FILES = 16 << 20, 500
_POLL_S = 0.2
STALL_S = 120.0
_SLOWEST = 1 << 20  # bytes per second at which a batch is still waited for
_CHUNK = 4 << 20

Sent = Callable[[int], None]  # called with bytes that have arrived or were there already

_UNPACK = 'rm -rf "$1" && mkdir -p "$1" && tar -x -f - -C "$1"'
_LOOK = """cd "$1" && find . -type f -exec sha256sum {} + && echo && find . -type f -exec stat -c '%s %Y %n' {} +"""
_PLACE = """chmod "$3" "$1" && mv -f "$1" "$2" && stat -c '%s %Y' "$2\""""


class Transfer:
    """bytes_sent, bytes_resumed: what went over the cable, and what of interrupted files was there already."""

    def __init__(self, folder: PhoneFolder, sent: Sent) -> None:
        self._folder = folder
        self._device = folder.device
        self._sent = sent
        self.bytes_sent = self.bytes_resumed = 0

    def send(self, files: Sequence[PhoneFile]) -> None:
        """Raises DeviceError (connection, space, damage on the way), PackageError (a file here is damaged)."""
        for batch in _batches([file for file in files if file.nbytes < SMALL]):
            self._send_batch(batch)
        for file in files:
            if file.nbytes >= SMALL:
                self._send_large(file)

    def _send_batch(self, batch: Sequence[PhoneFile]) -> None:
        staging = f"{self._folder.path}/{STAGING}"
        archive = _tar(batch)
        self._device.script(_UNPACK, staging, stdin=archive, timeout_s=60 + len(archive) / _SLOWEST)
        listed = self._device.script(_LOOK, staging, timeout_s=60 + len(archive) / _SLOWEST).out.decode()
        hashes, _, times = listed.partition("\n\n")
        sums, stats = parse_sums(hashes), parse_stat(times)
        damaged = [file for file in batch if sums.get(file.path) != file.sha256]
        if damaged:
            self._device.script('rm -rf "$1"', staging)
            raise _damaged(damaged[0])
        self._device.shell("sh", "-s", stdin=_moves(batch, staging, self._folder.path).encode())
        for file in batch:
            self._folder.verified[file.path] = Verified(*stats[file.path], file.sha256)
        self._folder.write_record()
        nbytes = sum(file.nbytes for file in batch)
        self.bytes_sent += nbytes
        self._sent(nbytes)

    def _send_large(self, file: PhoneFile) -> None:
        part = f"{file.path}{PART}"
        at = f"{self._folder.path}/{part}"
        start = self._resume(file, part)
        self.bytes_resumed += start
        self._sent(start)
        if start == 0:
            self._device.script('mkdir -p "${1%/*}" && rm -f "$1"', at)
        with open(file.local, "rb", buffering=0) as source:
            source.seek(start)
            done = start
            append = ("sh", "-c", 'exec cat >> "$1"', "sh", at)
            with self._device.stream(*append, stdin=source, label=f"sending {file.path}") as process:
                moved = time.monotonic()
                while not process.ended(_POLL_S):
                    # The client's position in the file: it shares it with us.
                    here = min(os.lseek(source.fileno(), 0, os.SEEK_CUR), file.nbytes)
                    if here > done:
                        moved = time.monotonic()
                        self._sent(here - done)
                        self.bytes_sent += here - done
                        done = here
                    elif time.monotonic() - moved > STALL_S:
                        thing = f"{file.path}: the phone takes no more bytes since {STALL_S:g} s"
                        raise DeviceError(thing, next_step=CABLE)
                process.expect_success()
        self._sent(file.nbytes - done)
        self.bytes_sent += file.nbytes - done
        if self._folder.sha256(part, file.nbytes) != file.sha256:
            self._device.script('rm -f "$1"', at)
            raise _damaged(file)
        placed = self._device.script(_PLACE, at, f"{self._folder.path}/{file.path}", f"{file.mode:o}").out.split()
        self._folder.verified[file.path] = Verified(int(placed[0]), int(placed[1]), file.sha256)
        self._folder.write_record()

    def _resume(self, file: PhoneFile, part: str) -> int:
        """Bytes at the beginning of the file that are there; 0 where the part is of another file."""
        had = self._folder.present.get(part, (0, 0))[0]
        if not 0 < had <= file.nbytes:
            return 0
        return had if self._folder.sha256(part, had) == hash_prefix(file.local, had) else 0


def hash_prefix(path: Path, nbytes: int) -> str:
    """SHA-256 of the first bytes of a file here."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while nbytes > 0 and (data := file.read(min(nbytes, _CHUNK))):
            digest.update(data)
            nbytes -= len(data)
    return digest.hexdigest()


def _damaged(file: PhoneFile) -> DeviceError | PackageError:
    """Which side is at fault when a file on the phone has another SHA-256."""
    if hash_prefix(file.local, file.nbytes) != file.sha256:
        return PackageError(f"{file.local} is damaged: it does not match its SHA-256")
    return DeviceError(
        f"{file.path} arrived damaged", next_step=f"Push again; another cable, if it happens again. {CABLE}"
    )


def _batches(files: Sequence[PhoneFile]) -> Iterator[list[PhoneFile]]:
    batch: list[PhoneFile] = []
    nbytes = 0
    for file in files:
        if batch and (nbytes + file.nbytes > _BATCH_BYTES or len(batch) == _BATCH_FILES):
            yield batch
            batch, nbytes = [], 0
        batch.append(file)
        nbytes += file.nbytes
    if batch:
        yield batch


def _folders(files: Sequence[PhoneFile]) -> list[str]:
    """Every folder of the files, parents first."""
    found = {str(parent) for file in files for parent in PurePosixPath(file.path).parents}
    return sorted(found - {"."})


def _tar(files: Sequence[PhoneFile]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for folder in _folders(files):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for file in files:
            data = file.local.read_bytes()
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode, entry.mtime = len(data), file.mode, int(file.local.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(data))
    return held.getvalue()


def _moves(files: Sequence[PhoneFile], staging: str, target: str) -> str:
    """A script that gives the verified files their names: one mv per folder."""
    lines = ["set -e"]
    lines += [f"mkdir -p {shlex.quote(f'{target}/{folder}')}" for folder in _folders(files)]
    by_folder: dict[str, list[PhoneFile]] = {}
    for file in files:
        by_folder.setdefault(str(PurePosixPath(file.path).parent), []).append(file)
    for folder, members in by_folder.items():
        sources = " ".join(shlex.quote(f"{staging}/{file.path}") for file in members)
        lines.append(f"mv -f {sources} {shlex.quote(f'{target}/{folder}')}/")
    lines.append(f"rm -rf {shlex.quote(staging)}")
    return "\n".join(lines) + "\n"
