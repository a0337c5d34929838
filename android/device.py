"""One phone through adb: commands, running programs, files."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from android.client import CABLE, Client, Completed, DeviceError, adb_failure, failed, last_lines
from android.process import PATIENCE_S, PhoneProcess, split_status
from estream.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SLOWEST = 1 << 20  # bytes per second of adb push and pull that are still waited for


class Device:
    """A phone that adb can speak to. `details`: what `adb devices -l` says of it (product, model, ...)."""

    def __init__(self, client: Client, serial: str, details: Mapping[str, str] | None = None) -> None:
        self._client = client
        self.serial = serial
        self.details = dict(details or {})

    def shell(
        self,
        *argv: str,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        check: bool = True,
        stdin: bytes | None = None,
    ) -> Completed:
        """Runs a program to its end; every argument arrives as it is.

        Raises DeviceError: adb or the connection failed, no answer in time, or (with check) a status other than 0.
        """
        mark, name = _mark(), os.path.basename(argv[0])
        name = "a command" if name == "sh" else name  # lines of a script have no name
        done = self._client.run(self._shell(argv, cwd, env, mark), timeout_s, stdin)
        if done is None:
            raise DeviceError(f"{name} on {self.serial}: no answer", asked=f"within {timeout_s:g} s", next_step=CABLE)
        err, status = split_status(done.err, mark)
        if status is None:
            raise adb_failure(self.serial, "", err)
        if check and status:
            raise failed(name, self.serial, status, err)
        return Completed(status, done.out, err)

    def script(
        self, text: str, *arguments: str, timeout_s: float = 60, check: bool = True, stdin: bytes | None = None
    ) -> Completed:
        """Runs lines of the phone's sh, which finds the arguments in $1, $2, ... Raises as `shell`."""
        return self.shell("sh", "-c", text, "sh", *arguments, timeout_s=timeout_s, check=check, stdin=stdin)

    @contextlib.contextmanager
    def stream(
        self,
        *argv: str,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: IO[bytes] | None = None,
        label: str | None = None,
    ) -> Iterator[PhoneProcess]:
        """Runs a program while the block lasts. Leaving the block ends its stdin, and then the adb client.

        stdin: a file that the client reads by itself; None: `PhoneProcess.send`. label: what errors call it.
        """
        mark = _mark()
        arguments = self._shell(argv, cwd, env, mark)
        client = self._client.popen(arguments) if stdin is None else self._client.popen(arguments, stdin)
        # Where a file is sent, nothing on the phone waits to be told: what arrived is what arrived.
        patience_s = PATIENCE_S if stdin is None else 0.0
        process = PhoneProcess(client, self.serial, label or os.path.basename(argv[0]), mark, patience_s)
        try:
            yield process
        finally:
            process.stop()

    def push(self, local: Path, remote: str) -> None:
        """Copies a file to the phone as adb push does. Raises DeviceError and OSError (no such file here)."""
        nbytes = os.stat(local).st_size
        self._copy("push", os.path.abspath(local), remote, 60 + nbytes / _SLOWEST)

    def pull(self, remote: str, local: Path) -> None:
        """Copies a file from the phone: complete, or `local` is as before. Raises DeviceError and OSError."""
        target = Path(os.path.abspath(local))
        part = target.with_name(f".estream-{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            self._copy("pull", remote, str(part), None)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    def _copy(self, verb: str, source: str, target: str, timeout_s: float | None) -> None:
        doing = f"adb {verb} {source}"
        done = self._client.run(["-s", self.serial, verb, os.fsencode(source), os.fsencode(target)], timeout_s)
        if done is None:
            raise DeviceError(f"{doing}: not done in time", asked=f"within {timeout_s:.0f} s", next_step=CABLE)
        if done.status == 0:
            return
        said = done.err + done.out
        if b"failed to copy" in said or b"failed to stat" in said or b"cannot " in said:
            step = "Check the name, the space and the permissions on the phone"
            raise DeviceError(doing, had=last_lines(said), next_step=step, status=done.status)
        raise adb_failure(self.serial, doing, said)

    def _shell(
        self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None, mark: bytes
    ) -> list[str | bytes]:
        return ["-s", self.serial, "shell", os.fsencode(command_line(argv, cwd, env, mark.decode()))]


def command_line(argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None, mark: str) -> str:
    """What the phone's sh is given: the program with its arguments as they are, then `mark` and the status on stderr.

    adb hands on one string, and its client's exit status does not tell a broken connection (255, 1) from a program's.

    Raises UsageError: a NUL byte, or a variable that cannot have this name.
    """
    words = [*argv, *([cwd] if cwd is not None else []), *(env or {}).values()]
    if any("\0" in word for word in words):
        raise UsageError("a NUL byte cannot be part of an argument on the phone")
    parts = []
    if cwd is not None:
        # cd takes a leading dash for an option, or for the folder before
        parts.append(f"cd {shlex.quote(cwd if cwd.startswith('/') else f'./{cwd}')}")
    if env:
        for name in env:
            if not _NAME.fullmatch(name):
                raise UsageError(f"{name!r} is no name of an environment variable")
        parts.append("export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items()))
    parts.append(" ".join(map(shlex.quote, argv)))
    return f'{" && ".join(parts)}\necho "{mark} $?" >&2'


def _mark() -> bytes:
    return f"estream-status-{secrets.token_hex(8)}".encode()
