"""What a run gave, graph by graph: the reference's run, kept to be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from estream.layers.observe import Rows


class Key(NamedTuple):
    """One output of one graph. panel: as of `Observer`."""

    layer: int
    graph: str
    name: str
    panel: int | None = None


class Recorder:
    """An observer that keeps a copy of everything: about 15 · H · N float32 per layer at top-8.

    After the run, `rows(key)` and `values(key)` are what a graph gave: row numbers ascending int64 [n], float32
    [n, width].
    """

    def __init__(self) -> None:
        self._parts: dict[Key, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._whole: dict[Key, tuple[np.ndarray, np.ndarray]] = {}
        self._medians: dict[Key, float] = {}

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None:
        for name, array in arrays.items():
            self._parts.setdefault(Key(layer, graph, name, panel), []).append((indices(rows), array.copy()))

    @property
    def keys(self) -> list[Key]:
        """In the order of the work."""
        return list(self._parts)

    def __contains__(self, key: Key) -> bool:
        return key in self._parts

    def rows(self, key: Key) -> np.ndarray:
        return self._joined(key)[0]

    def values(self, key: Key) -> np.ndarray:
        return self._joined(key)[1]

    def median_norm(self, key: Key) -> float:
        """Median norm of the rows of this output over all panels of its layer."""
        family = key._replace(panel=None)
        if family not in self._medians:
            norms = [row_norms(self.values(other)) for other in self._parts if other._replace(panel=None) == family]
            self._medians[family] = float(np.median(np.concatenate(norms)))
        return self._medians[family]

    def _joined(self, key: Key) -> tuple[np.ndarray, np.ndarray]:
        if key not in self._whole:
            rows = np.concatenate([part[0] for part in self._parts[key]])
            order = np.argsort(rows)
            self._whole[key] = rows[order], np.concatenate([part[1] for part in self._parts[key]])[order]
        return self._whole[key]


def indices(rows: Rows) -> np.ndarray:
    """Row numbers int64 of a slice or an array of them."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.astype(np.int64)


def row_norms(values: np.ndarray) -> np.ndarray:
    """float64 [rows]."""
    norms: np.ndarray = np.linalg.norm(values.astype(np.float64), axis=1)
    return norms
