"""The expert pool as the layer loop sees it: groups arriving in banks, read by Q lane threads ahead of the compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from estream.errors import ClosedError, FlashError
from estream.flash.checks import Checksum, Prepare, attempt, check_banks, check_panel
from estream.flash.machine import Machine
from estream.flash.pool import Source
from estream.flash.states import Answer, BankState, Counters, Load, Read, ReadyGroup
from estream.package.layout import PoolLayout
from estream.runtime.target import Buffer

if TYPE_CHECKING:
    from estream.telemetry.trace import Trace


class ExpertStream:
    """Q lanes read the pool group by group into `banks`; `groups(layer)` hands them to the one compute thread.

        stream.begin()
        for each layer:
            stream.routes(layer, needed)
            for ready in stream.groups(layer):
                ...                                     # dispatches over ready.panels
                ready.release()                         # now, or after groups that came later
        stream.end()                                    # or abort(), after anything went wrong; then begin() again

    banks: page-aligned, each of at least `group` panels (clipped to a layer's). mode: one of machine.MODES. homes: the
    same for pinned groups, the first ones of each layer, layer by layer: each is read once and stays; a home of a
    layer's last, shorter group needs no more than it. `kept_bytes`: of those that are in memory.
    checksum: (layer, panel) -> CRC-32, to verify every group that is read, or None. prepare: called once with the bytes
    of every panel that was read and verified, in a lane, before its group is Ready. clock: seconds.
    Raises UsageError for values that cannot be meant, FlashError for banks that do not fit.
    """

    def __init__(
        self,
        source: Source,
        layout: PoolLayout,
        banks: Sequence[Buffer],
        *,
        group: int,
        lanes: int,
        mode: str = "before-routing",
        homes: Sequence[Buffer] = (),
        checksum: Checksum | None = None,
        prepare: Prepare | None = None,
        clock: Callable[[], float] = time.perf_counter,
        trace: Trace | None = None,
    ) -> None:
        self._trace = trace
        self._clock = clock
        self._machine = Machine(
            layout,
            group=group,
            banks=len(banks),
            lanes=lanes,
            mode=mode,
            check=checksum is not None or prepare is not None,
            pinned=-(-len(homes) // max(1, len(layout.moe_layers))),
            on_bank=None if trace is None else self._trace_bank,
        )
        panel = layout.panel.panel_bytes
        needs = [self._machine.bank_bytes] * len(banks) + self._machine.homes.sizes
        every = check_banks([*banks, *homes], needs)
        self._source = source
        self._layout = layout
        self._checksum = checksum
        self._prepare = prepare
        self._memory = [bank.memory() for bank in every]
        # The fixed set of addresses that the compute may ever bind.
        self._slots = [[bank.part(at, panel) for at in range(0, bank.nbytes, panel)] for bank in every]
        self._bank_since: list[tuple[str, float] | None] = [None] * len(every)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # lanes: there may be something to read
        self._news = threading.Condition(self._lock)  # compute: a group is Ready, a lane failed, or all is quiet
        self._error: FlashError | None = None
        self._active = False  # between begin and the return of end or abort
        self._closed = False
        self._epoch = 0  # tells a generator of an aborted prefill from one of this prefill
        self._reading = 0
        self._reading_since = 0.0
        self._lanes = [
            threading.Thread(target=self._lane, args=(lane,), name=f"estream-lane-{lane}", daemon=True)
            for lane in range(lanes)
        ]
        try:
            for thread in self._lanes:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise FlashError(f"a lane thread cannot be started: {error}", next_step="Give fewer --lanes.") from error

    @property
    def counters(self) -> Counters:
        """Of the running or the last prefill."""
        return self._machine.counters

    @property
    def kept_bytes(self) -> int:
        """Bytes of pinned groups that are in memory."""
        with self._lock:
            return self._machine.pinned_bytes

    @property
    def verifies(self) -> bool:
        """Every group is compared with its checksums."""
        return self._checksum is not None

    def begin(self, mode: str | None = None) -> None:
        """Starts a prefill, in a mode of its own if one is given; in before-routing the lanes start to read now.

        Raises FlashError if a prefill is running, or if the file has changed since it was opened."""
        with self._lock:
            self._must_be_open()
            if self._active:
                raise FlashError("a prefill is already running on this stream", next_step="End or abort it first.")
            self._source.check_unchanged()
            self._machine.begin(mode)
            self._active = True
            self._epoch += 1
            self._work.notify_all()

    def routes(self, layer: int, needed: np.ndarray) -> None:
        """Which panels of `layer` have tokens: bool [panels_per_layer]. Raises FlashError, also a lane's failure."""
        with self._lock:
            self._must_be_well()
            self._machine.routes(layer, needed)
            self._work.notify_all()

    def groups(self, layer: int, starved: Callable[[], None] | None = None) -> Iterator[ReadyGroup]:
        """The layer's groups with needed panels, in pool order; waits until each is Ready.

        starved: called when the loop holds as many groups as it may (all banks but one, at least one); it must release
        some of them. None: the loop releases each group before it advances.
        Raises FlashError: a lane's failure, a damaged panel, a layer out of order, nothing released."""
        epoch = self._epoch
        while (load := self._next_group(layer, epoch)) is not Answer.DONE:
            if isinstance(load, Load):
                slots = self._slots[load.bank]
                panels = tuple((panel, slots[panel - load.first]) for panel in load.needed or ())
                yield ReadyGroup(layer, load.index, load.bank, panels, partial(self._release, load, epoch))
                continue
            if starved is not None:
                starved()
            if self._machine.holding == self._machine.may_hold:
                raise FlashError(f"layer {layer}: groups in use fill the arena", next_step="Release them.")

    def _release(self, load: Load, epoch: int) -> None:
        with self._lock:
            self._must_be_well(epoch)
            self._machine.release(load)
            self._work.notify_all()

    def _next_group(self, layer: int, epoch: int) -> Load | Answer:
        with self._lock:
            since: float | None = None
            try:
                while True:
                    self._must_be_well(epoch)
                    answer = self._machine.acquire(layer)
                    if answer is not Answer.WAIT:
                        return answer
                    if since is None:
                        since = self._clock()
                        self._work.notify_all()  # on-demand: this is the demand
                    self._news.wait()
            finally:
                self._count_wait(since, f"wait for layer {layer}")

    def _count_wait(self, since: float | None, name: str) -> None:
        if since is not None:
            now = self._clock()
            self._machine.counters.wait_s += now - since
            if self._trace is not None:
                self._trace.span("compute", name, since, now)

    def end(self) -> None:
        """The prefill is complete. Waits for reads of groups that turned out not to be needed.

        Raises FlashError if groups are left (abort then), or if a lane failed meanwhile."""
        with self._lock:
            self._must_be_well()
            self._machine.end()
            self._drain("wait for the last reads")
            error, self._error = self._error, None
            self._active = False
        if error is not None:
            raise error

    def abort(self) -> None:
        """Gives the prefill up from any state: waits for outstanding reads, makes all banks Available, forgets the
        failure, if any. Interrupted or called twice it does no harm. Buffers handed out may not be used any more."""
        with self._lock:
            self._epoch += 1
            self._machine.abort()
            self._drain("wait for the aborted reads")
            self._error = None
            self._active = False

    def _drain(self, name: str) -> None:
        since = None if self._machine.quiet else self._clock()
        try:
            while not self._machine.quiet:
                self._news.wait()
        finally:
            self._count_wait(since, name)

    def close(self) -> None:
        """Ends all lane threads after their outstanding reads. Twice is harmless. Source and banks stay open."""
        with self._lock:
            self._closed = True
            self._epoch += 1
            self._machine.abort()
            self._work.notify_all()
            self._news.notify_all()
        for thread in self._lanes:
            if thread.ident is not None:  # was started
                thread.join()

    def _must_be_open(self) -> None:
        if self._closed:
            raise ClosedError("the expert stream is closed")

    def _must_be_well(self, epoch: int | None = None) -> None:
        self._must_be_open()
        if epoch is not None and epoch != self._epoch:
            raise FlashError("these groups belong to a prefill that was given up")
        if self._error is not None:
            raise self._error

    def _lane(self, lane: int) -> None:
        """One lane: takes a stripe, reads it, says so. Nothing that goes wrong may end the thread."""
        while (read := self._take()) is not None:
            start = self._clock()
            error = attempt(self._read, read)
            if self._trace is not None:
                name = f"layer {read.load.layer} group {read.load.index}"
                self._trace.span(f"lane {lane}", name, start, self._clock(), {"bytes": read.nbytes})
            check = self._finish(read, error)
            if check is not None:
                error = attempt(self._complete, check)
                with self._lock:
                    if error is None:
                        self._machine.check_done(check)
                    else:
                        self._fail(check, error)
                    self._tell()

    def _take(self) -> Read | None:
        with self._lock:
            while not self._closed:
                read = self._machine.next_read()
                if read is not None:
                    if self._reading == 0:
                        self._reading_since = self._clock()
                    self._reading += 1
                    return read
                self._work.wait()
        return None

    def _read(self, read: Read) -> None:
        memory = self._memory[read.load.bank]
        self._source.read_into(memory[read.bank_offset : read.bank_offset + read.nbytes], read.offset)

    def _complete(self, load: Load) -> None:
        """Verifies and prepares the panels of a load whose reads are done."""
        memory, size = self._memory[load.bank], self._layout.panel.panel_bytes
        for panel in load.read:
            piece = memory[(panel - load.first) * size :][:size]
            if self._checksum is not None:
                check_panel(piece, self._layout, load.layer, panel, self._checksum)
            if self._prepare is not None:
                self._prepare(piece)

    def _finish(self, read: Read, error: FlashError | None) -> Load | None:
        """Takes the outcome of a read. Returns the load if this lane must now verify or prepare it."""
        with self._lock:
            self._reading -= 1
            if self._reading == 0:
                self._machine.counters.busy_s += self._clock() - self._reading_since
            check = None
            if error is None:
                check = self._machine.read_done(read)
            else:
                self._fail(read.load, error)
            self._tell()
            return check

    def _fail(self, load: Load, error: FlashError) -> None:
        self._machine.failed(load)
        if self._error is None:
            self._error = error

    def _tell(self) -> None:
        self._work.notify_all()
        self._news.notify_all()

    def _trace_bank(self, bank: int, state: BankState, load: Load | None) -> None:
        """Under the lock: ends the span of the bank's last state and starts the next."""
        now, last = self._clock(), self._bank_since[bank]
        if last is not None and self._trace is not None:
            self._trace.span(f"bank {bank}", last[0], last[1], now)
        self._bank_since[bank] = None if load is None else (f"{state.value} layer {load.layer} group {load.index}", now)
