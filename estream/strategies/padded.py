"""`padded`: every expert at the capacity of a static graph that could take the whole prompt. Exact, nothing dropped.

Capacity is the rows of the prompt in whole tiles, for every expert of every layer, those without tokens too: what a
graph with fixed shapes and weights in their places has to compute. Rows beyond an expert's own have gates of 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from estream.layers.experts import ExpertRunner
from estream.layers.htp.experts import HtpExperts
from estream.layers.htp.ladder import Dispatch
from estream.layers.htp.state import HtpState
from estream.layers.state import State
from estream.layers.targets import ExpertPart, RunnerOpening
from estream.routing import RouteTable, Tile, split_rows


def open_padded(opening: RunnerOpening) -> ExpertPart:
    """The runner of the opening's target."""
    if isinstance(opening.state, HtpState):
        assert opening.graphs is not None
        return PaddedHtpExperts(opening.target, opening.graphs.rungs, opening.package.pool, opening.state)
    assert isinstance(opening.state, State)
    return PaddedExperts(opening.target, opening.package, opening.state)


class PaddedExperts(ExpertRunner):
    """On cpu: as many rows for each expert as the prompt has, in the tiles that the whole prompt would be cut into."""

    def begin(self, tokens: int) -> None:
        super().begin(tokens)
        self._capacity = [piece.stop - piece.start for piece in split_rows(tokens, self.rows)]

    def needed(self, table: RouteTable) -> np.ndarray:
        """Every panel of the layer."""
        return np.ones_like(super().needed(table))

    def tiles(self, table: RouteTable, expert: int) -> Iterator[tuple[Tile, int]]:
        own = slice(int(table.offsets[expert]), int(table.offsets[expert + 1]))
        rows, gates, start = table.rows[own], table.gates[own], 0
        for size in self._capacity:
            piece = slice(start, start + size)
            yield Tile(rows[piece], gates[piece]), size
            start += size


class PaddedHtpExperts(HtpExperts):
    """On htp: tiles of the ladder's largest rung, as many for each expert as the whole prompt would fill."""

    def begin(self, tokens: int) -> None:
        super().begin(tokens)
        self._tokens = tokens

    def needed(self, table: RouteTable) -> np.ndarray:
        """Every panel of the layer."""
        return np.ones_like(super().needed(table))

    def dispatches(self, table: RouteTable) -> list[Dispatch]:
        slots, rows = self._ladder[0]
        tiles = [
            (panel, slice(min(start, count), min(start + rows, count)))
            for panel, count in enumerate(np.repeat(table.counts, self._panels_per_expert).tolist())
            for start in range(0, self._tokens, rows)
        ]
        return [Dispatch(0, tiles[first : first + slots]) for first in range(0, len(tiles), slots)]
