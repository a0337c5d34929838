"""Expert panels over the tile ring: gather rows, dispatch, add back. Routed, shared and dense FFNs alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from estream.flash.states import ReadyGroup
from estream.layers.observe import Observer
from estream.layers.state import State
from estream.package.reader import Package
from estream.routing import RouteTable, Tile, split_rows
from estream.runtime.target import Buffer, Graph, Target


class ExpertRunner:
    """Runs tiles through panels: hidden[rows] += expert(normed[rows]) · gates.

    The accumulator is the residual stream itself. Counters: rows_computed, rows_useful (per tile and panel).
    """

    def __init__(self, target: Target, package: Package, state: State) -> None:
        self.rows = target.max_rows
        self.rows_computed = 0
        self.rows_useful = 0
        self.configuration: Mapping[str, object] = {}
        self._routed: tuple[RouteTable, Observer | None]
        self._state = state
        self._panel = package.pool.panel
        self._panels_per_expert = package.pool.panels_per_expert
        self._parts = self._panel.parts
        # The float MatMul treats a single row differently from the same row among others: never run one alone.
        self._least_rows = 1 if state.rows8 is not None else 2
        hidden = self._panel.hidden
        self._gather: Graph = target.load(package.graph(target.graphs, "gather"))
        self._expert: Graph = target.load(package.graph(target.graphs, "expert"))
        self._scatter: Graph = target.load(package.graph(target.graphs, "scatter_add"))
        self._quantise: Graph | None = None
        if state.rows8 is not None:
            self._quantise = target.load(package.graph(target.graphs, "quantise"))
        self._quantised = -1  # the layer whose rows are
        self._row_bytes = hidden * 4 if self._quantise is None else hidden + 4
        self._x = target.allocate(self.rows * self._row_bytes, "tile x")
        self._x_scale = target.allocate(self.rows * 4, "scales of tile x")
        self._y = target.allocate(self.rows * hidden * 4, "tile y")
        self._gates = target.allocate(self.rows * 4, "tile gates")
        self._index = target.allocate(self.rows * 8, "tile rows")
        self._y_view = self._y.array(np.float32, (self.rows, hidden))
        self._gates_view = self._gates.array(np.float32, (self.rows,))
        self._index_view = self._index.array(np.int64, (self.rows,))

    def begin(self, tokens: int) -> None:
        """Binds the hidden state of a prefill of `tokens` rows."""
        self.rows_computed = self.rows_useful = 0
        self._quantised = -1
        if self._quantise is None:
            self._gather.bind("table", self._state.normed_buffer, rows=tokens)
        elif self._state.rows8 is not None and self._state.row_scales is not None:
            self._quantise.bind("normed", self._state.normed_buffer, rows=tokens)
            for graph in (self._quantise, self._gather):
                graph.bind("table", self._state.rows8, rows=tokens)
                graph.bind("table_scale", self._state.row_scales, rows=tokens)
        self._scatter.bind("table", self._state.hidden_buffer, rows=tokens)
        self._scatter.bind("table_out", self._state.hidden_buffer, rows=tokens)

    def admit(self, layer: int, table: RouteTable) -> RouteTable:
        """All of them."""
        return table

    def needed(self, table: RouteTable) -> np.ndarray:
        """bool [panels per layer]: those of experts with rows."""
        return table.needed_panels(self._panels_per_expert)

    def start(self, layer: int, table: RouteTable, observe: Observer | None = None) -> None:
        """The layer whose groups come next."""
        self._routed = table, observe
        self._quantise_rows(layer)

    def run_group(self, ready: ReadyGroup) -> None:
        """All tokens of a group's panels: the panels one after the other, each tile by tile. Releases the group."""
        table, observe = self._routed
        for panel, buffer in ready.panels:
            self.bind_panel(buffer)
            for tile, least in self.tiles(table, panel // self._panels_per_expert):
                self.run(tile, least)
                if observe and len(tile.rows):
                    observe(ready.layer, "expert", tile.rows, {"y": self.y(len(tile.rows))}, panel)
        ready.release()

    def tiles(self, table: RouteTable, expert: int) -> Iterator[tuple[Tile, int]]:
        """An expert's tiles, and the fewest rows that each dispatch computes."""
        for tile in table.tiles(expert, self.rows):
            yield tile, 0

    def flush(self) -> None:
        """Nothing waits: every tile is a dispatch."""

    def finish(self) -> None:
        """Nothing waits: every tile is a dispatch."""

    def run_record(
        self, layer: int, name: str, record: Buffer, gates: np.ndarray, observe: Observer | None = None
    ) -> None:
        """Every token through every panel of a shared expert or dense FFN. gates: float32 [N]."""
        self._quantise_rows(layer)
        rows = np.arange(len(gates), dtype=np.int32)
        for panel, offset in enumerate(range(0, record.nbytes, self._panel.panel_bytes)):
            self.bind_panel(record.part(offset, self._panel.panel_bytes))
            for piece in split_rows(len(rows), self.rows):
                self.run(Tile(rows[piece], gates[piece]))
                if observe:
                    observe(layer, name, piece, {"y": self.y(piece.stop - piece.start)}, panel)

    def _quantise_rows(self, layer: int) -> None:
        """Once per layer, whichever of its experts comes first."""
        if self._quantise is not None and self._quantised != layer:
            self._quantise.run()
            self._quantised = layer

    def bind_panel(self, panel: Buffer) -> None:
        """`panel`: panel_bytes of target memory in the layout of PanelLayout; bound where it lies, never copied."""
        for part in self._parts:
            self._expert.bind(part.name, panel.part(part.offset, part.nbytes))

    def y(self, rows: int) -> np.ndarray:
        """What the last dispatch gave for its first rows, float32 [rows, H]."""
        return self._y_view[:rows]

    def run(self, tile: Tile, least: int = 0, graph: Graph | None = None) -> None:
        """One dispatch of `graph`, else of the bound panel. Rows up to `least` beyond the tile's have gates of 0."""
        useful, expert = len(tile.rows), graph or self._expert
        rows = max(useful, least, self._least_rows)
        self._index_view[:useful] = tile.rows
        self._index_view[useful:rows] = tile.rows[-1] if useful else 0
        self._gates_view[:useful] = tile.gates
        self._gates_view[useful:rows] = 0.0
        self._gather.bind("index", self._index, rows=rows)
        for taker in (self._gather, expert):
            taker.bind("x", self._x, rows=rows)
            if self._quantise is not None:
                taker.bind("x_scale", self._x_scale, rows=rows)
        self._gather.run()
        expert.bind("gates", self._gates, rows=rows)
        expert.bind("y", self._y, rows=rows)
        expert.run()
        if useful:
            self._scatter.bind("index", self._index, rows=useful)
            self._scatter.bind("y", self._y, rows=useful)
            self._scatter.run()
        self.rows_computed += rows
        self.rows_useful += useful
        self._state.bytes_copied += rows * self._row_bytes + 2 * useful * self._panel.hidden * 4
