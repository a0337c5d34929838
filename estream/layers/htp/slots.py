"""A rung of the ladder: the memory of its slots, and one dispatch of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from estream.layers.htp.graphs import Rung, numbered
from estream.package.layout import PanelLayout, align
from estream.routing import Tile
from estream.runtime.target import Buffer, Target, TensorInfo

_ALIGN = 128


@dataclass(frozen=True)
class Work:
    """A tile to be run through one panel. name: of the panel, as observers are told."""

    name: int
    panel: Buffer
    tile: Tile


class Slots:
    """A rung's ring region: x, gates and y chunks of every slot, bound for good; panels are bound per dispatch."""

    def __init__(self, target: Target, rung: Rung, panel: PanelLayout) -> None:
        self.slots, self.rows, self._graph = rung.slots, rung.rows, rung.graph
        self.computed = rung.slots * rung.rows  # rows of a dispatch, whatever is in its slots
        self._parts = panel_inputs(rung, panel)
        y_names = numbered({name.removeprefix("slot0."): info for name, info in rung.graph.outputs.items()}, "y")
        shapes = {"x": (rung.rows, panel.hidden), "gates": (rung.rows, 1)}
        shapes |= {name: (rung.rows, panel.hidden // len(y_names)) for name in y_names}
        offsets, size = {}, 0
        for name, shape in shapes.items():
            offsets[name], size = size, align(size + 2 * math.prod(shape), _ALIGN)
        region = target.allocate(rung.slots * size, f"tiles {rung.slots}x{rung.rows}")
        self._views: list[dict[str, np.ndarray]] = []
        self._bound: list[int] = [0] * rung.slots
        for slot in range(rung.slots):
            views = {}
            for name, shape in shapes.items():
                part = region.part(slot * size + offsets[name], 2 * math.prod(shape))
                rung.graph.bind(f"slot{slot}.{name}", part)
                views[name] = part.array(np.float16, shape)
            self._views.append(views)
        self._y = y_names

    def run(self, work: Sequence[Work], normed: np.ndarray) -> list[list[np.ndarray]]:
        """One dispatch of at most `slots` tiles: chunks of y float16 [rows, H / C] of each, valid until the next one.

        Slots beyond them bind the last panel with gates of 0. normed: float16 [N, H].
        """
        for slot, views in enumerate(self._views):
            one = work[min(slot, len(work) - 1)]
            self._bind(slot, one.panel)
            views["gates"][...] = 0
            if slot < len(work):
                count = len(one.tile.rows)
                np.take(normed, one.tile.rows, axis=0, out=views["x"][:count], mode="clip")
                views["x"][count:] = 0
                views["gates"][:count, 0] = one.tile.gates
        self._graph.run()
        return [
            [views[name][: len(one.tile.rows)] for name in self._y]
            for one, views in zip(work, self._views, strict=False)
        ]

    def _bind(self, slot: int, panel: Buffer) -> None:
        if self._bound[slot] != panel.address:
            for name, offset, nbytes in self._parts:
                self._graph.bind(f"slot{slot}.{name}", panel.part(offset, nbytes))
            self._bound[slot] = panel.address


def panel_inputs(rung: Rung, panel: PanelLayout) -> list[tuple[str, int, int]]:
    """As `weight_inputs`, of a loaded graph."""
    return weight_inputs(rung.graph.inputs, panel)


def weight_inputs(inputs: Mapping[str, TensorInfo], panel: PanelLayout) -> list[tuple[str, int, int]]:
    """(input name without its slot, offset in the panel, bytes) of everything that a slot takes of a panel.

    Scales are chunks of one vector each. A matrix of multipliers is bound as its two halves, `_low` and `_high`.
    """
    parts = {part.name: part for part in panel.parts}
    found = []
    for full, info in inputs.items():
        name = full.removeprefix("slot0.")
        if name == full or name in ("x", "gates"):
            continue
        nbytes = math.prod(int(size) for size in info.shape) * info.dtype.itemsize
        base, _, chunk = name.rpartition(".")
        matrix, _, half = name.rpartition("_")
        if name in parts:
            offset, whole = parts[name].offset, parts[name].nbytes
        elif half in ("low", "high"):
            part = parts[multiplier_name(matrix)]
            offset, whole = part.offset + (part.nbytes // 2 if half == "high" else 0), part.nbytes // 2
        else:
            offset, whole = parts[base].offset + int(chunk) * nbytes, nbytes
        assert whole == nbytes, f"{name}: {whole} bytes in the panel, {nbytes} in the graph"
        found.append((name, offset, nbytes))
    return found


def multiplier_name(matrix: str) -> str:
    """Part with the multipliers of a matrix's chunk: gate.1 → gate_multiplier.1."""
    base, dot, chunk = matrix.partition(".")
    return f"{base}_multiplier{dot}{chunk}"
