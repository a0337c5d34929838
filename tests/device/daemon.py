"""A stand-in adbd over TCP: real commands and real files, for the real adb client.

It has adbd's manners where they matter: a push that breaks leaves no file, a client that goes away hangs up on its
shell, and a daemon that is killed just closes its pipes. What a test may change meanwhile lies in files of `VALUES`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.device import shell_service
from tests.device.sync_service import Sync
from tests.device.wire import Connection, Stream

VALUES = Path("/system/values")
STATE = "state"  # device, unauthorized, or offline (does not answer)
DROP_PUSH_AFTER = "drop_push_after"  # bytes of one file or stdin, after which the connection is dropped; once
LOG = "log"  # one line per service opened, and per file pushed or stdin with its bytes
_FEATURES = "shell_v2,cmd,stat_v2,ls_v2,fixed_push_mkdir"


class Daemon:
    """Listens on 127.0.0.1; port 0 chooses one."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", port))
        self.port: int = self._server.getsockname()[1]
        self._logging = threading.Lock()

    def close(self) -> None:
        """In a process that does not serve."""
        self._server.close()

    def serve_forever(self) -> None:
        while True:
            peer, _ = self._server.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(peer, _banner(), lambda: _value(STATE), self._serve)
            threading.Thread(target=connection.run, daemon=True).start()

    def _serve(self, stream: Stream, service: str) -> bool:
        kind, _, command = service.partition(":")
        name, *options = kind.split(",")
        run: Callable[[], None]
        if name == "sync":
            run = Sync(stream, self._sent, _push_breaks).run
        elif name in ("shell", "exec"):

            def run() -> None:
                shell_service.run(
                    stream,
                    command,
                    framed="v2" in options,
                    sent=lambda count: self._sent(command, count),
                    breaks=_push_breaks,
                )

        else:
            return False
        self._log(f"open {kind} {command!r}")
        threading.Thread(target=run, daemon=True).start()
        return True

    def _sent(self, path: str, count: int) -> None:
        self._log(f"sent {count} {path!r}")

    def _log(self, line: str) -> None:
        with self._logging, open(VALUES / LOG, "a", encoding="utf-8", errors="surrogateescape") as log:
            print(line, file=log)


def _value(name: str) -> str:
    """What the test has set, or nothing."""
    with suppress(FileNotFoundError):
        return (VALUES / name).read_text().strip()
    return ""


def _banner() -> bytes:
    names = ("ro.product.name", "ro.product.model", "ro.product.device")
    properties = "".join(f"{name}={_value(f'getprop/{name}')};" for name in names)
    return f"device::{properties}features={_FEATURES}\0".encode()


def _push_breaks(count: int) -> bool:
    limit = _value(DROP_PUSH_AFTER)
    breaks = bool(limit) and count >= int(limit)
    if breaks:
        (VALUES / DROP_PUSH_AFTER).unlink()
    return breaks
