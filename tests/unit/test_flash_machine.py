"""The flash state machine under random schedules: whatever the order of events, the invariants hold and it finishes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream.errors import FlashError, UsageError
from estream.flash.machine import MODES, Machine
from estream.flash.states import Answer, BankState, Load, Read
from estream.flash.virtual import simulate
from estream.package.layout import ALIGNMENT, PanelLayout, PoolLayout

LEGAL = {
    (BankState.AVAILABLE, BankState.FILLING),
    (BankState.FILLING, BankState.READY),
    (BankState.FILLING, BankState.AVAILABLE),  # dropped, failed or aborted
    (BankState.READY, BankState.IN_USE),
    (BankState.READY, BankState.AVAILABLE),  # not needed after all, or aborted
    (BankState.IN_USE, BankState.AVAILABLE),
}
HOME = LEGAL - {(BankState.READY, BankState.AVAILABLE), (BankState.IN_USE, BankState.AVAILABLE)}
HOME |= {(BankState.IN_USE, BankState.READY)}  # a home that was filled is never filled again


def pool(experts: int = 5, panels: int = 1, layers: tuple[int, ...] = (1, 2, 4)) -> PoolLayout:
    layout = PoolLayout(PanelLayout(64, 32, "f32"), panels, experts, layers)
    assert layout.panel.panel_bytes == 2 * ALIGNMENT
    return layout


class Driver:
    """Lanes and compute in random order; a model of the banks' bytes, and every invariant checked at every step."""

    def __init__(
        self, machine: Machine, needed: dict[int, np.ndarray], random: Random, before: Driver | None = None
    ) -> None:
        """before: of the last prefill, whose bytes are still there."""
        self.machine, self.needed, self.random = machine, needed, random
        machine._on_bank = self.bank_changed
        self.states = list(machine.banks)
        self.paging = machine.homes.paging
        # bank offset -> file offset, by 16 KiB
        self.content: list[dict[int, int]] = before.content if before else [{} for _ in machine.banks]
        self.outstanding: list[Read] = []
        self.checks: list[Load] = []
        self.blocks: Counter[int] = Counter()  # file offset -> times read
        self.delivered: list[tuple[int, int]] = []
        self.layers = iter(machine.layout.moe_layers)
        self.layer: int | None = None
        self.held: list[Load] = []
        self.done = False

    def bank_changed(self, bank: int, state: BankState, load: Load | None) -> None:
        assert (self.states[bank], state) in (LEGAL if bank < self.paging else HOME)
        assert load is None or load.bank == bank
        self.states[bank] = state

    def lane_starts(self) -> None:
        read = self.machine.next_read()
        if read is None:
            return
        assert self.machine.banks[read.load.bank] is BankState.FILLING
        assert read.offset % ALIGNMENT == read.nbytes % ALIGNMENT == read.bank_offset % ALIGNMENT == 0
        assert read.nbytes > 0 and read.bank_offset + read.nbytes <= self.machine.bank_bytes
        base = self.machine.layout.panel_offset(read.load.layer, read.load.first)
        assert read.offset - base == read.bank_offset  # a panel's place in the bank follows from its number
        self.outstanding.append(read)

    def lane_ends(self) -> None:
        read = self.outstanding.pop(self.random.randrange(len(self.outstanding)))
        assert self.machine.banks[read.load.bank] is BankState.FILLING
        for at in range(0, read.nbytes, ALIGNMENT):
            self.blocks[read.offset + at] += 1
            self.content[read.load.bank][read.bank_offset + at] = read.offset + at
        check = self.machine.read_done(read)
        if check is not None:
            self.checks.append(check)

    def check_ends(self) -> None:
        load = self.checks.pop(self.random.randrange(len(self.checks)))
        assert self.machine.banks[load.bank] is BankState.FILLING
        self.machine.check_done(load)

    def compute(self) -> bool:
        """One step of the compute, which may hold groups and releases them in any order; False if it waits."""
        if self.held and self.random.random() < 0.5:
            self.release()
            return True
        if self.layer is None:
            self.layer = next(self.layers, None)
            if self.layer is not None:
                self.machine.routes(self.layer, self.needed[self.layer])
            elif self.held:
                self.release()
            else:
                self.done = True
            return True
        answer = self.machine.acquire(self.layer)
        if isinstance(answer, Load):
            self.delivered += [(answer.layer, panel) for panel in answer.needed or ()]
            self.held.append(answer)
        elif answer is Answer.STARVED:
            assert sum(load.bank < self.paging for load in self.held) == max(1, self.paging - 1)
            self.release()
        elif answer is Answer.DONE:
            self.layer = None
        return answer is not Answer.WAIT

    def release(self) -> None:
        load = self.held.pop(self.random.randrange(len(self.held)))
        self.take(load)
        self.machine.release(load)

    def take(self, load: Load) -> None:
        """The bytes are those of the panels, after any time that the bank was in use."""
        layout, size = self.machine.layout, self.machine.layout.panel.panel_bytes
        assert load.needed
        for panel in load.needed:
            for at in range(0, size, ALIGNMENT):
                there = self.content[load.bank][(panel - load.first) * size + at]
                assert there == layout.panel_offset(load.layer, panel) + at

    def step(self, lanes: int) -> None:
        """One random event that is possible now; fails if there is none: a deadlock."""
        actions: list[Callable[[], object]] = []
        if len(self.outstanding) < lanes:
            actions.append(self.lane_starts)
        if self.outstanding:
            actions.append(self.lane_ends)
        if self.checks:
            actions.append(self.check_ends)
        if not self.done:
            actions.append(self.compute)
        self.random.choice(actions)()
        assert sum(state is BankState.IN_USE for state in self.states) == len(self.held)

    def progress(self) -> tuple[object, ...]:
        return (*map(len, (self.outstanding, self.checks, self.delivered, self.held)), self.layer, self.done)

    def run(self, lanes: int) -> None:
        idle = 0
        while not self.done:
            before = self.progress()
            self.step(lanes)
            after = self.progress()
            idle = idle + 1 if before == after else 0
            if idle > 200:  # no event has had an effect: the chance that the one with an effect was not drawn is nil
                pytest.fail(f"deadlock: {self.states}")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Machine, dict[int, np.ndarray], Random, int]:
    panels = draw(st.sampled_from([1, 2, 3]))
    layers = draw(st.sampled_from([(0,), (1, 2, 4)]))
    layout = pool(draw(st.integers(1, 7)), panels, layers)
    lanes = draw(st.integers(1, 4))
    machine = Machine(
        layout,
        group=draw(st.sampled_from([1, 3, 4, 64])),
        banks=draw(st.integers(1, 4)),
        lanes=lanes,
        mode=draw(st.sampled_from(MODES)),
        check=draw(st.booleans()),
        pinned=draw(st.sampled_from([0, 0, 1, 2, 64])),
    )
    bits = st.lists(st.booleans(), min_size=layout.panels_per_layer, max_size=layout.panels_per_layer)
    needed = {layer: np.array(draw(bits), dtype=bool) for layer in layers}
    return machine, needed, Random(draw(st.integers(0, 2**32))), lanes


def pinned_panels(machine: Machine) -> set[tuple[int, int]]:
    """(layer, panel) of everything that lies in a home."""
    found = set()
    for load, state in zip(machine._held[machine.homes.paging :], machine.banks[machine.homes.paging :], strict=True):
        if load is not None and state is not BankState.FILLING:
            found |= {(load.layer, panel) for panel in load.read}
    return found


@settings(max_examples=400, deadline=None, derandomize=True)
@given(cases())
def test_any_schedule_delivers_every_needed_panel_once_and_in_order(
    case: tuple[Machine, dict[int, np.ndarray], Random, int],
) -> None:
    machine, needed, random, lanes = case
    driver = None
    for _ in range(2):  # the second prefill on the same machine
        driver = Driver(machine, needed, random, driver)
        before = pinned_panels(machine)
        machine.begin()
        driver.run(lanes)
        machine.end()
        while driver.outstanding or driver.checks:
            driver.lane_ends() if driver.outstanding else driver.check_ends()
        wanted = [(layer, int(panel)) for layer in needed for panel in np.flatnonzero(needed[layer])]
        assert driver.delivered == wanted
        assert set(driver.blocks.values()) <= {1}
        assert machine.quiet and machine.finished
        assert set(machine.banks[: driver.paging]) == {BankState.AVAILABLE}
        assert machine.pinned_bytes == len(pinned_panels(machine)) * machine.layout.panel.panel_bytes
        for layer, panel in before:  # never read again
            assert machine.layout.panel_offset(layer, panel) not in driver.blocks
        counters = machine.counters
        assert counters.panels_needed == len(wanted)
        assert counters.bytes_read == sum(driver.blocks.values()) * ALIGNMENT
        after = pinned_panels(machine)
        assert before <= after
        of_pinned = [at for at in wanted if at[1] < machine.group * machine.homes.pinned]
        assert after.issuperset(of_pinned)
        if machine.mode != "before-routing":
            # Of pinned groups that are needed for the first time everything, of others what is needed
            read = len(wanted) - len(of_pinned) + len(after - before)
            assert counters.bytes_read == read * machine.layout.panel.panel_bytes
            assert counters.panels_read == read and counters.groups_dropped == 0
        groups = machine.groups_per_layer * len(needed)
        used = sum(
            bool(needed[layer][first : first + machine.group].any())
            for layer in needed
            for first in range(0, machine.layout.panels_per_layer, machine.group)
        )
        assert used + counters.groups_skipped + counters.groups_dropped == groups


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 60), st.booleans())
def test_abort_or_failure_anywhere_leaves_a_usable_machine(
    case: tuple[Machine, dict[int, np.ndarray], Random, int], steps: int, fails: bool
) -> None:
    machine, needed, random, lanes = case
    driver = Driver(machine, needed, random)
    machine.begin()
    for _ in range(steps):
        if not driver.done:
            driver.step(lanes)
    if fails and driver.outstanding:
        machine.failed(driver.outstanding.pop().load)
    else:
        machine.abort()
    assert machine.next_read() is None
    while driver.outstanding or driver.checks:
        assert not machine.quiet
        driver.lane_ends() if driver.outstanding else driver.check_ends()
    assert machine.quiet and set(machine.banks[: driver.paging]) == {BankState.AVAILABLE}
    assert set(machine.banks[driver.paging :]) <= {BankState.AVAILABLE, BankState.READY}
    before = pinned_panels(machine)
    again = Driver(machine, needed, random, driver)  # looks at what an abort has kept
    machine.begin()
    again.run(lanes)
    assert all(machine.layout.panel_offset(*at) not in again.blocks for at in before)
    assert len(again.delivered) == sum(int(mask.sum()) for mask in needed.values())


def reads(machine: Machine) -> list[Read]:
    """All reads that the machine gives out without any of them being done."""
    found = []
    while (read := machine.next_read()) is not None:
        found.append(read)
    return found


def test_a_group_is_cut_into_at_most_q_equal_stripes_in_order() -> None:
    machine = Machine(pool(experts=4), group=4, banks=1, lanes=3)
    machine.begin()
    cut = [(read.bank_offset // ALIGNMENT, read.nbytes // ALIGNMENT) for read in reads(machine)]
    assert cut == [(0, 3), (3, 3), (6, 2)]  # 8 blocks of 16 KiB for 3 lanes


def test_free_lanes_start_the_next_group_when_a_bank_is_available() -> None:
    machine = Machine(pool(), group=1, banks=2, lanes=2)
    machine.begin()
    assert [(read.load.index, read.load.bank) for read in reads(machine)] == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_known_routes_skip_groups_and_read_only_needed_ranges() -> None:
    machine = Machine(pool(experts=6), group=3, banks=2, lanes=1)
    machine.begin()
    machine.routes(1, np.array([0, 0, 0, 1, 0, 1], dtype=bool))
    first, second, third = (machine.next_read() for _ in range(3))
    assert machine.counters.groups_skipped == 1
    assert first is not None and second is not None and third is not None
    assert (first.offset, first.bank_offset) == (machine.layout.panel_offset(1, 3), 0)
    assert (second.offset, second.bank_offset) == (machine.layout.panel_offset(1, 5), 4 * ALIGNMENT)
    assert (third.load.layer, third.load.read) == (2, (0, 1, 2))  # the next layer's routes are not known: all of it


def test_a_ready_group_that_is_not_needed_gives_its_bank_back_at_once() -> None:
    machine = Machine(pool(), group=1, banks=1, lanes=1)
    machine.begin()
    (read,) = reads(machine)
    machine.read_done(read)
    assert machine.banks == [BankState.READY] and machine.next_read() is None
    machine.routes(1, np.array([0, 0, 1, 0, 0], dtype=bool))
    assert machine.banks == [BankState.AVAILABLE]
    assert machine.counters.groups_dropped == 1 and machine.counters.groups_skipped == 3
    (read,) = reads(machine)
    assert read.load.needed == (2,)


def test_a_filling_group_that_is_not_needed_gives_its_bank_back_after_its_reads() -> None:
    machine = Machine(pool(), group=1, banks=1, lanes=2)
    machine.begin()
    first, second = reads(machine)
    machine.routes(1, np.array([0, 1, 0, 0, 0], dtype=bool))
    assert machine.acquire(1) is Answer.WAIT
    machine.read_done(first)
    assert machine.banks == [BankState.FILLING] and machine.next_read() is None
    machine.read_done(second)
    assert machine.banks == [BankState.AVAILABLE]
    assert machine.acquire(1) is Answer.WAIT and len(reads(machine)) == 2


def test_stripes_of_an_unneeded_group_that_were_not_started_are_not_read() -> None:
    machine = Machine(pool(experts=2), group=2, banks=1, lanes=2)
    machine.begin()
    read = machine.next_read()
    assert read is not None and read.load.pending
    machine.routes(1, np.zeros(2, dtype=bool))
    assert machine.next_read() is None  # the bank is still being written to
    machine.read_done(read)
    (first, second) = reads(machine)
    assert first.load.layer == second.load.layer == 2
    machine.read_done(first)
    machine.routes(2, np.zeros(2, dtype=bool))
    machine.read_done(second)
    assert machine.counters.bytes_read == 6 * ALIGNMENT and machine.acquire(1) is Answer.DONE


def test_modes_differ_in_when_they_read() -> None:
    everything = np.ones(5, dtype=bool)
    for mode, at_begin, after_routes, after_acquire in (
        ("before-routing", 2, 2, 2),
        ("after-routing", 0, 2, 2),
        ("on-demand", 0, 0, 1),
    ):
        machine = Machine(pool(), group=1, banks=2, lanes=1, mode=mode)
        machine.begin()
        count = len(reads(machine))
        assert count == at_begin, mode
        machine.routes(1, everything)
        count += len(reads(machine))
        assert count == after_routes, mode
        assert machine.acquire(1) is Answer.WAIT
        count += len(reads(machine))
        assert count == after_acquire, mode


def test_on_demand_does_not_look_ahead_while_a_group_is_in_use() -> None:
    machine = Machine(pool(), group=1, banks=3, lanes=1, mode="on-demand")
    machine.begin()
    machine.routes(1, np.ones(5, dtype=bool))
    machine.acquire(1)
    (read,) = reads(machine)
    machine.read_done(read)
    load = machine.acquire(1)
    assert isinstance(load, Load) and reads(machine) == []
    machine.release(load)
    assert reads(machine) == []


def test_the_compute_may_hold_all_banks_but_one() -> None:
    machine = Machine(pool(), group=1, banks=3, lanes=1)
    machine.begin()
    machine.routes(1, np.ones(5, dtype=bool))
    held = []
    for _ in range(2):
        for read in reads(machine):
            machine.read_done(read)
        load = machine.acquire(1)
        assert isinstance(load, Load)
        held.append(load)
    assert machine.acquire(1) is Answer.STARVED  # whether or not the third bank is Ready
    assert machine.banks == [BankState.IN_USE, BankState.IN_USE, BankState.READY]
    machine.release(held[1])
    third = machine.acquire(1)
    assert isinstance(third, Load) and (third.index, third.bank) == (2, 2)
    machine.release(held[0])
    assert [read.load.bank for read in reads(machine)] == [0, 1]


def test_a_pinned_group_is_read_whole_once() -> None:
    machine = Machine(pool(experts=6, layers=(1,)), group=3, banks=1, lanes=1, mode="after-routing", pinned=1)
    mask = np.array([0, 1, 0, 0, 0, 1], dtype=bool)
    for prefill in range(3):
        machine.begin()
        machine.routes(1, mask)
        given = []
        for _ in range(2):
            for read in reads(machine):
                machine.read_done(read)
            load = machine.acquire(1)
            assert isinstance(load, Load)
            given.append((load.index, load.bank, load.read, load.needed))
            if prefill < 2:
                machine.release(load)
        assert given == [(0, 1, (0, 1, 2), (1,)), (1, 0, (5,), (5,))]
        assert machine.counters.panels_read == (1 if prefill else 4)
        machine.end() if prefill < 2 else machine.abort()
        assert machine.banks == [BankState.AVAILABLE, BankState.READY]
        assert machine.pinned_bytes == 3 * machine.layout.panel.panel_bytes


def test_a_pinned_group_that_is_not_needed_after_all_stays() -> None:
    machine = Machine(pool(experts=4, layers=(1,)), group=1, banks=1, lanes=1, pinned=2)
    machine.begin()
    first = machine.next_read()
    assert first is not None
    machine.read_done(first)
    machine.routes(1, np.array([0, 0, 1, 0], dtype=bool))
    assert machine.acquire(1) is Answer.WAIT
    (second,) = reads(machine)  # pinned group 1 was not started and is not needed
    machine.read_done(second)
    load = machine.acquire(1)
    assert isinstance(load, Load) and load.index == 2
    counters = machine.counters
    assert (counters.groups_dropped, counters.groups_skipped) == (1, 2)
    machine.release(load)
    assert machine.acquire(1) is Answer.DONE
    machine.end()
    assert machine.banks == [BankState.AVAILABLE, BankState.READY, BankState.AVAILABLE]


def test_the_compute_may_hold_pinned_groups_beside_its_share_of_banks() -> None:
    machine = Machine(pool(layers=(1,)), group=1, banks=1, lanes=1, pinned=3)
    machine.begin()
    machine.routes(1, np.ones(5, dtype=bool))
    held: list[Load] = []
    while len(held) < 4:
        for read in reads(machine):
            machine.read_done(read)
        load = machine.acquire(1)
        assert isinstance(load, Load)
        held.append(load)
    assert machine.acquire(1) is Answer.STARVED and machine.holding == machine.may_hold == 1
    with pytest.raises(FlashError, match="before layer 1 is done"):
        machine.end()
    for load in held:
        machine.release(load)


def test_misuse_is_refused() -> None:
    machine = Machine(pool(), group=2, banks=1, lanes=1)
    mask = np.ones(5, dtype=bool)
    with pytest.raises(FlashError, match="no prefill is running"):
        machine.routes(1, mask)
    machine.begin()
    with pytest.raises(FlashError, match="already running"):
        machine.begin()
    with pytest.raises(FlashError, match=r"asked bool \[5\], had bool \[4\]"):
        machine.routes(1, mask[:4])
    with pytest.raises(FlashError, match="int64"):
        machine.routes(1, mask.astype(np.int64))
    with pytest.raises(FlashError, match="layer 3 has no experts"):
        machine.routes(3, mask)
    with pytest.raises(FlashError, match="not known"):
        machine.acquire(1)
    machine.routes(1, mask)
    with pytest.raises(FlashError, match="twice"):
        machine.routes(1, mask)
    with pytest.raises(FlashError, match="pool order"):
        machine.acquire(2)
    with pytest.raises(FlashError, match="before layer 1 is done"):
        machine.end()
    (read,) = reads(machine)
    machine.read_done(read)
    load = machine.acquire(1)
    assert isinstance(load, Load) and machine.acquire(1) is Answer.STARVED
    machine.release(load)
    with pytest.raises(FlashError, match="group 0 of layer 1 is not in use"):
        machine.release(load)
    for change in ({"group": 0}, {"banks": 0}, {"lanes": 0}, {"pinned": -1}, {"mode": "later"}):
        with pytest.raises(UsageError):
            Machine(pool(), **{"group": 1, "banks": 1, "lanes": 1, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "banks", "total", "wait"),
    [
        # 3 layers of 5 groups, 1 s of reading (2 lanes), 1 s of compute per group, 2 s of dense work per layer.
        ("on-demand", 1, 36.0, 15.0),
        ("after-routing", 1, 36.0, 15.0),  # one bank: reading and compute alternate
        ("after-routing", 2, 24.0, 3.0),  # only a layer's first read is waited for
        ("before-routing", 1, 33.0, 12.0),  # a layer's first read hides behind the dense work
        ("before-routing", 2, 21.0, 0.0),
    ],
)
def test_virtual_clock(mode: str, banks: int, total: float, wait: float) -> None:
    machine = Machine(pool(), group=1, banks=banks, lanes=2, mode=mode)
    needed = {layer: np.ones(5, dtype=bool) for layer in machine.layout.moe_layers}
    timeline = simulate(machine, needed, lambda nbytes: nbytes / ALIGNMENT, lambda load: 1.0, lambda layer: 2.0)
    assert (timeline.total_s, timeline.wait_s, timeline.busy_s) == (total, wait, 15.0)
    assert [(step.layer, step.index) for step in timeline.steps] == [(at, i) for at in (1, 2, 4) for i in range(5)]
    assert all(step.end_s - step.start_s == 1.0 for step in timeline.steps)


@pytest.mark.parametrize("mode", MODES)
def test_virtual_clock_of_pinned_groups(mode: str) -> None:
    machine = Machine(pool(), group=1, banks=1, lanes=2, mode=mode, pinned=5)
    needed = {layer: np.ones(5, dtype=bool) for layer in machine.layout.moe_layers}
    timelines = [
        simulate(machine, needed, lambda nbytes: nbytes / ALIGNMENT, lambda load: 1.0, lambda layer: 2.0)
        for _ in range(2)
    ]
    assert timelines[0].busy_s == 15.0 and (timelines[1].wait_s, timelines[1].busy_s) == (0.0, 0.0)
    assert timelines[1].total_s == 3 * 2.0 + 15 * 1.0
    assert [(step.layer, step.index, step.bank) for step in timelines[1].steps] == [
        (layer, index, 1 + 5 * position + index) for position, layer in enumerate((1, 2, 4)) for index in range(5)
    ]


def test_virtual_clock_of_a_layer_pinned_in_part() -> None:
    machine = Machine(pool(layers=(1,)), group=1, banks=1, lanes=2, pinned=2)
    needed = {1: np.ones(5, dtype=bool)}
    busy = [simulate(machine, needed, lambda nbytes: 1.0, lambda load: 1.0).busy_s for _ in range(3)]
    assert busy == [5.0, 3.0, 3.0]
