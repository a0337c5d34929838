from __future__ import annotations

import numpy as np
import pytest

from estream.errors import CheckpointError
from estream.package import chunks
from estream.package.layout import PanelLayout
from estream.package.quantise import channel_magnitudes, panel_bytes, part_views, to_float, to_int8
from tests.support.schemes import panel_numbers

NAMES = ("gate.weight", "up.weight", "down.weight")


def test_int8_golden() -> None:
    weights = np.array([[127 / 128, 0, -1 / 128], [-63.5 / 128, 0, 2 / 128], [0.003, 0, 254 / 128]], np.float32)
    magnitude = channel_magnitudes(weights, 0, "w")
    assert magnitude.dtype == np.float16 and magnitude.tolist() == [1, 1, 2]
    assert to_int8(weights, 0, magnitude).tolist() == [[255, 128, 128], [64, 128, 129], [128, 128, 255]]  # to even
    magnitude = channel_magnitudes(weights, 1, "w")
    assert magnitude.tolist() == [1, 0.5, 2]
    assert to_int8(weights, 1, magnitude).tolist() == [[255, 128, 127], [1, 128, 132], [128, 128, 255]]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [1, 1e-3, 1e-7, 1000])
def test_int8_error_is_at_most_half_a_step(axis: int, size: float) -> None:
    """Of the float16 magnitude that is stored: rounding it costs nothing, not even among the subnormal ones."""
    weights = (np.random.default_rng(axis).standard_normal((33, 47)) * size).astype(np.float32)
    magnitude = channel_magnitudes(weights, axis, "w")
    integers = to_int8(weights, axis, magnitude).astype(np.int64) - 128
    step = np.expand_dims(magnitude / np.float64(128), axis)
    assert integers.min() >= -127
    assert (np.abs(integers * step - weights) <= step * 0.5001).all()
    if size > 1e-7:
        assert (np.abs(integers).max(axis=axis) == 127).all()


def test_int8_of_zero_and_of_tiny_channels_has_no_nan() -> None:
    weights = np.zeros((4, 3), np.float32)
    weights[0, 1] = 1e-44
    weights[0, 2] = 1e-8
    magnitude = channel_magnitudes(weights, 0, "w")
    assert magnitude[0] == 1 and magnitude[1] == magnitude[2] == np.float16(2**-24)
    assert to_int8(weights, 0, magnitude)[0].tolist() == [128, 128, 128 + 21]


def test_a_weight_beyond_float16_magnitudes_is_refused_by_name() -> None:
    weights = np.array([[64990, 1], [2, 3]], np.float32)
    assert to_int8(weights, 0, channel_magnitudes(weights, 0, "w"))[0, 0] == 255
    with pytest.raises(CheckpointError, match=r"big\.w do not fit float16 .asked \|w\| <= 64992.*had 65010"):
        channel_magnitudes(weights + 20, 0, "big.w")


@pytest.mark.parametrize("value, word", [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("scheme", ["f32", "f16", "int8", "int4"])
def test_weights_that_are_not_finite_are_refused_by_name(scheme: str, place: int, value: float, word: str) -> None:
    parts = [np.ones((64, 64), np.float32) for _ in range(3)]
    parts[place][3, 4] = value
    with pytest.raises(CheckpointError, match=f"{NAMES[place]} holds {word}"):
        panel_bytes(PanelLayout(64, 64, scheme), parts[0], parts[1], parts[2], NAMES)


def test_f16_overflow_is_refused_by_name() -> None:
    assert to_float(np.array([65504, -65519], np.float32), "F16", "w").tolist() == [65504, -65504]
    with pytest.raises(CheckpointError, match=r"tensor big\.w does not fit float16.*had 65520"):
        to_float(np.array([0, -65520], np.float32), "F16", "big.w")


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_scales_that_multiply_to_infinity_are_refused(scheme: str) -> None:
    large = np.full((64, 64), 300, np.float32)
    with pytest.raises(CheckpointError, match=r"up\.weight and down\.weight"):
        panel_bytes(PanelLayout(64, 64, scheme), large, large, large, NAMES)


def expert(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    a = x @ gate
    return (a / (1 + np.exp(-a)) * (x @ up)) @ down


def from_panel(layout: PanelLayout, panel: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The formula of `PanelLayout`, in float64, from packed bytes."""
    part = panel_numbers(layout, panel)
    a = x @ part["gate"] * part.get("gate_scale", 1)
    return (a / (1 + np.exp(-a)) * (x @ part["up"]) * part.get("mid_scale", 1)) @ part["down"]


@pytest.mark.parametrize("scheme, tolerance", [("f32", 1e-12), ("f16", 1e-3), ("int8", 0.02), ("int4", 0.2)])
def test_an_expert_is_the_sum_of_its_panels(scheme: str, tolerance: float) -> None:
    hidden, intermediate, width = 64, 80, 64 if scheme == "int4" else 32
    layout = PanelLayout(hidden, width, scheme)
    draw = np.random.default_rng(5)
    x = draw.standard_normal((7, hidden))
    gate, up = (draw.standard_normal((hidden, intermediate)).astype(np.float32) / 8 for _ in range(2))
    down = draw.standard_normal((intermediate, hidden)).astype(np.float32) / 8
    total = np.zeros((7, hidden))
    for start in range(0, intermediate, width):
        cut = slice(start, min(start + width, intermediate))  # the last panel has 16 channels
        panel = panel_bytes(layout, gate[:, cut], up[:, cut], down[cut], NAMES)
        assert panel.nbytes == layout.panel_bytes and panel.nbytes % 16384 == 0
        total += from_panel(layout, panel, x)
    exact = expert(x, *(w.astype(np.float64) for w in (gate, up, down)))
    assert np.abs(total - exact).max() <= tolerance * np.abs(exact).max()


def test_missing_channels_are_zeros_with_scale_one() -> None:
    layout = PanelLayout(32, 64, "int8")
    ones = np.full((32, 32), 127 / 128, np.float32)
    part = part_views(layout, panel_bytes(layout, ones, ones, ones, NAMES))
    for missing in (part["gate"][:, 32:], part["up"][:, 32:], part["down"][32:]):
        assert (missing == 128).all()
    assert (part["gate_scale"] == 1).all() and (part["mid_scale"] == 1).all()
    assert (part["gate"][:, :32] == 255).all() and (part["down"][:32] == 255).all()


@pytest.mark.parametrize("scheme", ["f16", "int8", "int4"])
def test_column_chunks_hold_the_matrix(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(6)
    gate, up = (draw.standard_normal((256, 200)).astype(np.float32) for _ in range(2))
    down = draw.standard_normal((200, 256)).astype(np.float32)
    whole = PanelLayout(256, 256, scheme)
    numbers = panel_numbers(whole, panel_bytes(whole, gate, up, down, NAMES))
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 256 * 64)
    cut = PanelLayout(256, 256, scheme)
    assert cut.chunks == 4 and {"gate.3", "up.0", "down.2"} <= {part.name for part in cut.parts}
    scales = [part.name for part in cut.parts if part.name.endswith("_scale")]
    assert scales == ([] if scheme == "f16" else ["gate_scale", "mid_scale"])
    for name, value in panel_numbers(cut, panel_bytes(cut, gate, up, down, NAMES)).items():
        np.testing.assert_array_equal(value, numbers[name])


def test_rounding_the_product_of_magnitudes_costs_nothing() -> None:
    """Magnitudes so small that their product is a subnormal float16: down is quantised for what is stored."""
    draw = np.random.default_rng(8)
    layout = PanelLayout(64, 64, "int8")
    gate, up, down = (draw.standard_normal((64, 64)).astype(np.float32) * size for size in (0.1, 0.005, 0.005))
    panel = panel_bytes(layout, gate, up, down, NAMES)
    assert part_views(layout, panel)["mid_scale"].max() < 2**-11
    x = draw.standard_normal((9, 64))
    exact = expert(x, *(w.astype(np.float64) for w in (gate, up, down)))
    assert np.linalg.norm(from_panel(layout, panel, x) - exact) < 0.012 * np.linalg.norm(exact)
