"""adb's packets, as the phone sees them: one connection with an adb server, and the streams multiplexed on it."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable

CNXN, AUTH, OPEN, OKAY, CLSE, WRTE = (
    int.from_bytes(name, "little") for name in b"CNXN AUTH OPEN OKAY CLSE WRTE".split()
)
VERSION = 0x01000001  # the first without checksums of the data
MAX_PAYLOAD = 1 << 20
_HEADER = struct.Struct("<6I")  # command, two arguments, bytes of data, checksum, complement of the command
_LAST_WORD_S = 5.0


class Closed(Exception):
    """The other side of a stream, or the whole connection, is gone."""


class Stream:
    """One service's two-way stream. Either side sends one packet, and the next when that one is acknowledged."""

    def __init__(self, connection: Connection, local: int, remote: int) -> None:
        self.connection, self.local, self.remote = connection, local, remote
        self.closed = threading.Event()
        self._chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._rest = bytearray()
        self._may_send = threading.Semaphore(1)

    def chunk(self) -> bytes:
        """The next bytes, however many came. Raises Closed."""
        if self._rest:
            taken, self._rest = bytes(self._rest), bytearray()
            return taken
        taken_or_end = self._chunks.get()
        if taken_or_end is None:
            self._chunks.put(None)
            raise Closed
        self.connection.send(OKAY, self.local, self.remote)
        return taken_or_end

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes. Raises Closed."""
        taken = bytearray()
        while len(taken) < count:
            taken += self.chunk()
        self._rest = taken[count:]
        return bytes(taken[:count])

    def write(self, data: bytes) -> None:
        """Raises Closed."""
        for start in range(0, len(data), self.connection.max_payload):
            self._may_send.acquire()
            if self.closed.is_set():
                self._may_send.release()
                raise Closed
            self.connection.send(WRTE, self.local, self.remote, data[start : start + self.connection.max_payload])

    def close(self) -> None:
        """After what was written has arrived."""
        self._may_send.acquire(timeout=_LAST_WORD_S)
        self.connection.forget(self)

    # What the connection calls as packets come in.

    def feed(self, data: bytes) -> None:
        self._chunks.put(data)

    def acknowledged(self) -> None:
        self._may_send.release()

    def end(self) -> None:
        self.closed.set()
        self._chunks.put(None)
        self._may_send.release()


class Connection:
    """One connection.

    state() is "device", "unauthorized" or "offline", asked at the handshake. serve(stream, service) runs a service in a
    thread of its own, and says by False that it does not know it.
    """

    def __init__(
        self, peer: socket.socket, banner: bytes, state: Callable[[], str], serve: Callable[[Stream, str], bool]
    ) -> None:
        self.max_payload = MAX_PAYLOAD
        self._peer, self._banner, self._state, self._serve = peer, banner, state, serve
        self._sending = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._next = 1

    def send(self, command: int, first: int, second: int, data: bytes = b"") -> None:
        """Raises Closed."""
        try:
            with self._sending:
                self._peer.sendall(_HEADER.pack(command, first, second, len(data), 0, command ^ 0xFFFFFFFF) + data)
        except OSError as error:
            raise Closed from error

    def drop(self) -> None:
        """As a cable that is pulled."""
        self._peer.shutdown(socket.SHUT_RDWR)

    def forget(self, stream: Stream) -> None:
        """Closes a stream from this side."""
        if self._streams.pop(stream.local, None) is not None:
            self.send(CLSE, stream.local, stream.remote)

    def run(self) -> None:
        """Until the connection ends."""
        try:
            while True:
                command, first, second, count, _, _ = _HEADER.unpack(self._receive(_HEADER.size))
                self._handle(command, first, second, self._receive(count))
        except (Closed, OSError):
            pass
        finally:
            for stream in list(self._streams.values()):
                stream.end()
            self._peer.close()

    def _receive(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._peer.recv_into(view)
            if not got:
                raise Closed
            view = view[got:]
        return bytes(data)

    def _handle(self, command: int, first: int, second: int, data: bytes) -> None:
        if command == CNXN:
            self._greet(second)
        elif command == AUTH and first == 2:  # a key that this phone does not know: the server tries its next one
            self._ask_for_key()
        elif command == OPEN:
            self._open(first, data.rstrip(b"\0").decode(errors="surrogateescape"))
        elif stream := self._streams.get(second):
            if command == WRTE:
                stream.feed(data)
            elif command == OKAY:
                stream.acknowledged()
            elif command == CLSE:
                del self._streams[second]
                stream.end()

    def _greet(self, payload: int) -> None:
        self.max_payload = min(payload, MAX_PAYLOAD)
        state = self._state()
        if state == "unauthorized":
            self._ask_for_key()
        elif state == "device":
            self.send(CNXN, VERSION, MAX_PAYLOAD, self._banner)

    def _ask_for_key(self) -> None:
        self.send(AUTH, 1, 0, bytes(range(20)))

    def _open(self, remote: int, service: str) -> None:
        stream = Stream(self, self._next, remote)
        self._next += 1
        self._streams[stream.local] = stream
        self.send(OKAY, stream.local, remote)
        if not self._serve(stream, service):
            self.forget(stream)
