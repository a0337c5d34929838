"""Direct reads for memory that takes none: into a buffer of the reading thread's, and from there.

The kernel maps dma-bufs, which is what NPUs share memory as, without pages that a direct read could pin: EFAULT.
"""

from __future__ import annotations

import mmap
import os
import threading

PIECE = 1 << 20  # stays in a core's cache between the read and the copy
REASON = "through a buffer: direct reads into this memory are refused"


class Staging:
    """One buffer per thread. `nbytes`: copied so far."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._own = threading.local()
        self._lock = threading.Lock()

    def read(self, fd: int, memory: memoryview, offset: int) -> int:
        """As os.preadv, at most PIECE bytes. Raises OSError."""
        buffer = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = memoryview(mmap.mmap(-1, PIECE))  # page-aligned
        wanted = min(memory.nbytes, PIECE)
        got = os.preadv(fd, [buffer[:wanted]], offset)
        memory[:got] = buffer[:got]
        with self._lock:
            self.nbytes += got
        return got
