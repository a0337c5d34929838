"""The same state machine on a virtual clock: lanes and compute are durations instead of threads."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from estream.errors import FlashError
from estream.flash.machine import Machine
from estream.flash.states import Answer, Load, Read


@dataclass(frozen=True)
class Step:
    """When a group's bank was used by the compute, in seconds since the start of the prefill."""

    layer: int
    index: int
    bank: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated prefill; `wait_s` is the bubble, `busy_s` the time with at least one read outstanding. reads: (layer,
    start, end) of every stripe."""

    total_s: float
    wait_s: float
    busy_s: float
    steps: tuple[Step, ...]
    reads: tuple[tuple[int, float, float], ...] = ()


class Compute(Protocol):
    """A compute side that may hold groups: both return seconds of work, and the loads to be released after it."""

    def take(self, load: Load) -> tuple[float, list[Load]]:
        """The next group was acquired."""
        ...

    def flush(self) -> tuple[float, list[Load]]:
        """Flash has no bank left: a held group must go."""
        ...


def simulate(
    machine: Machine,
    needed: Mapping[int, np.ndarray],
    read_time: Callable[[int], float],
    compute_time: Callable[[Load], float] | Compute,
    dense_time: Callable[[int], float] = lambda layer: 0.0,
) -> Timeline:
    """Runs one prefill. needed[layer]: bool [panels_per_layer]. Seconds: `read_time(nbytes)` of a stripe beside those
    of other lanes, `compute_time(load)` of a group that is released after it (or a `Compute`, which may hold groups),
    `dense_time(layer)` before the layer's routes are known. Raises FlashError if neither side can go on (which would be
    an error of the machine)."""
    now = wait_s = busy_s = 0.0
    steps: list[Step] = []
    reads: list[tuple[int, float, float]] = []
    events: list[
        tuple[float, int, Read | None]
    ] = []  # (time, number, a read that is done or None: the compute goes on)
    number = outstanding = 0
    waiting = False

    def compute() -> Iterator[float | None]:
        """Yields how long it is busy, or None while it waits for a group."""
        for layer in machine.layout.moe_layers:
            yield dense_time(layer)
            machine.routes(layer, needed[layer])
            while (answer := machine.acquire(layer)) is not Answer.DONE:
                if answer is Answer.WAIT:
                    yield None
                    continue
                start, taken = now, answer if isinstance(answer, Load) else None
                if callable(compute_time):
                    assert taken is not None, "nothing is held, and the compute starves"
                    seconds, done = compute_time(taken), [taken]
                else:
                    seconds, done = compute_time.flush() if taken is None else compute_time.take(taken)
                yield seconds
                for load in done:
                    machine.release(load)
                if seconds > 0:
                    shown = taken or done[0]
                    steps.append(Step(layer, shown.index, shown.bank, start, now))

    def resume() -> bool:
        """Lets the compute go on; True if it waits now."""
        nonlocal number
        for busy in side:
            if busy is None:
                return True
            heapq.heappush(events, (now + busy, number, None))
            number += 1
            break
        return False

    machine.begin()
    side = compute()
    waiting = resume()
    while True:
        while outstanding < machine.lanes and (read := machine.next_read()) is not None:
            end = now + read_time(read.nbytes)
            reads.append((read.load.layer, now, end))
            heapq.heappush(events, (end, number, read))
            number += 1
            outstanding += 1
        if not events:
            break
        time, _, done = heapq.heappop(events)
        wait_s += (time - now) * waiting
        busy_s += (time - now) * (outstanding > 0)
        now = time
        if done is not None:
            outstanding -= 1
            machine.read_done(done)
        if waiting or done is None:
            waiting = resume()
    if not machine.finished:
        raise FlashError("the simulated prefill cannot go on", had=f"banks {[state.value for state in machine.banks]}")
    machine.end()
    return Timeline(now, wait_s, busy_s, tuple(steps), tuple(reads))
