"""Dispatches that wait for their tiles, on a virtual clock: what `estream/layers/htp/experts.py` does with real groups.

A planned dispatch runs when the last of its tiles has come; until then the groups of its tiles keep their banks. Where
flash has no bank left, what waits with the oldest group runs in a dispatch of its own, with empty slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from estream.flash.states import Load


@dataclass(frozen=True)
class Planned:
    """A dispatch: its seconds, empty slots included, and the panels of its tiles (one may have several)."""

    seconds: float
    panels: tuple[int, ...]


class Holding:
    """What `flash.virtual.simulate` takes as its compute side. dispatches: of each MoE layer; own_s: seconds of a group
    beside them; slower: factor of the dispatches' seconds."""

    def __init__(
        self, dispatches: Mapping[int, Sequence[Planned]], own_s: Callable[[Load], float], slower: float
    ) -> None:
        self._dispatches, self._own_s, self._slower = dispatches, own_s, slower
        self._layer = -1
        self._tiles: dict[int, dict[int, list[int]]] = {}  # by identity of a layer's plan: drawn loads repeat
        self._missing: list[int] = []
        self._waiting: dict[int, list[Load]] = {}  # dispatch -> the load of each tile that has come
        self._left: dict[Load, int] = {}  # held loads, oldest first -> tiles that were not dispatched

    def take(self, load: Load) -> tuple[float, list[Load]]:
        """Seconds of what these panels complete, and the loads to be released after it."""
        planned = self._dispatches[load.layer]
        if load.layer != self._layer:
            self._layer, self._missing = load.layer, [len(dispatch.panels) for dispatch in planned]
        if id(planned) not in self._tiles:
            found = self._tiles[id(planned)] = {}
            for at, dispatch in enumerate(planned):
                for panel in dispatch.panels:
                    found.setdefault(panel, []).append(at)
        tiles = [at for panel in load.needed or () for at in self._tiles[id(planned)][panel]]
        self._left[load] = len(tiles)
        seconds, done = self._own_s(load), list[Load]()
        for at in tiles:
            self._waiting.setdefault(at, []).append(load)
            self._missing[at] -= 1
            if self._missing[at] == 0:
                seconds += self._run(at, done)
        return seconds, done

    def flush(self) -> tuple[float, list[Load]]:
        """As `take`, of what waits with the oldest held load."""
        oldest, done = next(iter(self._left)), list[Load]()
        waiting = [at for at, loads in self._waiting.items() if any(load is oldest for load in loads)]
        return sum(self._run(at, done) for at in waiting), done

    def _run(self, at: int, done: list[Load]) -> float:
        for load in self._waiting.pop(at):
            self._left[load] -= 1
            if self._left[load] == 0:
                del self._left[load]
                done.append(load)
        return self._slower * self._dispatches[self._layer][at].seconds
