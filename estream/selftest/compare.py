"""Compares a run with the reference's, with the reference's inputs imposed, so that errors do not add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from estream.layers.observe import Rows
from estream.selftest.record import Key, Recorder, indices, row_norms
from estream.selftest.tolerances import Tolerance, Tolerances

CLOSING = ("o_router", "o_norm")
_IMPOSED = ("input", *CLOSING, "final_norm")
_LEAST = 0.01  # of the median row: rows that hardly count are compared with this instead of their own norm


@dataclass(frozen=True)
class Difference:
    """How one graph of one layer differs from the reference.

    error: of the row that differs most, norm of the difference over the norm of the reference's row; infinite where a
    row is not finite or was never computed. typical: median over the rows of all its panels, of the output where it is
    largest. output, row, panel: where the worst row is; panel as in `Observer`, or the slice of the head. layer: the
    number of layers for final_norm and head.
    """

    layer: int
    graph: str
    error: float
    typical: float
    tolerance: Tolerance
    output: str
    row: int
    panel: int | None
    note: str = ""

    @property
    def diverged(self) -> bool:
        return not (self.error <= self.tolerance.worst and self.typical <= self.tolerance.typical)


class _Errors:
    """Row errors of one graph of one layer while they come in."""

    def __init__(self) -> None:
        self.worst: tuple[float, str, int, int | None, str] = (-1.0, "", 0, None, "")  # error, output, row, panel, note
        self.rows: dict[str, list[np.ndarray]] = {}

    def add(self, key: Key, error: np.ndarray, rows: np.ndarray, note: str = "") -> None:
        at = int(error.argmax())
        self.rows.setdefault(key.name, []).append(error)
        if error[at] > self.worst[0]:
            self.worst = (float(error[at]), key.name, int(rows[at]), key.panel, note)

    def result(self, layer: int, graph: str, tolerance: Tolerance) -> Difference:
        typical = max(float(np.median(np.concatenate(parts))) for parts in self.rows.values())
        error, output, row, panel, note = self.worst
        return Difference(layer, graph, error, typical, tolerance, output, row, panel, note)


class Comparer:
    """An observer that compares each graph's outputs with `reference`'s and then imposes the reference's.

    Imposed are: hidden before every layer; hidden, normed rows and router logits before the experts, so that both runs
    choose the same; the normed rows before the head. Residual sums are compared without what was there before: a
    missing contribution would hide behind a large hidden state. `worst` is in the order of the work.
    """

    def __init__(self, reference: Recorder, tolerances: Tolerances) -> None:
        self._reference = reference
        self._tolerances = tolerances
        self._base: np.ndarray | None = None  # hidden as it was last imposed
        self._closing = Key(0, "input", "hidden")  # what it was imposed from
        self._missing = {key: np.ones(len(reference.rows(key)), bool) for key in reference.keys}
        self._errors: dict[tuple[int, str], _Errors] = {}

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None:
        for name, array in arrays.items():
            key = Key(layer, graph, name, panel)
            if key in self._reference:
                self._compare(key, indices(rows), array)
            else:
                self._note(key, indices(rows)[:1], "the reference did not compute it")
            if graph in _IMPOSED and key in self._reference:
                array[...] = self._reference.values(key)
                if name == "hidden":
                    self._base, self._closing = array.copy(), key

    def _compare(self, key: Key, rows: np.ndarray, actual: np.ndarray) -> None:
        known = self._reference.rows(key)
        at = np.minimum(np.searchsorted(known, rows), len(known) - 1)
        strange = known[at] != rows
        if strange.any():
            self._note(key, rows[strange][:1], "the reference did not compute this row")
            return
        self._missing[key][at] = False
        expected = self._reference.values(key)[at]
        if key.name == "hidden" and self._base is not None:
            allowed = self._tolerances.rounding * row_norms(expected)
            before = self._reference.values(self._closing)
            self._rows(key, rows, actual - self._base, expected - before, 0.0, allowed)
        elif key.name != "hidden":
            self._rows(key, rows, actual, expected, _LEAST * self._reference.median_norm(key), np.zeros(len(rows)))

    def _rows(
        self, key: Key, rows: np.ndarray, actual: np.ndarray, expected: np.ndarray, least: float, allowed: np.ndarray
    ) -> None:
        size = row_norms(expected)
        least = max(least, _LEAST * float(np.median(size)), float(np.finfo(np.float32).tiny))
        with np.errstate(invalid="ignore"):
            difference = np.maximum(row_norms(actual - expected) - allowed, 0.0)
        error = np.where(np.isfinite(difference), difference / np.maximum(size, least), np.inf)
        self._of(key).add(key, error, rows, "" if np.isfinite(error).all() else "not finite")

    def _note(self, key: Key, rows: np.ndarray, note: str) -> None:
        self._of(key).add(key, np.full(len(rows), np.inf), rows, note)

    def _of(self, key: Key) -> _Errors:
        # The hidden state before a layer is what the experts of the one before it added up to.
        where = (key.layer - 1, "sum") if key.graph == "input" else (key.layer, key.graph)
        return self._errors.setdefault(where, _Errors())

    def head(self, layer: int, actual: np.ndarray, expected: np.ndarray, width: int) -> None:
        """Compares all logits, float32 [N, V] both, by slices of `width` columns, which `panel` then counts."""
        rows = np.arange(len(expected))
        for number, start in enumerate(range(0, expected.shape[1], width)):
            columns, key = slice(start, start + width), Key(layer, "head", "logits", number)
            self._rows(key, rows, actual[:, columns], expected[:, columns], 0.0, np.zeros(len(rows)))

    def finish(self) -> None:
        """Call when the run is complete: what the reference computed and this run did not is a divergence."""
        for key, missing in self._missing.items():
            if missing.any():
                self._note(key, self._reference.rows(key)[missing], f"{int(missing.sum())} row(s) never computed")

    @property
    def differences(self) -> list[Difference]:
        """In the order of the work."""
        order = {graph: place for place, graph in enumerate(ORDER)}
        found = sorted(self._errors.items(), key=lambda item: (item[0][0], order[item[0][1]]))
        return [errors.result(*where, self._tolerances.of(where[1])) for where, errors in found]


# Order of a layer's graphs; "sum": what its experts added to the hidden state.
ORDER = ("qkv", "attention", "conv", *CLOSING, "ffn", "shared", "expert", "sum", "final_norm", "head")
