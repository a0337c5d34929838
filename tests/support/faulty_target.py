"""A target that really computes, and does one thing wrong. For tests of what must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from estream.runtime import open_target
from estream.runtime.mock import MockGraph, MockTarget
from estream.runtime.target import Buffer

# Called around a run of the faulty graph: (graph, run's number from 1). Buffers are in graph.at.
Fault = Callable[["FaultyGraph", int], None]


def nothing(graph: FaultyGraph, run: int) -> None:
    """No fault."""


class FaultyTarget(MockTarget):
    """The cpu target; `before` and `after` meddle with each run of the graph called `graph`."""

    def __init__(self, graph: str, *, before: Fault = nothing, after: Fault = nothing) -> None:
        super().__init__(inner=open_target("cpu", threads=1))
        self._faulty, self._before, self._after = graph, before, after

    def load(self, path: Path) -> MockGraph:
        loaded = super().load(path)
        if loaded.name != self._faulty:
            return loaded
        return FaultyGraph(loaded, self, self._before, self._after)


class FaultyGraph(MockGraph):
    """at: name -> (buffer, rows) as bound now. keep: what a fault remembers between runs."""

    def __init__(self, whole: MockGraph, target: MockTarget, before: Fault, after: Fault) -> None:
        super().__init__(whole.name, target, None, whole._inner)
        self.at: dict[str, tuple[Buffer, int]] = {}
        self.keep: dict[str, bytes] = {}
        self._before, self._after, self._run = before, after, 0

    def bind(self, name: str, buffer: Buffer, rows: int | None = None) -> None:
        super().bind(name, buffer, rows)
        self.at[name] = (buffer, rows or 0)

    def run(self) -> None:
        self._run += 1
        self._before(self, self._run)
        super().run()
        self._after(self, self._run)

    def output(self, name: str, width: int) -> np.ndarray:
        """The rows of an output, float32 [rows, width], to be written to."""
        buffer, rows = self.at[name]
        return buffer.array(np.float32, (rows, width))


def zero(name: str, width: int, *, from_run: int = 1) -> Fault:
    """An output that stays zero."""

    def fault(graph: FaultyGraph, run: int) -> None:
        if run >= from_run:
            graph.output(name, width)[...] = 0

    return fault


def drop_row(name: str, width: int, *, row: int) -> Fault:
    """One row of an output that is not written. width: float32 numbers per row."""

    def fault(graph: FaultyGraph, run: int) -> None:
        rows = graph.output(name, width)
        if row < len(rows):
            rows[row] = 0

    return fault


def stale(parts: tuple[str, ...], *, run: int) -> Fault:
    """At one run, the weights are still those of the run before."""

    def fault(graph: FaultyGraph, number: int) -> None:
        for name in parts:
            memory = graph.at[name][0].memory()
            if number == run:
                memory[:] = graph.keep[name]
            graph.keep[name] = bytes(memory)

    return fault


def swap(first: str, second: str) -> Fault:
    """Two vectors of scales in each other's place, once per place in memory."""

    def fault(graph: FaultyGraph, run: int) -> None:
        one, other = (graph.at[name][0] for name in (first, second))
        if (done := f"swapped {one.address}") in graph.keep and graph.keep[done] == bytes(one.memory()):
            return
        held = bytes(one.memory())
        one.memory()[:], other.memory()[:] = bytes(other.memory()), held
        graph.keep[done] = bytes(one.memory())

    return fault


def misplace(name: str) -> Fault:
    """Row numbers of which the first two are exchanged."""

    def fault(graph: FaultyGraph, run: int) -> None:
        buffer, rows = graph.at[name]
        if rows > 1:
            index = buffer.array(np.int64, (rows,))
            index[:2] = index[1::-1].copy()

    return fault


def repeat_first(name: str, width: int) -> Fault:
    """An output that is always what the first run of as many rows gave."""

    def fault(graph: FaultyGraph, run: int) -> None:
        rows = graph.output(name, width)
        first = graph.keep.setdefault(f"{name} {len(rows)}", rows.tobytes())
        rows[...] = np.frombuffer(first, np.float32).reshape(rows.shape)

    return fault
