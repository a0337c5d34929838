"""The logits file: any order of blocks, complete or absent."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from estream.cli.npy_sink import NpySink
from estream.errors import EStreamError


def test_blocks_in_any_order_give_the_matrix(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((7, 50)).astype(np.float32)
    path = tmp_path / "logits.npy"
    places = list(itertools.product((0, 3, 6), (0, 16, 32, 48)))
    rng.shuffle(places)
    with NpySink(path, 7, 50) as sink:
        for row, column in places:
            sink(row, column, matrix[row : row + 3, column : column + 16])  # views with gaps
        assert np.array_equal(sink.row(6), matrix[6])
        assert not path.exists()
    assert np.array_equal(np.load(path), matrix)
    assert [entry.name for entry in tmp_path.iterdir()] == ["logits.npy"]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "logits.npy"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), NpySink(path, 2, 2) as sink:
        sink(0, 0, np.zeros((2, 2), np.float32))
        raise KeyError
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["logits.npy"]


def test_missing_cells_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(EStreamError, match="2 cells were not written"), NpySink(tmp_path / "x.npy", 2, 3) as sink:
        sink(0, 0, np.zeros((2, 2), np.float32))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("row", "column"), [(1, 0), (0, 1), (-1, 0), (0, -1)])
def test_blocks_outside_are_an_error(tmp_path: Path, row: int, column: int) -> None:
    with pytest.raises(EStreamError, match="outside the matrix"), NpySink(tmp_path / "x.npy", 2, 3) as sink:
        sink(row, column, np.zeros((2, 3), np.float32))


def test_a_folder_that_is_absent_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NpySink(tmp_path / "absent" / "x.npy", 1, 1)
