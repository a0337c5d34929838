from __future__ import annotations

import numpy as np
import pytest

from estream.errors import CheckpointError
from estream.package.layout import PanelLayout
from estream.package.quantise import panel_bytes, part_views, to_float, to_int8
from tests.support.schemes import panel_numbers

NAMES = ("gate.weight", "up.weight", "down.weight")


def test_int8_golden() -> None:
    weights = np.array([[127, 0, -1], [-63.5, 0, 2], [0.4, 0, 254]], np.float32)
    columns, scale = to_int8(weights, 0, "w")
    assert scale.tolist() == [1, 1, 2]
    assert columns.tolist() == [[127, 0, 0], [-64, 0, 1], [0, 0, 127]]  # rint: halves to even
    rows, scale = to_int8(weights, 1, "w")
    assert scale.tolist() == [1, 0.5, 2]
    assert rows.tolist() == [[127, 0, -1], [-127, 0, 4], [0, 0, 127]]


@pytest.mark.parametrize("axis", [0, 1])
def test_int8_error_is_at_most_half_a_step(axis: int) -> None:
    weights = np.random.default_rng(axis).standard_normal((33, 47)).astype(np.float32)
    integers, scale = to_int8(weights, axis, "w")
    step = np.expand_dims(scale, axis)
    assert integers.min() >= -127
    assert (np.abs(integers * step - weights) <= step * 0.5001).all()
    assert (np.abs(integers).max(axis=axis) == 127).all()


def test_int8_of_zero_and_of_tiny_channels_has_no_nan() -> None:
    weights = np.zeros((4, 3), np.float32)
    weights[0, 1] = 1e-44  # denormal: no normal scale represents it
    weights[0, 2] = 1e-30
    integers, scale = to_int8(weights, 0, "w")
    assert scale[:2].tolist() == [1, 1] and np.isfinite(scale).all()
    assert integers[:, :2].tolist() == [[0, 0]] * 4 and integers[0, 2] == 127


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
    large = np.full((64, 64), 1e30, np.float32)
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
    ones = np.ones((32, 32), np.float32)
    part = part_views(layout, panel_bytes(layout, ones, ones, ones, NAMES))
    assert not part["gate"][:, 32:].any() and not part["up"][:, 32:].any() and not part["down"][32:].any()
    assert (part["gate_scale"][32:] == 1).all() and (part["mid_scale"][32:] == 1).all()
    assert (part["gate"][:, :32] == 127).all() and (part["down"][:32] == 127).all()
