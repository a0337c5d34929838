"""What lies in a folder on the phone, and the record of what was pushed there and verified.

A file counts as verified while it has the size and the time that it had when its SHA-256 was computed on the phone, so
that a second push of a large model hashes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from android.client import DeviceError
from android.device import Device

RECORD = ".estream-pushed.json"
PART = ".estream-part"  # NAME.estream-part: the beginning of a large file
STAGING = ".estream-incoming"  # small files until they are verified
_VERSION = 1
_STAT = re.compile(r"(\d+) (-?\d+) \./(.*)")
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.*)")
_HASHED_PER_S = 100 << 20  # the slowest phone that is still waited for
_LIST = """[ -d "$1" ] || exit 0
cd "$1" && find . -type f -exec stat -c '%s %Y %n' {} +"""


@dataclass(frozen=True)
class Verified:
    """Bytes, time of the last change in seconds, SHA-256."""

    nbytes: int
    mtime: int
    sha256: str


def parse_stat(text: str) -> dict[str, tuple[int, int]]:
    """(bytes, time) by path."""
    matches = map(_STAT.fullmatch, text.splitlines())
    return {match[3]: (int(match[1]), int(match[2])) for match in matches if match}


def parse_sums(text: str) -> dict[str, str]:
    """SHA-256 by path."""
    matches = map(_SUM.fullmatch, text.splitlines())
    return {match[2].removeprefix("./"): match[1] for match in matches if match}


class PhoneFolder:
    """A folder that files are pushed to. `present`: (bytes, time) of every file in it; `verified`: the record of those
    that are as they were."""

    def __init__(self, device: Device, path: str) -> None:
        self.device = device
        self.path = path
        self.present = parse_stat(device.script(_LIST, path).out.decode(errors="surrogateescape"))
        self.pushed = self._read_record() if RECORD in self.present else {}
        self.verified = {
            name: had for name, had in self.pushed.items() if self.present.get(name) == (had.nbytes, had.mtime)
        }

    def _read_record(self) -> dict[str, Verified]:
        """A record that cannot be read is none: then everything is hashed again."""
        try:
            document = json.loads(self.device.shell("cat", f"{self.path}/{RECORD}").out)
            if document["version"] != _VERSION:
                return {}
            return {
                name: Verified(int(entry[0]), int(entry[1]), str(entry[2])) for name, entry in document["files"].items()
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return {}

    def write_record(self) -> None:
        """Whole, or the old one."""
        files = {name: [had.nbytes, had.mtime, had.sha256] for name, had in sorted(self.verified.items())}
        text = json.dumps({"version": _VERSION, "files": files})
        save = 'cat > "$1.part" && mv -f "$1.part" "$1"'
        self.device.script(save, f"{self.path}/{RECORD}", stdin=text.encode())

    def adopt(self, wanted: Iterable[tuple[str, int, str]]) -> None:
        """Hashes files that are there with the right size and not in the record, given as (path, bytes, SHA-256), and
        takes those that are right for verified."""
        asked = [
            (name, nbytes, sha256)
            for name, nbytes, sha256 in wanted
            if name not in self.verified and name in self.present and self.present[name][0] == nbytes
        ]
        if not asked:
            return
        names = b"".join(b"./" + name.encode() + b"\0" for name, _, _ in asked)
        limit = 60 + sum(nbytes for _, nbytes, _ in asked) / _HASHED_PER_S
        done = self.device.script('cd "$1" && xargs -0 sha256sum', self.path, stdin=names, timeout_s=limit, check=False)
        sums = parse_sums(done.out.decode(errors="surrogateescape"))
        for name, nbytes, sha256 in asked:
            if sums.get(name) == sha256:
                self.verified[name] = Verified(nbytes, self.present[name][1], sha256)
        self.write_record()

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, and the record of them first."""
        gone = sorted(names)
        if not gone:
            return
        for name in gone:
            self.verified.pop(name, None)
        self.write_record()
        listed = b"".join(b"./" + name.encode(errors="surrogateescape") + b"\0" for name in gone)
        self.device.script('cd "$1" && xargs -0 rm -f', self.path, stdin=listed)
        for name in gone:
            self.present.pop(name, None)

    def sha256(self, name: str, nbytes: int) -> str:
        """SHA-256 of a file's bytes on the phone, which are `nbytes`. Raises DeviceError."""
        done = self.device.script('sha256sum < "$1"', f"{self.path}/{name}", timeout_s=60 + nbytes / _HASHED_PER_S)
        found = _SUM.match(done.out.decode(errors="replace"))
        if found is None:
            raise DeviceError(f"sha256sum on {self.device.serial} cannot be read", had=done.out[:200])
        return found[1]
