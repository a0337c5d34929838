"""Expert panels on htp: cold experts share a dispatch, a hot one fills it. Routed, shared and dense FFNs alike.

The dispatches of a layer are planned from its routes (ladder.py). One runs when the last of its tiles is there; their
groups are held until then. If flash needs a bank earlier, what is there runs in a dispatch of its own. Results are
added to the hidden state when their planned dispatch is complete: in the same order whatever the grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from estream.errors import NumericError
from estream.flash.states import ReadyGroup
from estream.layers.htp.graphs import Rung
from estream.layers.htp.ladder import Dispatch, plan_layer
from estream.layers.htp.slots import Slots, Work
from estream.layers.htp.state import HtpState
from estream.layers.observe import Observer
from estream.layers.state import State
from estream.package.layout import PoolLayout
from estream.routing import RouteTable, Tile
from estream.runtime.target import Buffer, Target


class Dispatcher(Protocol):
    """What runs tiles side by side: `Slots`, or what a strategy has in its place. rows: of each slot. computed: rows of
    the last dispatch."""

    slots: int
    rows: int
    computed: int

    def run(self, work: Sequence[Work], normed: np.ndarray) -> list[list[np.ndarray]]:
        """As `Slots.run`."""


@dataclass(eq=False)
class _Held:
    """A group whose banks are in use: how many of its tiles were not dispatched yet."""

    release: Callable[[], None]
    tiles: int


@dataclass(eq=False)
class _Pending:
    """A planned dispatch: tiles that have not come, those that wait, and results that came before it was complete."""

    rung: Dispatcher
    missing: int
    waiting: list[tuple[Work, _Held]] = field(default_factory=list)
    early: list[tuple[Work, np.ndarray]] = field(default_factory=list)


class HtpExperts:
    """hidden[rows] += expert(normed[rows]) · gates. Counters: rows_useful of tiles; rows_computed of dispatches, with
    padded rows and empty slots. more: rungs of a strategy after those of the ladder, which may then have none; the
    hidden state may be another target's. Raises NumericError naming layer, panel and token."""

    def __init__(
        self,
        target: Target,
        rungs: Sequence[Rung],
        pool: PoolLayout,
        state: HtpState | State,
        more: Sequence[Dispatcher] = (),
    ) -> None:
        self._state = state
        self._panel, self._panels_per_expert = pool.panel, pool.panels_per_expert
        self._rungs: list[Dispatcher] = [*(Slots(target, rung, pool.panel) for rung in rungs), *more]
        self._ladder = [(rung.slots, rung.rows) for rung in rungs]
        self.rows = self._rungs[0].rows
        self.rows_computed = self.rows_useful = 0
        early = sum(rung.rows * (rung.slots - 1) for rung in rungs)  # rows of results
        state.scratch_bytes += 2 * early * pool.panel.hidden
        self.configuration: Mapping[str, object] = {}
        self._observe: Observer | None = None
        self._forget()

    def _forget(self) -> None:
        self._tiles: dict[int, list[tuple[_Pending, Tile]]] = {}  # of panels that have not come
        self._held: list[_Held] = []  # oldest first
        self._open: list[_Pending] = []  # with tiles that wait

    def begin(self, tokens: int) -> None:
        """A new prefill; forgets what a failed one left."""
        self.rows_computed = self.rows_useful = 0
        self._forget()

    def admit(self, layer: int, table: RouteTable) -> RouteTable:
        """All of them."""
        return table

    def needed(self, table: RouteTable) -> np.ndarray:
        """bool [panels per layer]: those of experts with rows."""
        return table.needed_panels(self._panels_per_expert)

    def start(self, layer: int, table: RouteTable, observe: Observer | None = None) -> None:
        """Plans the dispatches of the layer whose groups come next."""
        self._plan(layer, "expert", table, self.dispatches(table), observe)

    def dispatches(self, table: RouteTable) -> list[Dispatch]:
        """Of a layer's routed experts: every panel of `needed` has a tile, rows are those of the panel's expert."""
        return plan_layer(table.counts.tolist(), self._panels_per_expert, self._ladder)

    def run_group(self, ready: ReadyGroup) -> None:
        """All dispatches that these panels complete. The group is released now or later."""
        self._take(ready.panels, _Held(ready.release, 0))

    def flush(self) -> None:
        """Dispatches the waiting tiles of the oldest held group, and what waits with them: it is released."""
        if self._held:
            oldest = self._held[0]
            for pending in [one for one in self._open if any(held is oldest for _, held in one.waiting)]:
                self._dispatch(pending)

    def finish(self) -> None:
        """Nothing waits: a planned dispatch runs with its last tile."""
        assert not self._tiles and not self._open and not self._held, "a needed panel did not come"

    def run_record(
        self, layer: int, name: str, record: Buffer, gates: np.ndarray, observe: Observer | None = None
    ) -> None:
        """Every token through every panel of a shared expert or dense FFN. gates: float32 [N]."""
        size = self._panel.panel_bytes
        panels = [(panel, record.part(panel * size, size)) for panel in range(record.nbytes // size)]
        rows = np.arange(len(gates), dtype=np.int32)
        table = RouteTable(np.array([0, len(gates)]), rows, gates)
        dispatches = plan_layer([len(gates)], len(panels), self._ladder)
        self._plan(layer, name, table, dispatches, observe, len(panels))
        self._take(panels, _Held(lambda: None, 0))

    def _plan(
        self,
        layer: int,
        graph: str,
        table: RouteTable,
        dispatches: Iterable[Dispatch],
        observe: Observer | None,
        panels_per_expert: int | None = None,
    ) -> None:
        """panels_per_expert: other than the routed experts'."""
        self._forget()
        self._layer, self._graph, self._observe = layer, graph, observe
        for planned in dispatches:
            pending = _Pending(self._rungs[planned.rung], len(planned.tiles))
            for panel, piece in planned.tiles:
                first = int(table.offsets[panel // (panels_per_expert or self._panels_per_expert)])
                at = slice(first + piece.start, first + piece.stop)
                self._tiles.setdefault(panel, []).append((pending, Tile(table.rows[at], table.gates[at])))

    def _take(self, panels: Iterable[tuple[int, Buffer]], held: _Held) -> None:
        tiles = [(panel, buffer, *tile) for panel, buffer in panels for tile in self._tiles.pop(panel)]
        held.tiles = len(tiles)
        self._held.append(held)
        for panel, buffer, pending, tile in tiles:
            if not pending.waiting:
                self._open.append(pending)
            pending.waiting.append((Work(panel, buffer, tile), held))
            pending.missing -= 1
            if pending.missing == 0:
                self._dispatch(pending)

    def _dispatch(self, pending: _Pending) -> None:
        """Runs what waits, and adds the results of a planned dispatch that is complete with it."""
        waiting, pending.waiting = pending.waiting, []
        self._open.remove(pending)
        rung, work = pending.rung, [one for one, _ in waiting]
        results = rung.run(work, self._state.normed)
        self.rows_computed += rung.computed
        for one, chunks in zip(work, results, strict=True):
            y = np.concatenate(chunks, axis=1)
            self._check(y, one)
            pending.early.append((one, y))
            self.rows_useful += len(one.tile.rows)
            self._state.bytes_copied += 3 * y.nbytes
        for _, held in waiting:
            held.tiles -= 1
            if held.tiles == 0:
                self._held.remove(held)
                held.release()
        if pending.missing == 0:
            self._add(pending.early)

    def _add(self, results: Iterable[tuple[Work, np.ndarray]]) -> None:
        for work, y in results:
            wide = y.astype(np.float32)
            self._state.hidden[work.tile.rows] += wide
            if self._observe and len(work.tile.rows):
                self._observe(self._layer, self._graph, work.tile.rows, {"y": wide}, work.name)

    def _check(self, y: np.ndarray, work: Work) -> None:
        finite = np.isfinite(y).all(axis=1)
        if not finite.all():
            token = work.tile.rows[int(np.flatnonzero(~finite)[0])]
            raise NumericError(
                f"layer {self._layer}, {self._graph} panel {work.name}, token {token}: not finite",
                next_step="Check the weights with `estream verify`; if they are sound, use --backend cpu",
            )
