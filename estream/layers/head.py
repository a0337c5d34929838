"""Final norm and output head: logits only for the rows asked for, one column slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from estream.layers.state import State, check_finite
from estream.layers.weights import DenseWeights, bind_weights
from estream.package.reader import Package
from estream.routing import split_rows
from estream.runtime.target import Target

# Receives (first row, first column, block float32 [rows, columns]); the block is valid during the call only.
LogitsSink = Callable[[int, int, np.ndarray], None]


class Head:
    """Logits of chosen rows of the hidden state."""

    def __init__(self, target: Target, package: Package, weights: DenseWeights, state: State) -> None:
        self._weights = weights
        self._state = state
        self._vocab = package.architecture.vocab
        self._slices, self._width = package.head_slices, package.head_width
        self._norm = target.load(package.graph(target.graphs, "final_norm"))
        self._head = target.load(package.graph(target.graphs, "head"))
        bind_weights(self._norm, weights.vectors("final_norm"))
        self._logits = target.allocate(state.block * self._width * 4, "block of output logits")
        self._view = self._logits.array(np.float32, (state.block * self._width,))

    def settle(self) -> None:
        """Nothing to do: weights are looked up whenever they are bound."""

    def normalise(self, first: int, last: int) -> None:
        """Fills normed[first:last] with the final norm of hidden[first:last]."""
        state = self._state
        for piece in split_rows(last - first, state.block):
            start, rows = first + piece.start, piece.stop - piece.start
            state.load(state.hidden, "hidden", start, rows)
            state.check_finite("hidden", start, rows, "hidden state after the last layer")
            self._norm.bind("hidden", state.blocks["hidden"], rows=rows)
            self._norm.bind("normed", state.blocks["normed"], rows=rows)
            self._norm.run()
            state.store("normed", state.normed, start, rows)

    def run(self, wanted: Sequence[tuple[slice, LogitsSink]]) -> None:
        """Logits of pieces of the normed rows, slice by slice: each slice once for all. The row numbers that a piece's
        sink gets start at 0."""
        for index in range(self._slices):
            self._weights.enter_head(index)
            bind_weights(self._head, self._weights.head(index))
            for rows, sink in wanted:
                self._run_rows(index * self._width, rows, sink)

    def _run_rows(self, column: int, rows: slice, sink: LogitsSink) -> None:
        """The bound slice, whose first column is `column`."""
        state, first = self._state, rows.start
        columns = min(self._width, self._vocab - column)
        for piece in split_rows(rows.stop - first, state.block):
            useful = piece.stop - piece.start
            # One row alone goes through another float kernel than the same row in a block: run two.
            count = max(useful, 2)
            state.load(state.normed, "normed", first + piece.start, useful)
            state.pad("normed", useful, count)
            self._head.bind("normed", state.blocks["normed"], rows=count)
            self._head.bind("logits", self._logits, rows=count)
            self._head.run()
            block = self._view[: count * self._width].reshape(count, self._width)
            check_finite(block[:useful, :columns], first + piece.start, "output logits")
            sink(piece.start, column, block[:useful, :columns])
