"""Final norm and output head on htp: logits only for the rows asked for, one column slice at a time."""

from __future__ import annotations

import numpy as np

from estream.layers.head import LogitsSink
from estream.layers.htp.graphs import HtpGraphs
from estream.layers.htp.state import HtpState, tensors
from estream.layers.state import check_finite
from estream.layers.weights import DenseWeights
from estream.package.reader import Package


class HtpHead:
    """Logits of chosen rows of the hidden state."""

    def __init__(self, graphs: HtpGraphs, package: Package, weights: DenseWeights, state: HtpState) -> None:
        self._graph, self._rows, self._state = graphs.head, graphs.head_rows, state
        self._vocab, self._width = package.architecture.vocab, package.head_width
        self._norm = state.norm_weights(dict(weights.final), "final_norm", "final norm")
        names = ("head", "head.scale")
        self._slices = [
            state.half.bindings(graphs.head, weights.head(index), names, f"head slice {index}")
            for index in range(package.head_slices)
        ]
        self._normed, self._logits = state.bound(graphs.head, "normed"), tensors(state, graphs.head, "logits")

    def normalise(self, first: int, last: int) -> None:
        """Fills normed[first:last] with the final norm of hidden[first:last]."""
        for start in range(first, last, self._state.block):
            rows = min(self._state.block, last - start)
            self._state.norm(self._norm, start, rows, "hidden state after the last layer")
            self._state.keep(start, rows)

    def run(self, first: int, last: int, sink: LogitsSink) -> None:
        """Logits of the normed rows [first, last), slice by slice; row numbers given to `sink` start at 0."""
        for index, weights in enumerate(self._slices):
            weights.bind()
            column = index * self._width
            for start in range(first, last, self._rows):
                rows = min(self._rows, last - start)
                self._normed.array[:rows] = self._state.normed[start : start + rows]
                self._normed.array[rows:] = 0
                self._graph.run()
                pieces = [piece.array[:rows].astype(np.float32) for piece in self._logits]
                block = np.concatenate(pieces, axis=1)[:, : self._vocab - column]
                check_finite(block, start, "output logits")
                sink(start - first, column, block)
