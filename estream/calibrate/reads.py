"""How fast this machine reads a file directly, by read size and number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from estream.flash.pool import PoolFile
from estream.package.layout import ALIGNMENT
from estream.runtime.memory import HostMemory

WARM_S = 0.25  # a rate limit lets the first tenth of a second or so through


def read_rate(file: PoolFile, nbytes: int, lanes: int, seconds: float) -> float:
    """Bytes per second of direct reads one after the other through a file by `lanes` threads, for about `seconds`."""
    with reading(file, nbytes, lanes) as reads:
        time.sleep(WARM_S)
        return reads.rate(seconds)


@dataclass
class Reads:
    """Of reads that go on. done: (second, bytes so far), one more as each of them ends. failed: why a lane ended."""

    done: list[tuple[float, int]] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)

    def rate(self, seconds: float) -> float:
        """Bytes per second from now on, for about `seconds`; longer on a device so slow that it takes two reads."""
        first = len(self.done)
        time.sleep(seconds)
        return self.rate_since(first)

    def rate_since(self, first: int) -> float:
        """Bytes per second of the reads from number `first` on, waiting until they are two."""
        while len(self.done) < first + 2 and not self.failed:
            time.sleep(0.01)
        if self.failed:
            raise self.failed[0]
        return slope(self.done[first:])


def slope(done: Sequence[tuple[float, int]]) -> float:
    """Bytes per second from (second, bytes so far) of at least two reads, by least squares: what many lanes have in
    flight at the ends counts neither for nor against them."""
    seconds, total = np.array(done, np.float64).T
    return float(np.polyfit(seconds - seconds[0], total, 1)[0])


@contextmanager
def reading(file: PoolFile, nbytes: int, lanes: int) -> Iterator[Reads]:
    """Reads go on while the block runs."""
    size = min(nbytes, file.nbytes // ALIGNMENT * ALIGNMENT)
    buffers = HostMemory()
    stop, lock, next_ = threading.Event(), threading.Lock(), 0
    reads = Reads()

    def lane(memory: memoryview) -> None:
        nonlocal next_
        while not stop.is_set():
            with lock:
                at, next_ = next_, next_ + size
                if next_ + size > file.nbytes:
                    next_ = 0
            try:
                file.read_into(memory, at)
            except BaseException as error:
                reads.failed.append(error)
                return
            with lock:
                reads.done.append((time.perf_counter(), size * (len(reads.done) + 1)))

    try:
        memories = [buffers.allocate(size, f"read {number}").memory() for number in range(lanes)]
        threads = [threading.Thread(target=lane, args=(memory,), daemon=True) for memory in memories]
        for thread in threads:
            thread.start()
        try:
            yield reads
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if reads.failed:
            raise reads.failed[0]
    finally:
        buffers.close()
