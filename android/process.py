"""A program on the phone while it runs: its lines as they come, and how it ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator

from android.client import adb_failure, end, failed, without_noise
from estream.errors import ClosedError

PATIENCE_S = 5.0  # for a program that is told to end by the end of its stdin


class PhoneProcess:
    """What `Device.stream` yields. `mark`: what the phone's shell writes to stderr before the program's exit status.

    Not for several threads at once.
    """

    def __init__(
        self, client: subprocess.Popen[bytes], serial: str, name: str, mark: bytes, patience_s: float = PATIENCE_S
    ) -> None:
        self._client = client
        self._serial = serial
        self._name = name
        self._mark = mark
        self._patience_s = patience_s
        self._err = bytearray()
        self._reader = threading.Thread(target=self._read_err, daemon=True)
        self._reader.start()

    @property
    def err(self) -> bytes:
        """What the program has written to stderr so far."""
        return without_noise(bytes(self._err).partition(self._mark)[0])

    def send(self, data: bytes) -> None:
        """Writes to the program's stdin. Raises DeviceError: nobody reads it any more."""
        assert self._client.stdin is not None
        try:
            self._client.stdin.write(data)
            self._client.stdin.flush()
        except ValueError as error:
            raise ClosedError(f"{self._name}: its stdin is closed") from error
        except BrokenPipeError:
            pass  # it has ended: `finish` says how

    def lines(self) -> Iterator[bytes]:
        """Lines of stdout without their newline, as they come.

        Raises DeviceError: the connection broke. Half a line is never yielded for it.
        """
        assert self._client.stdout is not None
        for line in self._client.stdout:
            if not line.endswith(b"\n"):
                self._ended()
            yield line.removesuffix(b"\n")

    def finish(self) -> int:
        """Waits, and returns the program's exit status on the phone (128 + n: killed there by signal n).

        Raises DeviceError: the connection broke, so that nobody knows.
        """
        assert self._client.stdout is not None
        while self._client.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            pass  # or the program would wait for a reader for ever
        return self._ended()

    def ended(self, timeout_s: float) -> bool:
        """Whether it has ended, after waiting for that at most so long. Its stdout must be small: nobody reads it."""
        try:
            self._client.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def expect_success(self) -> None:
        """`finish`; raises DeviceError, too, for a status other than 0."""
        status = self.finish()
        if status:
            raise failed(self._name, self._serial, status, self.err)

    def stop(self) -> None:
        """Closes stdin, gives the program a moment to see it, and ends the client."""
        assert self._client.stdout is not None
        if self._client.stdin is not None:
            with contextlib.suppress(OSError):
                self._client.stdin.close()
        drain = threading.Thread(target=_drain, args=(os.dup(self._client.stdout.fileno()),), daemon=True)
        drain.start()  # its output must not hold it up; the buffered reader may be locked by what was interrupted
        try:
            self._client.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self._client.kill()
        finally:
            if self._client.poll() is None:
                self._client.kill()
            self._client.wait()
            drain.join()
            self._reader.join()
            end(self._client)

    def _ended(self) -> int:
        self._client.wait()
        self._reader.join()
        err, status = split_status(bytes(self._err), self._mark)
        if status is None:
            raise adb_failure(self._serial, self._name, without_noise(err))
        return status

    def _read_err(self) -> None:
        assert self._client.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._client.stderr.fileno(), 1 << 16):
                self._err += data


def split_status(err: bytes, mark: bytes) -> tuple[bytes, int | None]:
    """(what the program wrote to stderr, its status); None: the phone's shell never came to tell it."""
    said, found, status = err.rpartition(mark)
    words = status.split()
    if not found or not words or not words[0].isdigit():
        return err, None
    return said, int(words[0])


def _drain(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1 << 16):
            pass
    os.close(descriptor)
