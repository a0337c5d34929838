"""gpt-oss's experts on every lowering: golden values by hand, and every scheme against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from estream.models.base import Clamped, LayerPlan
from estream.package.layout import PanelLayout
from estream.package.quantise import panel_bytes, part_views
from estream.runtime import Target, open_target
from qnn_graphs import build_graphs
from tests.support.graph_runner import GraphRunner, architecture, relative_error
from tests.support.schemes import HOST_GRAPHS, LOWERINGS

FORM = Clamped(limit=7.0, alpha=1.702)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    opened = open_target("cpu", threads=2)
    yield opened
    opened.close()


def runner(target: Target, folder: Path, layout: PanelLayout, lowering: str) -> GraphRunner:
    arch = replace(architecture(hidden=layout.hidden, layers=(LayerPlan(0, "moe"),)), clamped=FORM)
    dense = layout.scheme if layout.scheme in ("f32", "f16") else "int8"
    models = build_graphs(
        arch, experts=layout.scheme, dense=dense, panel_width=layout.width, head_width=96, target=lowering
    )
    return GraphRunner(target, folder, {"expert": models["expert"]})


def want(x: np.ndarray, gates: np.ndarray, matrices: list[np.ndarray], biases: list[np.ndarray]) -> np.ndarray:
    gate, up, down = (matrix.astype(np.float64) for matrix in matrices)
    g = np.minimum(x @ gate + biases[0], FORM.limit)
    u = np.clip(x @ up + biases[1], -FORM.limit, FORM.limit)
    return (((u + 1) * g / (1 + np.exp(-FORM.alpha * g))) @ down + biases[2]) * gates


def run(
    target: Target, folder: Path, layout: PanelLayout, lowering: str, x: np.ndarray, gates: np.ndarray,
    matrices: list[np.ndarray], biases: list[np.ndarray],
) -> np.ndarray:  # fmt: skip
    packed = panel_bytes(layout, *matrices, ("gate", "up", "down"), (biases[0], biases[1], biases[2]))
    buffer = target.allocate(layout.panel_bytes, "panel")
    buffer.array(np.uint8, packed.shape)[...] = packed
    if layout.scheme == "int8" and lowering != "cpu-u8":  # the others take two's complement
        buffer.array(np.uint8, packed.shape)[: layout.matrix_bytes] ^= 128
    parts = {part.name: buffer.part(part.offset, part.nbytes) for part in layout.parts}
    return runner(target, folder, layout, lowering).run("expert", {**parts, "x": x, "gates": gates}, rows=len(x))["y"]


def test_golden_values(target: Target, tmp_path: Path) -> None:
    """One channel: the gate is clamped above and not below, up on both sides; a gate below -7 goes through."""
    layout = PanelLayout(32, 32, "f32", biased=True)
    gate, up, down = (np.zeros((32, 32), np.float32) for _ in range(3))
    gate[0, 0] = up[1, 0] = down[0, 0] = 1
    biases = [np.zeros(32, np.float32) for _ in range(3)]
    biases[0][0], biases[1][0], biases[2][0] = 0.5, -0.25, 3.0
    x = np.zeros((4, 32), np.float32)
    x[:, :2] = [[-8.5, 1.25], [20, 20], [20, -20], [0.5, 0.25]]  # gate + 0.5: -8, 7, 7, 1; up - 0.25 + 1: 2, 8, -6, 1
    gates = np.array([[1], [1], [0.5], [2]], np.float32)
    got = run(target, tmp_path, layout, HOST_GRAPHS, x, gates, [gate, up, down], biases)[:, 0]
    sigmoid = 1 / (1 + np.exp(-1.702 * np.array([-8.0, 7.0, 7.0, 1.0])))
    expected = (np.array([2 * -8.0, 8 * 7.0, -6 * 7.0, 1 * 1.0]) * sigmoid + 3) * gates[:, 0]
    np.testing.assert_allclose(got, expected, rtol=2e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("scheme", "limit"), [("f32", 1e-5), ("f16", 2e-3), ("int8", 0.04), ("int4", 0.2)])
def test_schemes_stay_near(target: Target, tmp_path: Path, lowering: str, scheme: str, limit: float) -> None:
    layout, r = PanelLayout(128, 64, scheme, biased=True), np.random.default_rng(3)
    matrices = [r.standard_normal(shape).astype(np.float32) * 0.3 for shape in ((128, 50), (128, 50), (50, 128))]
    biases = [r.standard_normal(size).astype(np.float32) for size in (50, 50, 128)]
    x, gates = r.standard_normal((33, 128)).astype(np.float32), r.random((33, 1)).astype(np.float32)
    got = run(target, tmp_path, layout, lowering, x, gates, matrices, biases)
    assert relative_error(got, want(x, gates, matrices, biases)) <= limit
    assert np.isfinite(part_views(layout, panel_bytes(layout, *matrices, ("a", "b", "c")))["down_bias"]).all()
