"""Banks and prefetcher as a pure state machine: no threads, files or clocks.

Events come in as method calls (`begin`, `routes`, `next_read`, `read_done`, `acquire`, `release`, `abort`); what to
read next, and which bank the compute may use, come out. The caller serialises the calls. The same code runs under the
lane threads (stream.py) and on a virtual clock (virtual.py).

The compute may hold several groups and releases each by itself, in any order, but it gets no further one while it holds
all banks but one (with one bank: that one). So flash always has a bank to fill, and what the compute is told depends on
the order of its own calls, never on how fast reads are.

Why it cannot deadlock, with one bank too: groups are read in pool order and handed out in pool order, so a bank that is
Filling or Ready holds a group that the compute was not given yet. If the compute is told to WAIT for a group that was
not started, some bank is not InUse; it holds no group before the wanted one and, as groups are started in order, none
after it: it is Available or about to be (an unneeded group being finished). If the compute is told that it is STARVED,
it holds at least one group, whose dispatches wait for nothing but the compute itself.

Pinned groups, the first ones of every layer, have a home bank each. A home is filled once, with all panels of its
group, and is Ready from then on, also in later prefills: it goes InUse and Ready again. No such group takes a bank of
the others or counts among those that the compute holds, and starting one never waits for a bank. So the above stays
true of the others, and a pinned one that the compute WAITs for is started as soon as its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from estream.errors import FlashError, UsageError
from estream.flash.checks import check_routes
from estream.flash.groups import Homes, cut
from estream.flash.states import Answer, BankState, Counters, Load, Read
from estream.package.layout import PoolLayout

MODES = ("before-routing", "after-routing", "on-demand")


class Machine:
    """`group` panels per bank (clipped to a layer), `banks`, at most `lanes` stripes per contiguous group; the first
    `pinned` groups of every layer (clipped likewise) have banks of their own: `homes`.

    `check`: a group whose reads are done stays Filling until `check_done`, so that the caller can verify its bytes.
    `on_bank(bank, state, load)` is called at every change of a bank's state (load None when Available).
    Raises UsageError for values that cannot be meant.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        group: int,
        banks: int,
        lanes: int,
        mode: str = "before-routing",
        check: bool = False,
        pinned: int = 0,
        on_bank: Callable[[int, BankState, Load | None], None] | None = None,
    ) -> None:
        for word, value in (("group", group), ("banks", banks), ("lanes", lanes)):
            if value < 1:
                raise UsageError(f"{word} must be at least 1", asked=value)
        if pinned < 0:
            raise UsageError("pinned must be at least 0", asked=pinned)
        if mode not in MODES:
            raise UsageError("unknown prefetch mode", asked=mode, next_step=f"Choose one of {', '.join(MODES)}.")
        self.layout = layout
        self.group = min(group, layout.panels_per_layer)
        self.groups_per_layer = -(-layout.panels_per_layer // self.group)
        self.bank_bytes = self.group * layout.panel.panel_bytes
        self.lanes = lanes
        self.mode = mode
        self.homes = Homes(layout, self.group, min(pinned, self.groups_per_layer), banks)
        self.may_hold = max(1, banks - 1)  # paged groups InUse at once
        banks += len(self.homes.sizes)
        self.banks = [BankState.AVAILABLE] * banks
        self.counters = Counters()
        self.running = False  # between begin and end or abort
        self._held: list[Load | None] = [None] * banks  # the load in each bank that is not Available
        self._check = check
        self._on_bank = on_bank
        self._total = len(layout.moe_layers) * self.groups_per_layer
        self._outstanding = 0
        self._reset()

    def _reset(self) -> None:
        self._needed: dict[int, list[tuple[int, ...]]] = {}  # layer -> needed panels of each group
        self._loads: deque[Load] = deque()  # Filling and Ready, without dropped ones, in pool order
        self._fresh: set[int] = set()  # pinned groups that were started in this prefill
        self._striping: Load | None = None  # the load that still has stripes to hand out
        self._next = 0  # groups count position * groups_per_layer + index: next one to start reading,
        self._compute = 0  # next one to hand out,
        self._demanded = -1  # the one that the compute asked for

    @property
    def quiet(self) -> bool:
        """No read and no check is outstanding."""
        return self._outstanding == 0

    @property
    def holding(self) -> int:
        """Paged groups that the compute holds."""
        return self.banks[: self.homes.paging].count(BankState.IN_USE)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned groups that are in memory."""
        full = (BankState.READY, BankState.IN_USE)
        states = self.banks[self.homes.paging :]
        return sum(size for size, state in zip(self.homes.sizes, states, strict=True) if state in full)

    @property
    def finished(self) -> bool:
        """All groups of all layers were handed out."""
        return self._compute == self._total

    def begin(self, mode: str | None = None) -> None:
        """Starts a prefill at the first group; `mode`: from now on. Raises FlashError if the last one was neither ended
        nor aborted."""
        if self.running or not self.quiet:
            raise FlashError("a prefill is already running on this stream", next_step="End or abort it first.")
        self.mode = mode or self.mode
        self._reset()
        for load in self._held[self.homes.paging :]:
            if load is not None:
                load.needed = None
        self.counters = Counters()
        self.running = True

    def routes(self, layer: int, needed: np.ndarray) -> None:
        """Which panels of `layer` have tokens: bool [panels_per_layer]. Once per layer, before its groups are acquired.

        Groups of the layer without needed panels: not started ones are never read, Ready ones give their bank back
        now, Filling ones when the stripes that were started are done; pinned ones go on. Raises FlashError for a
        second call, a wrong shape, or a layer without experts.
        """
        self._must_run()
        panels = check_routes(self.layout, layer, needed, self._needed)
        position = self.layout.moe_layers.index(layer)
        groups = [
            tuple(int(p) for p in panels[(panels >= first) & (panels < first + self.group)])
            for first in range(0, self.groups_per_layer * self.group, self.group)
        ]
        self._needed[layer] = groups
        self.counters.panels_needed += len(panels)
        for number, group in enumerate(groups, position * self.groups_per_layer):
            home = self.homes.bank(number)
            if home is not None and (load := self._held[home]) is not None:
                load.needed = group
            if not group:
                started = number in self._fresh if home is not None else number < self._next
                self.counters.groups_dropped += started
                self.counters.groups_skipped += not started
        for load in [load for load in self._loads if load.layer == layer]:
            load.needed = groups[load.index]
            if not load.needed:
                self._drop(load)

    def _drop(self, load: Load) -> None:
        self._loads.remove(load)
        load.dropped = True
        load.pending.clear()
        if self._striping is load:
            self._striping = None
        if load.outstanding == 0:  # Ready, or between two stripes
            self._set(load.bank, BankState.AVAILABLE)

    def next_read(self) -> Read | None:
        """A lane is idle: the next stripe to read, in pool order, or None if there is nothing to do now."""
        if not self.running:
            return None
        load = self._striping or self._start_group()
        if load is None:
            return None
        read = load.pending.popleft()
        self._striping = load if load.pending else None
        load.outstanding += 1
        self._outstanding += 1
        self.counters.reads += 1
        return read

    def _start_group(self) -> Load | None:
        """Puts the next group that may be read now into an Available bank."""
        while self._next < self._total:
            position, index = divmod(self._next, self.groups_per_layer)
            layer = self.layout.moe_layers[position]
            groups = self._needed.get(layer)
            home = self.homes.bank(self._next)
            if (groups is not None and not groups[index]) or (home is not None and self._held[home] is not None):
                self._next += 1  # skipped, which routes() counts, or in memory
                continue
            if groups is None and self.mode != "before-routing":
                return None
            if self.mode == "on-demand" and self._next != self._demanded:
                return None
            if home is None and BankState.AVAILABLE not in self.banks[: self.homes.paging]:
                return None
            bank = self.banks.index(BankState.AVAILABLE) if home is None else home
            first = index * self.group
            last = min(first + self.group, self.layout.panels_per_layer)
            needed = None if groups is None else groups[index]
            read = tuple(range(first, last)) if needed is None or home is not None else needed
            load = Load(layer, index, first, bank, read, needed)
            cut(self.layout, load, self.lanes)
            self.counters.panels_read += len(read)
            if home is None:
                self._loads.append(load)
            else:
                self._fresh.add(self._next)
            self._next += 1
            self._set(bank, BankState.FILLING, load)
            return load
        return None

    def read_done(self, read: Read) -> Load | None:
        """`read` is complete. Returns the load if its bytes are now to be checked: answer with `check_done`."""
        self.counters.bytes_read += read.nbytes
        self._less(read.load)
        load = read.load
        if not self.running or load.pending or load.outstanding:
            return None
        if self._check and not load.dropped:
            load.outstanding += 1
            self._outstanding += 1
            return load
        self._filled(load)
        return None

    def check_done(self, load: Load) -> None:
        """The bytes of `load` are as they should be."""
        self._less(load)
        if self.running:
            self._filled(load)

    def failed(self, load: Load) -> None:
        """A read or the check of `load` failed: its bank never becomes Ready, nothing more is read until `begin`."""
        self._less(load)
        self.abort()

    def _less(self, load: Load) -> None:
        load.outstanding -= 1
        self._outstanding -= 1
        if not self.running and load.outstanding == 0:
            self._set(load.bank, BankState.AVAILABLE)

    def _filled(self, load: Load) -> None:
        if load.dropped:
            self._set(load.bank, BankState.AVAILABLE)
        else:
            self._set(load.bank, BankState.READY, load)

    def acquire(self, layer: int) -> Load | Answer:
        """The compute asks for the next needed group of `layer`: the load (its bank is InUse until `release`), WAIT,
        STARVED, or DONE. Raises FlashError if that is out of order or before the layer's routes."""
        self._must_run()
        if layer not in self.layout.moe_layers:
            raise FlashError(f"layer {layer} has no experts in the pool", had=f"layers {list(self.layout.moe_layers)}")
        position = self.layout.moe_layers.index(layer)
        begin, end = position * self.groups_per_layer, (position + 1) * self.groups_per_layer
        if not begin <= self._compute <= end:
            turn = "none, all are done" if self.finished else self.layout.moe_layers[self._compute // (end - begin)]
            raise FlashError("groups are computed in pool order", asked=f"layer {layer}", had=f"turn of layer {turn}")
        if layer not in self._needed:
            raise FlashError(f"the routes of layer {layer} are not known", next_step="Call routes() before groups().")
        needed = self._needed[layer]
        while self._compute < end and not needed[self._compute - begin]:
            self._compute += 1
        if self._compute == end:
            return Answer.DONE
        self._demanded = self._compute
        home = self.homes.bank(self._compute)
        if home is None and self.holding == self.may_hold:
            return Answer.STARVED
        load = self._held[home] if home is not None else self._loads[0] if self._loads else None
        if load is None or self.banks[load.bank] is not BankState.READY:
            return Answer.WAIT
        if home is None:
            self._loads.popleft()
        self._compute += 1
        self._set(load.bank, BankState.IN_USE, load)
        return load

    def release(self, load: Load) -> None:
        """The last dispatch that used this group has returned: its bank is Available, a home Ready."""
        if self.banks[load.bank] is not BankState.IN_USE or self._held[load.bank] is not load:
            raise FlashError(f"group {load.index} of layer {load.layer} is not in use", next_step="Release it once.")
        self._give_back(load)

    def end(self) -> None:
        """The prefill is complete; wait for `quiet` afterwards. Raises FlashError if groups are left or
        still in use."""
        self._must_run()
        if not self.finished or BankState.IN_USE in self.banks:
            layer = self.layout.moe_layers[min(self._compute, self._total - 1) // self.groups_per_layer]
            raise FlashError(f"the prefill ends before layer {layer} is done", next_step="Abort it instead.")
        self.abort()

    def abort(self) -> None:
        """No new reads. Banks are Available at once, except those with outstanding reads: when these have returned.
        Homes whose group is complete keep it."""
        if not self.running:
            return
        self.running = False
        for load in self._held:
            if load is not None and load.outstanding == 0:
                self._give_back(load)

    def _give_back(self, load: Load) -> None:
        state = self.banks[load.bank]
        if load.bank < self.homes.paging or state is BankState.FILLING:
            self._set(load.bank, BankState.AVAILABLE)
        elif state is BankState.IN_USE:
            self._set(load.bank, BankState.READY, load)

    def _set(self, bank: int, state: BankState, load: Load | None = None) -> None:
        self.banks[bank] = state
        self._held[bank] = load
        if self._on_bank is not None:
            self._on_bank(bank, state, load)

    def _must_run(self) -> None:
        if not self.running:
            raise FlashError("no prefill is running on this stream", next_step="Call begin() first.")
