"""Pages of a file, used one after the other in every prefill, in a few slots that a lane fills ahead of their use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from estream.errors import ClosedError, FlashError
from estream.flash.checks import attempt
from estream.flash.pool import Source
from estream.flash.ranges import PIECE
from estream.package.layout import ALIGNMENT
from estream.runtime.target import Buffer

if TYPE_CHECKING:
    from estream.telemetry.trace import Trace


@dataclass(frozen=True)
class Page:
    """What is in memory together. `ranges`: (offset in the slot, offset in the file, bytes), multiples of 16 KiB.

    finish: called in the lane with the slot's memory, uint8, when all of it was read: verifies and prepares it.
    """

    name: str
    ranges: tuple[tuple[int, int, int], ...]
    finish: Callable[[memoryview], None]

    @property
    def nbytes(self) -> int:
        """Bytes of its slot that it uses."""
        return max(at + nbytes for at, _, nbytes in self.ranges)


class Pages:
    """Page p lies in slot p % len(slots) whenever it is in memory: addresses are known when the engine opens.

        pages.begin(count)      # of this prefill: the first `count` pages; the lane starts to read
        pages.enter(p)          # 0, 1, ...: waits for page p, and gives the page before it up
        pages.end()             # or abort(), after anything went wrong; then begin() again

    A page's bytes may be used from its `enter` until the next one's. Counters of the running or the last prefill:
    bytes_read, and wait_s, in which the compute waited.
    Raises FlashError for slots that do not fit.
    """

    def __init__(
        self,
        source: Source,
        pages: Sequence[Page],
        slots: Sequence[Buffer],
        *,
        clock: Callable[[], float] = time.perf_counter,
        trace: Trace | None = None,
    ) -> None:
        for number, page in enumerate(pages):
            if any(value % ALIGNMENT for one in page.ranges for value in one):
                raise FlashError(f"{page.name} is not aligned to {ALIGNMENT}", had=page.ranges)
            if page.nbytes > slots[number % len(slots)].nbytes:
                had = f"{slots[number % len(slots)].nbytes} bytes"
                raise FlashError(f"the slot of {page.name} is too small", asked=f"{page.nbytes} bytes", had=had)
        self._source, self._pages, self._clock, self._trace = source, tuple(pages), clock, trace
        self._memory = [slot.memory() for slot in slots]
        self.bytes_read = 0
        self.wait_s = 0.0
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the lane: there may be something to read
        self._news = threading.Condition(self._lock)  # the compute: a page is there, the lane failed, or it is quiet
        self._error: FlashError | None = None
        self._active = self._closed = self._reading = False
        self._count = self._loaded = 0  # pages of this prefill, and how many of them were read
        self._current = -1  # the page in use; those before it are given up
        self._lane = threading.Thread(target=self._run, name="estream-dense", daemon=True)
        try:
            self._lane.start()
        except RuntimeError as error:
            raise FlashError(f"a lane thread cannot be started: {error}", next_step="Use --dense resident.") from error

    def begin(self, count: int) -> None:
        """Starts a prefill that uses the first `count` pages, each of them.

        Raises FlashError if a prefill is running, or if the file has changed since it was opened."""
        with self._lock:
            self._must_be_open()
            if self._active:
                raise FlashError("a prefill is already running on these pages", next_step="End or abort it first.")
            self._source.check_unchanged()
            self._count, self._loaded, self._current = count, 0, -1
            self.bytes_read, self.wait_s = 0, 0.0
            self._active = True
            self._work.notify_all()

    def enter(self, number: int) -> None:
        """Waits until page `number` is in its slot; that of the page before it is read anew. Again is harmless.

        Raises FlashError: the lane's failure, a damaged page, a page out of order."""
        with self._lock:
            self._must_be_well()
            if number == self._current:
                return
            if number != self._current + 1 or number >= self._count:
                had = f"page {self._current} of {self._count}"
                raise FlashError("pages are used in order", asked=f"page {number}", had=had)
            self._current = number
            self._work.notify_all()
            since = None if self._loaded > number else self._clock()
            try:
                while self._loaded <= number:
                    self._news.wait()
                    self._must_be_well()
            finally:
                self._count_wait(since, f"wait for {self._pages[number].name}")

    def end(self) -> None:
        """The prefill is complete. Raises FlashError if pages are left: abort then."""
        with self._lock:
            self._must_be_well()
            if self._current != self._count - 1:
                page = self._pages[self._current + 1].name
                raise FlashError(f"the prefill ends before {page}", next_step="Abort it instead.")
            self._active = False

    def abort(self) -> None:
        """Gives the prefill up from any state: waits for an outstanding read and forgets the failure, if any.
        Interrupted or called twice it does no harm."""
        with self._lock:
            self._active = False
            since = self._clock() if self._reading else None
            try:
                while self._reading:
                    self._news.wait()
            finally:
                self._count_wait(since, "wait for an aborted read")
            self._error = None

    def close(self) -> None:
        """Ends the lane after its outstanding read. Twice is harmless. Source and slots stay open."""
        with self._lock:
            self._closed = True
            self._active = False
            self._work.notify_all()
            self._news.notify_all()
        self._lane.join()

    def _must_be_open(self) -> None:
        if self._closed:
            raise ClosedError("the pages are closed")

    def _must_be_well(self) -> None:
        self._must_be_open()
        if self._error is not None:
            raise self._error
        if not self._active:
            raise FlashError("no prefill is running on these pages", next_step="Call begin() first.")

    def _count_wait(self, since: float | None, name: str) -> None:
        if since is not None:
            now = self._clock()
            self.wait_s += now - since
            if self._trace is not None:
                self._trace.span("compute", name, since, now)

    def _run(self) -> None:
        """The lane: takes a page, reads it, says so. Nothing that goes wrong may end the thread."""
        while (number := self._take()) is not None:
            start = self._clock()
            error = attempt(self._read, number)
            if self._trace is not None:
                self._trace.span("dense lane", self._pages[number].name, start, self._clock())
            with self._lock:
                self._reading = False
                if self._active and error is None:
                    self._loaded += 1
                elif self._active:
                    self._error = error
                self._news.notify_all()

    def _take(self) -> int | None:
        """The next page whose slot is free, or None when the pages are closed."""
        with self._lock:
            while not self._closed:
                free = max(self._current, 0) + len(self._memory)  # pages below this one have a slot now
                if self._active and self._error is None and self._loaded < min(self._count, free):
                    self._reading = True
                    return self._loaded
                self._work.wait()
        return None

    def _read(self, number: int) -> None:
        page, memory = self._pages[number], self._memory[number % len(self._memory)]
        for at, offset, nbytes in page.ranges:
            for start in range(0, nbytes, PIECE):
                if not self._active:  # given up: what was read is not used
                    return
                piece = min(PIECE, nbytes - start)
                self._source.read_into(memory[at + start : at + start + piece], offset + start)
                self.bytes_read += piece
        page.finish(memory)
