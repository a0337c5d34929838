"""How fast this machine reads a file directly, by read size and number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from estream.flash.pool import PoolFile
from estream.package.layout import ALIGNMENT
from estream.runtime.memory import HostMemory


def read_rate(file: PoolFile, nbytes: int, lanes: int, seconds: float) -> float:
    """Bytes per second of direct reads one after the other through a file by `lanes` threads, for about `seconds`."""
    with reading(file, nbytes, lanes) as counted:
        started, before = time.perf_counter(), counted()
        time.sleep(seconds)
        while counted() == before:  # a slow device: at least one read
            time.sleep(0.01)
        return (counted() - before) / (time.perf_counter() - started)


@contextmanager
def reading(file: PoolFile, nbytes: int, lanes: int) -> Iterator[Callable[[], int]]:
    """Reads go on while the block runs; yields a function that tells the bytes read so far."""
    size = min(nbytes, file.nbytes // ALIGNMENT * ALIGNMENT)
    buffers = HostMemory()
    stop, lock, total, next_ = threading.Event(), threading.Lock(), 0, 0
    failed: list[BaseException] = []

    def lane(memory: memoryview) -> None:
        nonlocal total, next_
        while not stop.is_set():
            with lock:
                at, next_ = next_, next_ + size
                if next_ + size > file.nbytes:
                    next_ = 0
            try:
                file.read_into(memory, at)
            except BaseException as error:
                failed.append(error)
                return
            with lock:
                total += size

    try:
        memories = [buffers.allocate(size, f"read {number}").memory() for number in range(lanes)]
        threads = [threading.Thread(target=lane, args=(memory,), daemon=True) for memory in memories]
        for thread in threads:
            thread.start()
        try:
            yield lambda: total
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if failed:
            raise failed[0]
    finally:
        buffers.close()
