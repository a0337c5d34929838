"""Dispatches of a layer: every row of every panel once, as few padded rows, dispatches and tiles as there can be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream.layers.htp.ladder import MOST_PADDED, plan_layer

DEFAULT = ((2, 256), (4, 128), (16, 32))
INT4 = ((1, 256), (2, 128), (8, 32))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 700), max_size=20), st.integers(1, 3), st.sampled_from([DEFAULT, INT4, ((4, 32),)]))
def test_every_row_once_in_full_dispatches(counts: list[int], panels: int, ladder: tuple[tuple[int, int], ...]) -> None:
    plan = plan_layer(counts, panels, ladder)
    covered: Counter[tuple[int, int]] = Counter()
    for dispatch in plan:
        slots, rows = ladder[dispatch.rung]
        assert 1 <= len(dispatch.tiles) <= slots
        assert dispatch.tiles == sorted(dispatch.tiles, key=lambda tile: (tile[0], tile[1].start))
        for panel, piece in dispatch.tiles:
            assert 0 < piece.stop - piece.start <= rows
            covered.update((panel, row) for row in range(piece.start, piece.stop))
    assert set(covered.values()) <= {1}
    assert len(covered) == panels * sum(counts)
    last = [(dispatch.tiles[-1][0], dispatch.tiles[-1][1].start) for dispatch in plan]
    assert last == sorted(last)  # in the order in which they are complete
    least, useful = panels * sum(-(-count // 32) * 32 for count in counts), panels * sum(counts)
    most = max(least, MOST_PADDED * useful)
    assert len(plan) <= -(-most // (ladder[0][0] * ladder[0][1]))  # no more dispatches than such rows need


@pytest.mark.parametrize(
    ("counts", "dispatches"),
    [
        ([512], [(256, 2)]),  # a hot expert fills a dispatch
        ([1] * 16, [(32, 16)]),  # cold ones share it
        ([250, 130], [(32, 13)]),  # 416 padded rows fit in one dispatch, of the smallest tiles
        ([250, 130, 100], [(32, 1), (128, 4)]),  # 544 do not: the 256 is split to fill the 128s
        ([93] * 8, [(128, 4), (32, 12)]),  # 128 instead of 3 x 32 for as many as 1.25 x 744 rows allow
        ([125] * 4, [(128, 4)]),
    ],
)
def test_small_layers(counts: list[int], dispatches: list[tuple[int, int]]) -> None:
    assert [(DEFAULT[d.rung][1], len(d.tiles)) for d in plan_layer(counts, 1, DEFAULT)] == dispatches


def test_left_over_tiles_are_split_only_where_that_saves_a_dispatch() -> None:
    # Three tiles of 256 and one of 128: the third goes to the rung below, as two tiles.
    plan = plan_layer([256, 256, 256, 128], 1, DEFAULT)
    assert [(DEFAULT[d.rung][1], len(d.tiles)) for d in plan] == [(256, 2), (128, 3)]
    # Three of 256 alone: a second dispatch is needed anyway, so the weights are read once for it.
    plan = plan_layer([256, 256, 256], 1, DEFAULT)
    assert [(DEFAULT[d.rung][1], len(d.tiles)) for d in plan] == [(256, 2), (256, 1)]
