"""Route tables, tiles and row splits, with values computed by hand and properties for any routing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from estream.models.base import Choice
from estream.models.choose import near_ties
from estream.routing import RouteTable, split_rows


def _choice(experts: list[list[int]], gates: list[list[float]]) -> Choice:
    return Choice(np.array(experts, np.int32), np.array(gates, np.float32))


def test_table_of_three_tokens() -> None:
    table = RouteTable.build(_choice([[2, 0], [0, 3], [2, 3]], [[0.5, 0.25], [0.125, 1.0], [2.0, 4.0]]), 5)
    assert table.offsets.tolist() == [0, 2, 2, 4, 6, 6]
    assert table.rows.tolist() == [0, 1, 0, 2, 1, 2]
    assert table.gates.tolist() == [0.25, 0.125, 0.5, 2.0, 1.0, 4.0]
    assert table.needed_panels(2).tolist() == [True, True, False, False, True, True, True, True, False, False]


def test_tiles_of_one_expert() -> None:
    table = RouteTable.build(_choice([[0]] * 7, [[float(i)] for i in range(7)]), 2)
    tiles = list(table.tiles(0, 3))
    assert [tile.rows.tolist() for tile in tiles] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [tile.gates.tolist() for tile in tiles] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0, 6.0]]
    assert list(table.tiles(1, 3)) == []


@given(st.integers(0, 2000), st.integers(1, 513))
def test_splits_cover_rows_evenly_in_the_fewest_pieces(rows: int, most: int) -> None:
    pieces = list(split_rows(rows, most))
    assert len(pieces) == -(-rows // most)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(rows))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert not sizes or max(sizes) <= min(most, min(sizes) + 1)


@given(st.data())
def test_every_choice_appears_once_with_its_gate(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, experts))
    tokens = data.draw(st.integers(1, 40))
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    chosen = np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    gates = random.random((tokens, top_k)).astype(np.float32)
    table = RouteTable.build(Choice(chosen, gates), experts)
    dense = np.zeros((tokens, experts), np.float32)
    for expert in range(experts):
        rows_seen: list[int] = []
        for tile in table.tiles(expert, 5):
            assert 1 <= len(tile.rows) <= 5
            dense[tile.rows, expert] += tile.gates
            rows_seen += tile.rows.tolist()
        assert rows_seen == sorted(set(rows_seen))
        assert bool(rows_seen) == bool(table.needed_panels(1)[expert])
    expected = np.zeros_like(dense)
    np.put_along_axis(expected, chosen.astype(np.int64), gates, axis=1)
    assert np.array_equal(dense, expected)


def test_near_ties_are_gaps_at_the_border_only() -> None:
    logits = np.array(
        [
            [4.0, 3.0, 2.0, 1.0],  # far apart
            [4.0, 2.001, 2.0, 1.0],  # the second and the third are close
            [4.0, 3.999, 2.0, 1.0],  # close, but both are chosen
            [4.0, 3.0, 1.001, 1.0],  # close, and neither is
            [2.0, 2.0, 2.0, 2.0],
            [1e4, 1e4 - 3, 1e4 - 6, 1e4 - 9],  # beside its size
            [0.0, 0.0, 0.0, 0.0],
        ],
        np.float32,
    )
    assert near_ties(logits, 2).tolist() == [1, 4, 5, 6]
    assert near_ties(logits, 4).tolist() == [] == near_ties(logits[:0], 2).tolist()
