"""How the rows of a layer's experts become dispatches: planned from the counts alone, before any weight has arrived.

So neither the tiles nor the order in which results are added depend on groups, banks or the speed of flash.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Ladder = Sequence[tuple[int, int]]  # (slots, rows) of each rung, largest rows first, rows a multiple of the next rung's


MOST_PADDED = 1.25  # rows computed for each useful one, to save readings of weights


@dataclass
class Dispatch:
    """A planned dispatch of a rung (its place in the ladder); tiles: (panel, rows of its expert), in pool order."""

    rung: int
    tiles: list[tuple[int, slice]] = field(default_factory=list)


def plan_layer(counts: Sequence[int], panels_per_expert: int, ladder: Ladder) -> list[Dispatch]:
    """Dispatches for `counts[e]` rows through each panel of every expert e, in the order of their last tiles.

    Every tile reads its panel's weights, so an expert is cut largest tile first, and rows are added where that saves
    tiles and is cheap (`_padded`). With that, as few dispatches as there can be, and with those as few tiles: what is
    left of a rung for a dispatch that would not be full is cut into tiles of the rung below where that saves one.
    """
    rows = [size for _, size in ladder]
    cuts = [list(_cut(count, padded, rows)) for count, padded in zip(counts, _padded(counts, rows), strict=True)]
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
    # Of a split tile, the pieces beyond the expert's rows are nothing.
    tiles = [tile for tile in tiles if tile[2] < counts[tile[0] // panels_per_expert]]
    return _dispatches(tiles, counts, panels_per_expert, ladder)


def _padded(counts: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Rows to compute for each expert: multiples of the smallest tile, or more where fewer tiles then do.

    Reading a panel takes at least as long as computing a smallest tile: a tile saved is worth so many rows. The best
    bargains first, and never beyond MOST_PADDED times what is useful.
    """
    least = rows[-1]
    padded = [_round_up(count, least) for count in counts]
    bargains = []
    for expert, count in enumerate(counts):
        for size in rows[:-1]:
            more = _round_up(count, size)
            saved, added = _tiles(padded[expert], rows) - _tiles(more, rows), more - padded[expert]
            if added and added <= least * saved:
                bargains.append((added / saved, expert, more))
    room = MOST_PADDED * sum(counts) - sum(padded)
    for _, expert, more in sorted(bargains):
        added = more - padded[expert]
        if added <= room and _tiles(more, rows) < _tiles(padded[expert], rows):
            padded[expert] = more
            room -= added
    return padded


def _round_up(count: int, size: int) -> int:
    return -(-count // size) * size


def _tiles(left: int, rows: Sequence[int]) -> int:
    total = 0
    for size in rows:
        total += left // size
        left %= size
    return total


def _cut(count: int, padded: int, rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(rung, start, stop) of tiles of `padded` rows that cover `count` rows."""
    start = 0
    for rung, size in enumerate(rows):
        while start + size <= padded:
            yield rung, start, min(start + size, count)
            start += size


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
