"""The adb program: where it is, how it is run and never left running, and what its own failures mean."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from estream.errors import EStreamError

_INSTALL = (
    "Install Android's platform tools (in Debian and Ubuntu: apt install adb), or name the program in ESTREAM_ADB"
)
CABLE = "Check the cable and the phone's screen, then run the command again"
SPACE = "Free space on the phone: estream device clean --runs (or --models, or the name of one), photos, apps"
_START_S = 30.0
_GONE = re.compile(rb"device '[^']*' not found|no devices/emulators found|device not found")
# What the client says about its server, which is no answer and no failure.
_NOISE = re.compile(rb"^(?:\* daemon .*|adb server version .* doesn't match this client.*)\n?", re.MULTILINE)


class DeviceError(EStreamError):
    """The phone cannot be reached, or what ran there failed.

    status: exit status of the phone's command; None where adb or the connection failed. err: what it wrote to stderr.
    """

    def __init__(
        self,
        thing: str,
        *,
        asked: object = None,
        had: object = None,
        next_step: str | None = None,
        status: int | None = None,
        err: bytes = b"",
    ) -> None:
        super().__init__(thing, asked=asked, had=had, next_step=next_step)
        self.status = status
        self.err = err


@dataclass(frozen=True)
class Completed:
    """A program that ended: exit status, stdout, stderr."""

    status: int
    out: bytes
    err: bytes


def find_adb() -> str:
    """The adb program. Raises DeviceError: there is none, or the one that was named is none."""
    named = os.environ.get("ESTREAM_ADB")
    if named:
        if not _is_program(named):
            raise DeviceError("ESTREAM_ADB names no program", had=named, next_step=_INSTALL)
        return named
    for variable in ("ANDROID_HOME", "ANDROID_SDK_ROOT"):
        home = os.environ.get(variable)
        if home and _is_program(inside := os.path.join(home, "platform-tools", "adb")):
            return inside
    found = shutil.which("adb")
    if found is None:
        looked = "looked in $ESTREAM_ADB, $ANDROID_HOME/platform-tools and $PATH"
        raise DeviceError("adb was not found", had=looked, next_step=_INSTALL)
    return found


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


class Client:
    """Runs adb. Every process it starts has ended when the call that started it returns or raises."""

    def __init__(self, program: str) -> None:
        self.program = program

    def start_server(self) -> None:
        """Raises DeviceError: the server, which speaks to the phones for all clients, does not start."""
        # Files, not pipes: the server would keep a pipe open and its reader waiting.
        with tempfile.TemporaryFile() as said:
            process = self._popen(["start-server"], subprocess.DEVNULL, said, said)
            try:
                status = process.wait(_START_S)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
            said.seek(0)
            text = last_lines(without_noise(said.read()))
        if status != 0:
            had = text or (f"no answer in {_START_S:g} s" if status is None else f"status {status}")
            step = "End every adb (adb kill-server), look at what holds its port, then run the command again"
            raise DeviceError("adb's server does not start", had=had, next_step=step)

    def popen(
        self, arguments: Sequence[str | bytes], stdin: int | IO[bytes] = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Starts adb with pipes. Whoever calls it calls `end`, too."""
        return self._popen(arguments, stdin, subprocess.PIPE, subprocess.PIPE)

    def run(
        self, arguments: Sequence[str | bytes], timeout_s: float | None, stdin: bytes | None = None
    ) -> Completed | None:
        """Runs adb to its end; None: it did not end in time."""
        process = self.popen(arguments, subprocess.DEVNULL if stdin is None else subprocess.PIPE)
        try:
            out, err = process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)
        return Completed(process.returncode, out, without_noise(err))

    def _popen(
        self, arguments: Sequence[str | bytes], stdin: int | IO[bytes], out: int | IO[bytes], err: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        try:
            # A session of its own: Ctrl-C is for us, and we end the client in an order that the phone understands.
            return subprocess.Popen(
                [self.program, *arguments], stdin=stdin, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise DeviceError(f"{self.program} cannot be started: {error.strerror}", next_step=_INSTALL) from error


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills what still runs, and closes its pipes."""
    if process.poll() is None:
        process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent bytes of a pipe that nobody reads any more
                pipe.close()
    process.wait()


def without_noise(text: bytes) -> bytes:
    """What the client said, without its remarks about its server."""
    return _NOISE.sub(b"", text)


def last_lines(text: bytes, most: int = 3) -> str:
    """The end of what a program said, for a message: on one line."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-most:])[-600:]


def adb_failure(serial: str, doing: str, said: bytes) -> DeviceError:
    """What adb's own words on stderr mean. `doing` names what failed by it; empty: nothing that a user has heard of."""
    text, by = last_lines(said), f"{doing}: " if doing else ""
    if _GONE.search(said):
        return DeviceError(f"{by}the phone {serial} is no longer attached", next_step=CABLE)
    if b"unauthorized" in said:
        return DeviceError(f"{by}{serial} has not allowed this computer", next_step=ALLOW)
    if b"offline" in said:
        return DeviceError(f"{by}the phone {serial} is offline", next_step=REPLUG)
    if b"daemon" in said or b"smartsocket" in said:
        return DeviceError(f"{by}adb's server does not answer", had=text, next_step="Run adb kill-server, then again")
    return DeviceError(f"{by}the connection to {serial} broke", had=text or None, next_step=CABLE)


ALLOW = "Unlock the phone, answer 'Allow USB debugging?' with yes, then run the command again"
REPLUG = "Unplug the phone and plug it in again; if that does not help: adb kill-server"


def failed(name: str, serial: str, status: int, err: bytes) -> DeviceError:
    """A program that ended with a status other than 0, with what it said and what usually causes that."""
    return DeviceError(
        f"{name} on {serial}: status {status}",
        had=last_lines(err) or None,
        next_step=_step(status, err),
        status=status,
        err=err,
    )


def _step(status: int, err: bytes) -> str | None:
    if b"No space left" in err:
        return SPACE
    if b"Permission denied" in err or b"Operation not permitted" in err:
        return "The phone refuses it (permissions or SELinux): leave --target out, and run estream device doctor"
    if b"Read-only file system" in err:
        return "Give a --target under /data/local/tmp"
    if status == 137:
        return "It was killed, most likely for memory: close apps on the phone, or give a smaller --memory"
    return None
