"""From the experts chosen per token to the work of a layer: route table, tiles, needed panels.

The order of experts, panels and tiles depends on the prompt length, the route table and the target only, never on
group size, banks, lanes or residency: that is why streamed equals resident, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from estream.models.base import Choice


@dataclass(frozen=True)
class Tile:
    """Up to T token rows of one expert. rows int32 [n], gates float32 [n]."""

    rows: np.ndarray
    gates: np.ndarray


@dataclass(frozen=True)
class RouteTable:
    """Token rows and gate weights per expert, in CSR form: expert e owns [offsets[e], offsets[e + 1]).

    offsets int64 [E + 1], rows int32 [N·k] (ascending within an expert), gates float32 [N·k].
    """

    offsets: np.ndarray
    rows: np.ndarray
    gates: np.ndarray

    @classmethod
    def build(cls, choice: Choice, experts: int) -> RouteTable:
        """From experts int32 [N, k] and gates float32 [N, k]; an expert may appear once per token."""
        chosen = choice.experts.reshape(-1)
        order = np.argsort(chosen, kind="stable")
        offsets = np.zeros(experts + 1, np.int64)
        np.cumsum(np.bincount(chosen, minlength=experts), out=offsets[1:])
        per_token = choice.experts.shape[1]
        return cls(offsets, (order // per_token).astype(np.int32), choice.gates.reshape(-1)[order])

    @property
    def counts(self) -> np.ndarray:
        """Rows per expert, int64 [E]."""
        return np.diff(self.offsets)

    def needed_panels(self, panels_per_expert: int) -> np.ndarray:
        """bool [E · P]: the panels whose expert has at least one token."""
        return np.repeat(self.counts > 0, panels_per_expert)

    def tiles(self, expert: int, max_rows: int) -> Iterator[Tile]:
        """The expert's rows in tiles of at most `max_rows`, as even as possible."""
        first, last = int(self.offsets[expert]), int(self.offsets[expert + 1])
        for piece in split_rows(last - first, max_rows):
            part = slice(first + piece.start, first + piece.stop)
            yield Tile(self.rows[part], self.gates[part])


def split_rows(rows: int, max_rows: int) -> Iterator[slice]:
    """`rows` rows in the fewest pieces of at most `max_rows`, sizes differing by at most one: no tiny last piece."""
    pieces = -(-rows // max_rows)
    for piece in range(pieces):
        yield slice(piece * rows // pieces, (piece + 1) * rows // pieces)
