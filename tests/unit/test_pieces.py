"""Which pieces share a mapping, and what is tried after a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estream.runtime.pieces import LARGEST, PAGE, Refused, cut, join, map_pieces
from estream.runtime.target import Buffer

MIB = 1 << 20
GIB = 1 << 30


class Mapper:
    """Addresses from a counter, a gap after each; `grants` decides by size and by what was mapped before."""

    def __init__(self, grants: Callable[[int, int], bool] = lambda size, before: True) -> None:
        self.tried: list[int] = []
        self.made: list[tuple[int, int]] = []
        self._grants, self._next = grants, PAGE

    def __call__(self, nbytes: int) -> int | None:
        self.tried.append(nbytes)
        if not self._grants(nbytes, sum(size for _, size in self.made)):
            return None
        self.made.append((self._next, nbytes))
        self._next += nbytes + PAGE
        return self.made[-1][0]


def placed(sizes: list[int], mapper: Mapper, largest: int = LARGEST) -> list[Buffer]:
    return [buffer for _, pieces in map_pieces(sizes, mapper, largest) for buffer in pieces]


def test_one_mapping_where_everything_fits() -> None:
    mapper = Mapper()
    assert placed([100, 5000, MIB], mapper) == [Buffer(4096, 100), Buffer(8192, 5000), Buffer(16384, MIB)]
    assert mapper.made == [(4096, 12288 + MIB)]
    assert placed([], mapper) == []


def test_mappings_stay_below_two_gibibytes() -> None:
    mapper = Mapper()
    assert len(placed([700 * MIB] * 7, mapper)) == 7
    assert [size // MIB for _, size in mapper.made] == [1400, 1400, 1400, 700]
    mapper = Mapper()
    placed([GIB, GIB - PAGE, PAGE], mapper)
    assert [size for _, size in mapper.made] == [LARGEST, PAGE]


def test_a_piece_of_two_gibibytes_is_never_asked_for() -> None:
    mapper = Mapper()
    with pytest.raises(Refused) as error:
        placed([MIB, 2 * GIB], mapper)
    assert mapper.tried == [MIB] and (error.value.asked, error.value.mapped) == (2 * GIB + MIB, MIB)
    assert error.value.tried == (2 * GIB,)


def test_sizes_are_probed_downwards_and_stay_there() -> None:
    mapper = Mapper(lambda size, before: size <= 440 * MIB)
    banks = placed([100 * MIB] * 11, mapper)
    assert [size // MIB for size in mapper.tried] == [1100, 500, 200, 200, 200, 200, 200, 100]
    assert {bank.nbytes for bank in banks} == {100 * MIB}
    starts = [bank.address for bank in banks]
    assert starts == sorted(starts) and starts[2] - starts[1] == 100 * MIB + PAGE


def test_what_was_tried_is_told_when_memory_ends() -> None:
    mapper = Mapper(lambda size, before: before + size <= 700 * MIB)
    with pytest.raises(Refused) as error:
        placed([100 * MIB] * 10, mapper)
    assert [size // MIB for size in mapper.tried] == [1000, 500, 500, 200, 200, 100]
    assert [size // MIB for size in error.value.tried] == [1000, 500, 200, 100]
    assert (error.value.asked, error.value.mapped) == (1000 * MIB, 700 * MIB)


@given(
    sizes=st.lists(st.integers(1, 50 * PAGE), max_size=30),
    most=st.integers(50, 200),
    largest=st.integers(1, 300),
)
def test_pieces_are_whole_in_order_and_apart(sizes: list[int], most: int, largest: int) -> None:
    mapper = Mapper(lambda size, before: size <= most * PAGE)
    buffers = placed(sizes, mapper, largest * PAGE)
    assert [buffer.nbytes for buffer in buffers] == sizes
    ends = [0]
    for buffer in buffers:
        assert buffer.address % PAGE == 0 and buffer.address >= ends[-1]
        assert any(at <= buffer.address and buffer.address + buffer.nbytes <= at + size for at, size in mapper.made)
        ends.append(buffer.address + buffer.nbytes)
    assert len(mapper.made) <= len(sizes)
    assert all(size <= max(largest, 50) * PAGE for _, size in mapper.made)


def test_cut_and_join_are_opposites() -> None:
    whole = Buffer(4096, 600)
    parts = cut(whole, [100, 200, 300])
    assert parts == [Buffer(4096, 100), Buffer(4196, 200), Buffer(4396, 300)] and join(parts) == [whole]
    assert join([*parts, Buffer(10_000, 1)]) == [whole, Buffer(10_000, 1)] and join([]) == []
