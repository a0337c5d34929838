"""What `npumoe` decides before and in a layer: tiers of capacity, whose routes go, which experts share a dispatch.

Pure: from expert loads, route tables and saliencies alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from estream.layers.htp.ladder import Dispatch
from estream.routing import RouteTable
from estream.strategies.loads import ExpertLoads

REACH = 4  # tiles of a dispatch lie within so many times the most slots, in pool order


@dataclass(frozen=True)
class Tiers:
    """rows: capacities per window of `window` tokens, ascending. of: each expert's tier, int64 [E], by layer; -1: cold,
    without a capacity."""

    window: int
    rows: tuple[int, ...]
    of: Mapping[int, np.ndarray]

    @classmethod
    def choose(cls, loads: ExpertLoads, count: int, quantile: float, cold_below: float) -> Tiers:
        """At most `count` tiers, those that pad the fewest rows over all hot experts: each expert gets the smallest
        that has the `quantile` of its load. cold: experts chosen for less than `cold_below` of the tokens."""
        cold = {layer: popularity < cold_below for layer, popularity in loads.popularity.items()}
        need = {layer: np.maximum(np.ceil(loads.load(layer, quantile)), 1).astype(np.int64) for layer in cold}
        hot = np.concatenate([need[layer][~cold[layer]] for layer in need])
        rows = fit_tiers(hot, count)
        return cls(
            loads.window,
            rows,
            {layer: np.where(cold[layer], -1, np.searchsorted(rows, need[layer])) for layer in need},
        )

    def capacities(self, tokens: int) -> list[int]:
        """Of each tier, for a prompt of `tokens` rows."""
        return [min(-(-rows * tokens // self.window), tokens) for rows in self.rows]

    def hot(self) -> list[int]:
        """Experts of each tier, over all layers."""
        tiers = np.concatenate([*self.of.values()])
        return np.bincount(tiers[tiers >= 0], minlength=len(self.rows)).tolist()

    def cold(self) -> int:
        """Cold experts, over all layers."""
        return int(sum((of < 0).sum() for of in self.of.values()))


def fit_tiers(needs: np.ndarray, count: int) -> tuple[int, ...]:
    """At most `count` sizes, ascending, of which each need (int64 [n], at least 1) gets the smallest that holds it,
    with the smallest sum over all needs. Of equal answers the one with the fewest sizes."""
    sizes, times = np.unique(needs, return_counts=True)
    if not len(sizes):
        return ()
    # cost[j]: rows computed for the needs of the first j sizes, in as many tiers as rounds have passed.
    before = np.concatenate([[0], np.cumsum(times)])
    never = np.iinfo(np.int64).max // 2
    cost = np.concatenate([[0], np.full(len(sizes), never)])
    starts, totals = [], []  # by round: the first size of the last tier, by j - 1; rows computed for all
    for _ in range(min(count, len(sizes))):
        added = sizes[None, :] * np.maximum(before[None, 1:] - before[:, None], 0)
        later = np.where(before[:, None] < before[None, 1:], np.minimum(cost[:, None] + added, never), never)
        starts.append(later.argmin(axis=0))
        cost = np.concatenate([[never], later.min(axis=0)])
        totals.append(int(cost[-1]))
    tiers, end = [], len(sizes)
    for start in reversed(starts[: int(np.argmin(totals)) + 1]):
        tiers.append(int(sizes[end - 1]))
        end = int(start[end - 1])
    return tuple(reversed(tiers))


def prune(table: RouteTable, saliency: np.ndarray, capacity: np.ndarray) -> RouteTable:
    """The routes that fit: of an expert with more rows than its capacity, the most salient; of equals, the first rows.

    saliency: float32 [rows of the table]. capacity: int64 [E], below 0: no limit. Rows stay ascending.
    """
    counts = table.counts
    over = np.flatnonzero((capacity >= 0) & (counts > capacity))
    if not len(over):
        return table
    kept = np.ones(len(table.rows), bool)
    for expert in over.tolist():
        own = slice(int(table.offsets[expert]), int(table.offsets[expert + 1]))
        order = np.lexsort((table.rows[own], -saliency[own]))
        kept[own.start + order[capacity[expert] :]] = False
    offsets = np.zeros_like(table.offsets)
    np.cumsum(np.where(capacity >= 0, np.minimum(counts, capacity), counts), out=offsets[1:])
    return RouteTable(offsets, table.rows[kept], table.gates[kept])


def group_tiles(tiles: Iterable[tuple[int, int, slice]], slots: Sequence[int]) -> list[Dispatch]:
    """Dispatches for tiles (panel, rung, rows of its expert) in pool order: consecutive tiles of a rung together.

    A dispatch that is not full when its first tile is REACH times the most slots behind goes as it is: that bounds what
    waits, banks and results.
    """
    waiting: deque[tuple[int, Dispatch]] = deque()  # (place of the first tile, tiles that are not enough yet)
    found: list[Dispatch] = []
    for place, (panel, rung, piece) in enumerate(tiles):
        while waiting and place - waiting[0][0] >= REACH * max(slots):
            found.append(waiting.popleft()[1])
        own = next((one for one in waiting if one[1].rung == rung), None)
        if own is None:
            own = (place, Dispatch(rung))
            waiting.append(own)
        own[1].tiles.append((panel, piece))
        if len(own[1].tiles) == slots[rung]:
            waiting.remove(own)
            found.append(own[1])
    return found + [dispatch for _, dispatch in waiting]
