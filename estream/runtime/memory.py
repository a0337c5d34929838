"""Anonymous memory for targets whose memory is the host's."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from estream.errors import TargetError
from estream.runtime.target import Buffer

HUGE = 4 << 20  # bytes from which an allocation asks for huge pages


class HostMemory:
    """Page-aligned, zeroed, committed when touched; all of it is returned by `close`.

    Numpy views and memoryviews of a Buffer point straight into it and must not be used after `close`.
    """

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self.nbytes = 0

    def allocate(self, nbytes: int, label: str) -> Buffer:
        """Raises TargetError when nbytes is not positive or the system refuses."""
        if nbytes <= 0:
            raise TargetError(f"an allocation for {label} must be positive", asked=f"{nbytes} bytes")
        try:
            region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise TargetError(
                f"memory for {label} was refused: {error}",
                asked=f"{nbytes} bytes",
                had=f"{self.nbytes} bytes allocated before",
                next_step="Give a smaller memory budget or a shorter prompt",
            ) from error
        if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            # Weights are read once per call: with 4 KiB pages, expert dispatches took a quarter longer.
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                region.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(region)
        self.nbytes += nbytes
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        return Buffer(address, nbytes)

    def close(self) -> None:
        while self._maps:
            self._maps.pop().close()
        self.nbytes = 0
