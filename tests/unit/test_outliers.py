"""Splitting outlier rows of down over two channels: golden choices, the same function, less error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from estream.package.layout import STEP, ZERO_POINT
from estream.package.outliers import find_split, outlier_error
from estream.package.pack import pack
from estream.package.quantise import channel_magnitudes, to_int8
from estream.package.reader import Package
from tests.support.tiny_packages import QWEN2_MOE, save_weights, write_checkpoint


def test_the_row_with_the_largest_gain_is_split_at_its_peak() -> None:
    down = np.array([[1, 1, 1, 1], [0.5, 64, -0.5, 1], [4, 0.1, 0.1, 0.1]], np.float32)
    split = find_split(down, 1)
    assert split.channels.tolist() == [1]
    assert split.peaks.tolist() == [[False, True, False, False]]
    assert split.apply(down).tolist() == [[1, 1, 1, 1], [0.5, 0, -0.5, 1], down[2].tolist(), [0, 64, 0, 0]]


def test_errors_by_hand() -> None:
    down = np.zeros((2, 100), np.float32)
    down[0] = 1
    down[0, 3] = 100  # before: 100 entries at 100²; after: one at 100², 99 at 1²
    down[1] = 2
    assert outlier_error(down, 1) == (100 * 100**2 - (100**2 + 99), 100 * 100**2 + 100 * 2**2)
    assert outlier_error(down, 0)[0] == 0
    assert outlier_error(down[1:], 1)[0] == 0


def test_even_rows_are_left_alone() -> None:
    assert find_split(np.zeros((3, 4), np.float32), 2).channels.size == 0


@given(st.integers(0, 1 << 30), st.integers(1, 6), st.integers(2, 40), st.integers(0, 8))
def test_rows_add_up_and_the_error_never_grows(seed: int, rows: int, width: int, spare: int) -> None:
    random = np.random.default_rng(seed)
    down = (random.standard_normal((rows, width)) * np.exp(2 * random.standard_normal((rows, width)))).astype("f4")
    split = find_split(down, spare)
    wide = split.apply(down)
    assert len(wide) == rows + len(split.channels) <= rows + spare
    together = wide[:rows].copy()
    together[split.channels] += wide[rows:]
    assert np.array_equal(together, down)
    assert (wide[:rows][split.channels] * wide[rows:] == 0).all()
    saved, before = outlier_error(down, spare)
    assert 0 <= saved <= before


def test_quantised_error_of_a_trained_looking_down_falls() -> None:
    random = np.random.default_rng(0)
    down = random.standard_normal((64, 128)).astype(np.float32)
    down[np.arange(8), np.arange(8)] *= 200

    def error(matrix: np.ndarray) -> float:
        magnitude = channel_magnitudes(matrix, 1, "down")
        integers = to_int8(matrix, 1, magnitude).astype(np.float32) - ZERO_POINT
        return float(np.square(integers * magnitude[:, None] * STEP - matrix).sum())

    assert error(find_split(down, 8).apply(down)) < 0.01 * error(down)


def test_pack_adds_a_panel_to_shared_records_only_where_it_pays(tmp_path: Path) -> None:
    folder, config = tmp_path / "checkpoint", QWEN2_MOE | {"hidden_size": 128}
    weights = write_checkpoint(folder, config)
    plain = pack(folder, tmp_path / "plain.estream", experts="int8")
    assert Package.open(tmp_path / "plain.estream").manifest.spare == 0
    down = weights["model.layers.0.mlp.shared_expert.down_proj.weight"]
    down[0] *= 100  # stored [H, I]: one entry of every channel's row
    save_weights(folder, weights)
    peaked = pack(folder, tmp_path / "peaked.estream", experts="int8")
    package = Package.open(tmp_path / "peaked.estream")
    assert package.manifest.spare == 1
    assert package.shared_panels == package.pool.panel.panels(package.architecture.shared_intermediate) + 1
    assert package.ffn_panels == package.pool.panel.panels(package.architecture.dense_intermediate) + 1
    assert peaked.files["experts.safetensors"] == plain.files["experts.safetensors"]
    pack(folder, tmp_path / "float.estream", experts="f32")
    assert Package.open(tmp_path / "float.estream").manifest.spare == 0
