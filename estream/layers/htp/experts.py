"""Expert panels on htp: cold experts share a dispatch, a hot one fills it. Routed, shared and dense FFNs alike.

Tiles of one size wait in their rung's slots until a dispatch is full or the group ends. Results are added to the
hidden state in the order of experts, panels and tiles, whatever the grouping: what comes too early is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from estream.errors import NumericError
from estream.flash.stream import ReadyGroup
from estream.layers.htp.graphs import HtpGraphs
from estream.layers.htp.ladder import Slots, Work, cut
from estream.layers.htp.state import HtpState
from estream.layers.observe import Observer
from estream.package.reader import Package
from estream.routing import RouteTable, Tile
from estream.runtime.target import Buffer, Target


class HtpExperts:
    """hidden[rows] += expert(normed[rows]) · gates. Counters: rows_useful of tiles; rows_computed of dispatches, with
    padded rows and empty slots."""

    def __init__(self, target: Target, graphs: HtpGraphs, package: Package, state: HtpState) -> None:
        self._state = state
        self._panel, self._panels_per_expert = package.pool.panel, package.pool.panels_per_expert
        self._rungs = {rung.rows: Slots(target, rung, self._panel) for rung in graphs.rungs}
        self._sizes = tuple(self._rungs)  # descending
        self.rows = self._sizes[0]
        self.rows_computed = self.rows_useful = 0
        self._early: dict[int, tuple[Work, np.ndarray]] = {}
        self._next = 0

    def begin(self, tokens: int) -> None:
        """A new prefill; forgets what a failed one left."""
        self.rows_computed = self.rows_useful = 0
        self._forget()

    def run_group(self, ready: ReadyGroup, table: RouteTable, observe: Observer | None = None) -> None:
        """All tokens of a group's panels. Raises NumericError naming layer, panel and token."""
        self._run(
            ready.layer,
            "expert",
            (
                (panel, buffer, Tile(table.rows[at], table.gates[at]))
                for panel, buffer in ready.panels
                for at in self._pieces(table, panel // self._panels_per_expert)
            ),
            observe,
        )

    def run_record(
        self, layer: int, name: str, record: Buffer, gates: np.ndarray, observe: Observer | None = None
    ) -> None:
        """Every token through every panel of a shared expert or dense FFN. gates: float32 [N]."""
        rows, size = np.arange(len(gates), dtype=np.int32), self._panel.panel_bytes
        self._run(
            layer,
            name,
            (
                (panel, record.part(panel * size, size), Tile(rows[piece], gates[piece]))
                for panel in range(record.nbytes // size)
                for piece in cut(len(rows), self._sizes)
            ),
            observe,
        )

    def _pieces(self, table: RouteTable, expert: int) -> Iterable[slice]:
        first, last = int(table.offsets[expert]), int(table.offsets[expert + 1])
        return (slice(first + piece.start, first + piece.stop) for piece in cut(last - first, self._sizes))

    def _run(self, layer: int, graph: str, tiles: Iterable[tuple[int, Buffer, Tile]], observe: Observer | None) -> None:
        self._forget()
        for number, (name, panel, tile) in enumerate(tiles):
            size = next(size for size in reversed(self._sizes) if len(tile.rows) <= size)
            rung = self._rungs[size]
            rung.queue.append(Work(number, panel, tile, name))
            if len(rung.queue) == rung.slots:
                self._dispatch(rung, layer, graph, observe)
        for rung in self._rungs.values():
            if rung.queue:
                self._dispatch(rung, layer, graph, observe)

    def _dispatch(self, rung: Slots, layer: int, graph: str, observe: Observer | None) -> None:
        results = rung.run(self._state.normed)
        self.rows_computed += rung.slots * rung.rows
        for work, chunks in results:
            y = np.concatenate(chunks, axis=1)
            self._check(y, work, layer, graph)
            self._early[work.number] = work, y
            self.rows_useful += len(work.tile.rows)
            self._state.bytes_copied += 3 * y.nbytes
        while self._next in self._early:
            work, y = self._early.pop(self._next)
            wide = y.astype(np.float32)
            self._state.hidden[work.tile.rows] += wide
            if observe:
                observe(layer, graph, work.tile.rows, {"y": wide}, work.name)
            self._next += 1

    def _forget(self) -> None:
        self._early.clear()
        self._next = 0
        for rung in self._rungs.values():
            rung.queue.clear()

    def _check(self, y: np.ndarray, work: Work, layer: int, graph: str) -> None:
        finite = np.isfinite(y).all(axis=1)
        if not finite.all():
            token = work.tile.rows[int(np.flatnonzero(~finite)[0])]
            raise NumericError(
                f"layer {layer}, {graph} panel {work.name}, token {token}: not finite",
                next_step="Check the weights with `estream verify`; if they are sound, use --backend cpu",
            )
