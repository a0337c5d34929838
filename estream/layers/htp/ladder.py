"""How the rows of a layer's experts become dispatches: planned from the counts alone, before any weight has arrived.

So neither the tiles nor the order in which results are added depend on groups, banks or the speed of flash.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Ladder = Sequence[tuple[int, int]]  # (slots, rows) of each rung, largest rows first, rows a multiple of the next rung's


@dataclass
class Dispatch:
    """A planned dispatch of a rung (its place in the ladder); tiles: (panel, rows of its expert), in pool order."""

    rung: int
    tiles: list[tuple[int, slice]] = field(default_factory=list)


def plan_layer(counts: Sequence[int], panels_per_expert: int, ladder: Ladder) -> list[Dispatch]:
    """Dispatches for `counts[e]` rows through each panel of every expert e, in the order of their last tiles.

    As few padded rows as the smallest tile allows; with that, as few dispatches as there can be; with that, as few
    tiles (readings of a panel's weights). An expert is cut largest tile first. What is left of a rung for a dispatch
    that would not be full is cut into tiles of the rung below where that saves a dispatch.
    """
    rows = [size for _, size in ladder]
    cuts = [list(_cut(count, rows)) for count in counts]
    totals = [panels_per_expert * sum(rung == at for cut in cuts for rung, _, _ in cut) for at in range(len(ladder))]
    split = min(
        itertools.product((False, True), repeat=len(ladder) - 1), key=lambda choice: _cost(totals, ladder, choice)
    )
    tiles = [
        (panels_per_expert * expert + panel, rung, start)
        for expert, cut in enumerate(cuts)
        for panel in range(panels_per_expert)
        for rung, start, _ in cut
    ]
    for rung, wanted in enumerate(split):
        if wanted:
            tiles = _split_last(tiles, rung, ladder)
    return _dispatches(tiles, counts, panels_per_expert, ladder)


def _cut(count: int, rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(rung, start, stop) of tiles that cover `count` rows."""
    start, left = 0, -(-count // rows[-1]) * rows[-1]
    for rung, size in enumerate(rows):
        for _ in range(left // size):
            yield rung, start, min(start + size, count)
            start += size
        left %= size


def _cost(totals: Sequence[int], ladder: Ladder, split: Sequence[bool]) -> tuple[int, int]:
    """Dispatches and tiles if the left-over tiles of the chosen rungs are split."""
    counts = list(totals)
    for rung, wanted in enumerate(split):
        if wanted:
            left = counts[rung] % ladder[rung][0]
            counts[rung] -= left
            counts[rung + 1] += left * (ladder[rung][1] // ladder[rung + 1][1])
    return sum(-(-count // slots) for count, (slots, _) in zip(counts, ladder, strict=True)), sum(counts)


def _split_last(tiles: list[tuple[int, int, int]], rung: int, ladder: Ladder) -> list[tuple[int, int, int]]:
    """The last tiles of a rung, those beyond full dispatches, as tiles of the rung below."""
    mine = [at for at, tile in enumerate(tiles) if tile[1] == rung]
    last = set(mine[len(mine) - len(mine) % ladder[rung][0] :])
    size, less = ladder[rung][1], ladder[rung + 1][1]
    pieces = []
    for at, (panel, own, start) in enumerate(tiles):
        if at in last:
            pieces += [(panel, rung + 1, start + by) for by in range(0, size, less)]
        else:
            pieces.append((panel, own, start))
    return pieces


def _dispatches(
    tiles: Sequence[tuple[int, int, int]], counts: Sequence[int], panels_per_expert: int, ladder: Ladder
) -> list[Dispatch]:
    found: list[tuple[int, Dispatch]] = []
    for rung, (slots, rows) in enumerate(ladder):
        mine = [at for at, tile in enumerate(tiles) if tile[1] == rung]
        for first in range(0, len(mine), slots):
            chosen = mine[first : first + slots]
            dispatch = Dispatch(rung)
            for panel, _, start in (tiles[at] for at in chosen):
                stop = min(start + rows, counts[panel // panels_per_expert])
                dispatch.tiles.append((panel, slice(start, stop)))
            found.append((chosen[-1], dispatch))
    return [dispatch for _, dispatch in sorted(found, key=lambda pair: pair[0])]
