"""Loading whole ranges of a file at open, with several lanes: dense weights, or all records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from estream.errors import FlashError
from estream.flash.pool import Source
from estream.package.layout import ALIGNMENT
from estream.runtime.target import Buffer

PIECE = 8 << 20  # large enough for the device's full rate, small enough for a smooth progress bar
Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)


def load_ranges(
    source: Source,
    ranges: Sequence[tuple[Buffer, int]],
    *,
    lanes: int = 2,
    progress: Progress | None = None,
    stage: str = "reading",
) -> int:
    """Fills each buffer from its file offset; returns the bytes read. Offsets and sizes are multiples of 16 KiB.

    `progress` is called in this thread. Raises FlashError; all lanes have ended when it returns or raises.
    """
    pieces: list[tuple[memoryview, int]] = []
    for buffer, offset in ranges:
        if offset % ALIGNMENT or buffer.nbytes % ALIGNMENT:
            raise FlashError(f"a range is not aligned to {ALIGNMENT}", had=f"{buffer.nbytes} bytes at offset {offset}")
        memory = buffer.memory()
        pieces += [(memory[at : at + PIECE], offset + at) for at in range(0, buffer.nbytes, PIECE)]
    total = sum(buffer.nbytes for buffer, _ in ranges)
    todo, lock, stop = iter(pieces), threading.Lock(), threading.Event()
    results: SimpleQueue[int | BaseException] = SimpleQueue()

    def lane() -> None:
        while not stop.is_set():
            with lock:
                piece = next(todo, None)
            if piece is None:
                return
            try:
                source.read_into(*piece)
            except BaseException as error:  # raised again in the calling thread
                results.put(error)
                return
            results.put(piece[0].nbytes)

    threads = [
        threading.Thread(target=lane, name=f"estream-load-{number}", daemon=True)
        for number in range(min(lanes, len(pieces)))
    ]
    done = 0
    try:
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:
            raise FlashError(f"a lane thread cannot be started: {error}", next_step="Give fewer --lanes.") from error
        for _ in pieces:
            result = results.get()
            if isinstance(result, FlashError):
                raise result
            if isinstance(result, BaseException):
                raise FlashError(f"a lane failed: {type(result).__name__}: {result}") from result
            done += result
            if progress is not None:
                progress(stage, done, total)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return done
