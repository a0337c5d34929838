"""A dispatch of several experts on a CPU target: the counterpart of htp's `Slots`, with any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from estream.layers.htp.slots import Work
from estream.layers.htp.state import HtpState
from estream.layers.state import State
from estream.package.layout import PanelLayout
from estream.runtime.target import Buffer, Graph, Target

# (token rows int32 [n], x [n, H] to be filled, x_scale float32 [n, 1] to be filled, None without integers)
Take = Callable[[np.ndarray, np.ndarray, np.ndarray | None], None]


class CpuSlots:
    """The tile buffers of a graph with slots, one of the package's expert graph per slot (`qnn_graphs.grouped`), or of
    that graph itself, with one slot. nbytes: of them. least_rows: a dispatch has as many."""

    def __init__(self, target: Target, graph: Graph, slots: int, panel: PanelLayout, rows: int, take: Take) -> None:
        self.slots = slots
        self._graph, self._parts, self._take = graph, panel.parts, take
        self._prefixes = [""] if "x" in graph.inputs else [f"slot{slot}." for slot in range(slots)]
        assert len(self._prefixes) == slots
        info = graph.inputs[f"{self._prefixes[0]}x"]
        self._scaled = f"{self._prefixes[0]}x_scale" in graph.inputs
        # The float MatMul treats a single row differently from the same row among others.
        self.least_rows = 1 if self._scaled else 2
        widths: dict[str, tuple[np.typing.DTypeLike, int]] = {
            "x": (info.dtype, panel.hidden),
            "gates": (np.float32, 1),
            "y": (np.float32, panel.hidden),
        }
        if self._scaled:
            widths["x_scale"] = (np.float32, 1)
        self.nbytes = 0
        self._buffers: list[dict[str, Buffer]] = []
        self._views: list[dict[str, np.ndarray]] = []
        for prefix in self._prefixes:
            buffers, views = {}, {}
            for name, (dtype, width) in widths.items():
                size = rows * width * np.dtype(dtype).itemsize
                buffers[name] = target.allocate(size, f"tile {prefix}{name}")
                views[name] = buffers[name].array(dtype, (rows, width))
                self.nbytes += size
            self._buffers.append(buffers)
            self._views.append(views)

    def run(self, work: Sequence[Work], rows: int) -> list[list[np.ndarray]]:
        """One dispatch of `slots` tiles of at most `rows` rows: [y] float32 [n, H] of each, valid until the next one.
        Rows beyond a tile's own repeat its last one with gates of 0."""
        for one, prefix, buffers, views in zip(work, self._prefixes, self._buffers, self._views, strict=True):
            for part in self._parts:
                self._graph.bind(prefix + part.name, one.panel.part(part.offset, part.nbytes))
            for name, buffer in buffers.items():
                self._graph.bind(prefix + name, buffer, rows=rows)
            count = len(one.tile.rows)
            index = np.zeros(rows, np.int32)
            if count:
                index[:count], index[count:] = one.tile.rows, one.tile.rows[-1]
            self._take(index, views["x"][:rows], views["x_scale"][:rows] if self._scaled else None)
            views["gates"][:count, 0], views["gates"][count:rows] = one.tile.gates, 0
        self._graph.run()
        return [[views["y"][: len(one.tile.rows)]] for one, views in zip(work, self._views, strict=True)]


class Tier:
    """A rung of static capacity: `rows` rows in every slot, set when the length of a prompt is known.

    Tiles that are too few for the graph of several experts run one after the other in the graph of one.
    """

    def __init__(self, group: CpuSlots, single: CpuSlots) -> None:
        self.slots, self.rows, self.computed = group.slots, group.least_rows, 0
        self._group, self._single = group, single

    def run(self, work: Sequence[Work], normed: np.ndarray) -> list[list[np.ndarray]]:
        """As `htp.Slots.run`; rows come from where the rings take them."""
        self.computed = len(work) * self.rows
        if len(work) == self.slots:
            return self._group.run(work, self.rows)
        return [[self._single.run([one], self.rows)[0][0].copy()] for one in work]


class Cold:
    """A rung without a capacity: the rows that there are. prepare: makes of a panel (uint8 [panel_bytes]) what the
    graph takes, in `own`, a copy of it; None: panels are bound where they lie."""

    slots = 1

    def __init__(
        self,
        ring: CpuSlots,
        state: HtpState | State,
        own: Buffer | None = None,
        prepare: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.rows, self.computed = ring.least_rows, 0
        self._ring, self._state, self._own, self._prepare = ring, state, own, prepare

    def run(self, work: Sequence[Work], normed: np.ndarray) -> list[list[np.ndarray]]:
        """As `Tier.run`."""
        (one,) = work
        rows = self.computed = max(len(one.tile.rows), self._ring.least_rows)
        if self._own is not None and self._prepare is not None:
            memory = self._own.memory()
            memory[:] = one.panel.memory()
            self._prepare(memory)
            self._state.bytes_copied += self._own.nbytes
            one = Work(one.name, self._own, one.tile)
        return self._ring.run([one], rows)


def taking_floats(state: HtpState | State) -> Take:
    """Rows of the prefill's state as they are."""

    def take(rows: np.ndarray, x: np.ndarray, x_scale: np.ndarray | None) -> None:
        x[:] = state.normed[rows]

    return take


def taking_integers(state: State) -> Take:
    """Rows of cpu's state, quantised before."""
    assert state.rows8 is not None and state.row_scales is not None
    table = state.rows8.array(np.uint8, (state.max_tokens, state.arch.hidden))
    scales = state.row_scales.array(np.float32, (state.max_tokens, 1))

    def take(rows: np.ndarray, x: np.ndarray, x_scale: np.ndarray | None) -> None:
        np.take(table, rows, axis=0, out=x, mode="clip")
        np.take(scales, rows, axis=0, out=x_scale, mode="clip")

    return take


def taking_tiles(target: Target, quantise: Graph, state: HtpState, most: int) -> Take:
    """Rows of htp's float16 state, quantised tile by tile for a CPU target's graphs."""
    wide = target.allocate(4 * most * state.arch.hidden, "float32 rows of a cold expert")
    values = wide.array(np.float32, (most, state.arch.hidden))
    state.nbytes += wide.nbytes

    def take(rows: np.ndarray, x: np.ndarray, x_scale: np.ndarray | None) -> None:
        assert x_scale is not None, "the graph takes integers"
        count = len(rows)
        values[:count] = state.normed[rows]
        quantise.bind("normed", wide, rows=count)
        quantise.bind("table", Buffer(x.ctypes.data, x.nbytes), rows=count)
        quantise.bind("table_scale", Buffer(x_scale.ctypes.data, x_scale.nbytes), rows=count)
        quantise.run()

    return take
