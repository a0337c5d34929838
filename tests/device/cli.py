"""`estream device …` as a user starts it: a process of its own, with the real adb client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.device.phone import Adb, Phone

_CHECKOUT = Path(__file__).parents[2]
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.out)
        return answer


@dataclass(frozen=True)
class Estream:
    """The command line beside an adb server. `phone`: the one that --serial names; None: no --serial."""

    adb: Adb
    phone: Phone | None = None

    def __call__(self, command: str, *arguments: str | Path) -> Said:
        """`estream device COMMAND ARGUMENTS`, to its end."""
        done = subprocess.run(
            self._words("device", command, *self._serial(), *arguments),
            **self._where(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def here(self, *arguments: str | Path) -> Said:
        """`estream ARGUMENTS`, on the host alone."""
        done = subprocess.run(
            self._words(*arguments), **self._where(), capture_output=True, text=True, timeout=_LIMIT_S
        )
        return Said(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def running(self, command: str, *arguments: str | Path) -> Iterator[Running]:
        """While the block lasts; it is killed where the block leaves it running."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                self._words("device", command, *self._serial(), *arguments),
                **self._where(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            try:
                yield Running(process, out, err)
            finally:
                process.kill()
                process.wait()

    def clients(self) -> list[str]:
        """Command lines of adb clients of this server's user that speak to the phone."""
        assert self.phone is not None
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"-s" in words and self.phone.serial.encode() in words:
                    found.append(b" ".join(words).decode(errors="replace"))
        return found

    def _serial(self) -> list[str]:
        return [] if self.phone is None else ["--serial", self.phone.serial]

    @staticmethod
    def _words(*arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "estream", *map(str, arguments)]

    def _where(self) -> dict[str, Any]:
        environment = {**self.adb.environment, "PYTHONPATH": str(_CHECKOUT), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
        environment["ESTREAM_CACHE"] = os.environ["ESTREAM_CACHE"]
        return {"env": environment, "cwd": self.adb.home}


class Running:
    """A command that has not ended yet."""

    def __init__(self, process: subprocess.Popen[bytes], out: IO[str], err: IO[str]) -> None:
        self._process, self._out, self._err = process, out, err

    def said(self) -> str:
        """What it has printed so far."""
        return os.pread(self._out.fileno(), 1 << 20, 0).decode()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Fails where the command ends before, or takes too long."""
        end = time.monotonic() + _LIMIT_S
        while not condition():
            assert self._process.poll() is None and time.monotonic() < end, self.finish()
            time.sleep(0.005)

    def interrupt(self) -> None:
        """Ctrl-C, for this process alone."""
        self._process.send_signal(signal.SIGINT)

    def finish(self) -> Said:
        """Waits."""
        status = self._process.wait(_LIMIT_S)
        return Said(status, self.said(), os.pread(self._err.fileno(), 1 << 20, 0).decode())
