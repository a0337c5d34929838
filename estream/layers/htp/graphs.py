"""A package's HTP graphs, loaded, and the sizes that they were built for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from estream.errors import TargetError
from estream.package.contexts import Contexts
from estream.runtime.target import Graph, Target, TensorInfo

_RUNG = re.compile(r"expert\.(\d+)x(\d+)")


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: an expert graph of `slots` tiles of `rows` rows."""

    slots: int
    rows: int
    graph: Graph


class HtpGraphs:
    """norm, qkv, attention, o, head, conv (None without convolutions), and `rungs`, largest tiles first; `contexts`.

    Sizes: rows (of a block), steps (key blocks per attention call), head_rows. All are read from the graphs.
    """

    def __init__(self, target: Target, contexts: Contexts) -> None:
        """Raises TargetError: a graph does not load."""
        self.contexts = contexts
        loaded = {name: target.load(path) for name, path in contexts.paths.items()}
        self.norm, self.qkv, self.attention = (_take(loaded, name) for name in ("norm", "qkv", "attention"))
        self.o, self.head = _take(loaded, "o"), _take(loaded, "head")
        self.conv = loaded.get("conv")
        self.rows = _size(self.qkv.inputs["normed"])
        self.head_rows = _size(self.head.inputs["normed"])
        self.steps = len(numbered(self.attention.inputs, "k"))
        rungs = [(match, graph) for name, graph in loaded.items() if (match := _RUNG.fullmatch(name))]
        self.rungs = tuple(
            sorted((Rung(int(m[1]), int(m[2]), graph) for m, graph in rungs), key=lambda rung: -rung.rows)
        )
        if not self.rungs:
            raise TargetError("the contexts hold no expert graph", next_step="Compile again")

    @property
    def ladder(self) -> list[list[int]]:
        """[slots, rows] of every rung, smallest tiles first."""
        return [[rung.slots, rung.rows] for rung in reversed(self.rungs)]


def numbered(tensors: Mapping[str, TensorInfo], name: str) -> list[str]:
    """`name`, or `name.0`, `name.1`, ...: the column chunks, head groups or steps of a tensor, in order."""
    if name in tensors:
        return [name]
    found: list[str] = []
    while f"{name}.{len(found)}" in tensors:
        found.append(f"{name}.{len(found)}")
    return found


def _take(loaded: Mapping[str, Graph], name: str) -> Graph:
    if name not in loaded:
        raise TargetError(f"the contexts hold no graph {name}", had=", ".join(loaded), next_step="Compile again")
    return loaded[name]


def _size(info: TensorInfo) -> int:
    size = info.shape[0]
    assert isinstance(size, int), "HTP graphs have static shapes"
    return size
