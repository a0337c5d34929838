"""adb's shell: a command with its stdin, stdout, stderr and exit status over a stream."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.device.wire import Closed, Stream

_STDIN, _STDOUT, _STDERR, _EXIT, _CLOSE_STDIN = range(5)
_HEADER = struct.Struct("<BI")  # kind, bytes of data
_ENVIRONMENT = {
    "PATH": "/system/bin:/usr/bin:/bin",
    "ANDROID_ROOT": "/system",
    "ANDROID_DATA": "/data",
    "TMPDIR": "/data/local/tmp",
    "HOME": "/",
    "USER": "shell",
    "LANG": "C.UTF-8",
}
_LAST_WORD_S = 5.0
_LOOK_S = 0.1  # how often a silent command is looked at for whether anybody still listens


def run(
    stream: Stream, command: str, *, framed: bool, sent: Callable[[int], None], breaks: Callable[[int], bool]
) -> None:
    """Runs `command` with sh (empty: a shell that reads stdin). framed: version 2, with stderr and status apart.

    sent: called with the bytes of stdin as it ends. breaks: whether the connection breaks after so many of them.
    """
    process = subprocess.Popen(
        ["/bin/sh", "-c", command] if command else ["/bin/sh"],
        cwd="/",
        env=_ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if framed else subprocess.STDOUT,
        bufsize=0,
    )
    feeder = threading.Thread(target=_pass_stdin, args=(stream, process, framed, sent, breaks), daemon=True)
    feeder.start()
    try:
        _pass_output(stream, process, framed)
        status = process.wait()
        if framed:
            # As adbd: 128 and the signal's number for a command that a signal ended.
            stream.write(_frame(_EXIT, bytes([status if status >= 0 else 128 - status])))
        stream.close()
    except Closed:
        # As adbd: the pipes go, and the shell is told, but what it started is not.
        if framed:
            process.send_signal(signal.SIGHUP)
        feeder.join(_LAST_WORD_S)  # what came before the end is passed on: `adb exec-in` ends so
        _close(process)
        process.wait()


def _frame(kind: int, data: bytes) -> bytes:
    return _HEADER.pack(kind, len(data)) + data


def _pass_output(stream: Stream, process: subprocess.Popen[bytes], framed: bool) -> None:
    pipes = {pipe.fileno(): kind for pipe, kind in ((process.stdout, _STDOUT), (process.stderr, _STDERR)) if pipe}
    while pipes:
        for pipe in select.select(list(pipes), [], [], _LOOK_S)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                del pipes[pipe]
            else:
                stream.write(_frame(pipes[pipe], data) if framed else data)
        if stream.closed.is_set():
            raise Closed


def _pass_stdin(
    stream: Stream,
    process: subprocess.Popen[bytes],
    framed: bool,
    sent: Callable[[int], None],
    breaks: Callable[[int], bool],
) -> None:
    assert process.stdin is not None
    count = 0
    with suppress(Closed, OSError, ValueError):  # nobody sends any more, or nobody reads
        while True:
            kind, data = _STDIN, b""
            if framed:
                kind, length = _HEADER.unpack(stream.read(_HEADER.size))
                data = stream.read(length)
            else:
                data = stream.chunk()
            if kind == _STDIN:
                with suppress(BrokenPipeError):
                    process.stdin.write(data)
                count += len(data)
                if breaks(count):
                    stream.connection.drop()
            elif kind == _CLOSE_STDIN:
                break
    if count:
        sent(count)
    with suppress(OSError):
        process.stdin.close()


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            pipe.close()
