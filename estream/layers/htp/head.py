"""Final norm and output head on htp: logits only for the rows asked for, one column slice at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from estream.layers.head import LogitsSink
from estream.layers.htp.graphs import HtpGraphs
from estream.layers.htp.state import HtpState, tensors
from estream.layers.htp.weights import Bindings
from estream.layers.state import check_finite
from estream.layers.weights import DenseWeights
from estream.package.reader import Package


class HtpHead:
    """Logits of chosen rows of the hidden state."""

    def __init__(self, graphs: HtpGraphs, package: Package, weights: DenseWeights, state: HtpState) -> None:
        self._graph, self._rows, self._state = graphs.head, graphs.head_rows, state
        self._vocab, self._width = package.architecture.vocab, package.head_width
        self._weights = weights
        self._norm = state.norm_weights(dict(weights.vectors("final_norm")), "final_norm", "final norm")
        self._slices: list[Bindings] = []
        self._count = package.head_slices
        self._normed, self._logits = state.bound(graphs.head, "normed"), tensors(state, graphs.head, "logits")

    def settle(self) -> None:
        """The weights have their places."""
        self._slices = [
            self._state.half.bindings(
                self._graph, self._weights.head(index), ("head", "head.scale", "head.bias"), f"head slice {index}"
            )
            for index in range(self._count)
        ]

    def normalise(self, first: int, last: int) -> None:
        """Fills normed[first:last] with the final norm of hidden[first:last]."""
        for start in range(first, last, self._state.block):
            rows = min(self._state.block, last - start)
            self._state.norm(self._norm, start, rows, "hidden state after the last layer")
            self._state.keep(start, rows)

    def run(self, wanted: Sequence[tuple[slice, LogitsSink]]) -> None:
        """Logits of pieces of the normed rows, slice by slice: each slice once for all. The row numbers that a piece's
        sink gets start at 0."""
        for index, weights in enumerate(self._slices):
            self._weights.enter_head(index)
            weights.bind()
            for rows, sink in wanted:
                self._run_rows(index * self._width, rows, sink)

    def _run_rows(self, column: int, wanted: slice, sink: LogitsSink) -> None:
        """The bound slice, whose first column is `column`."""
        for start in range(wanted.start, wanted.stop, self._rows):
            rows = min(self._rows, wanted.stop - start)
            self._normed.array[:rows] = self._state.normed[start : start + rows]
            self._normed.array[rows:] = 0
            self._graph.run()
            pieces = [piece.array[:rows].astype(np.float32) for piece in self._logits]
            block = np.concatenate(pieces, axis=1)[:, : self._vocab - column]
            check_finite(block, start, "output logits")
            sink(start - wanted.start, column, block)
