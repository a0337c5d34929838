"""The expert panel, gather and scatter graphs against float64 and against an emulation of the integer path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from estream.models.base import LayerPlan
from estream.package.layout import PanelLayout
from estream.runtime import Buffer, Target, open_target
from qnn_graphs import build_graphs
from tests.support.graph_runner import GraphRunner, architecture, relative_error
from tests.support.schemes import HOST_GRAPHS, LOWERINGS, pack, quantise_rows, silu, taken

SCHEMES = ("f32", "f16", "int8")
LAYERS = (LayerPlan(0, "moe"),)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    opened = open_target("cpu", threads=2)
    yield opened
    opened.close()


def runner(target: Target, folder: Path, scheme: str, lowering: str, hidden: int, width: int) -> GraphRunner:
    models = build_graphs(
        architecture(hidden=hidden, layers=LAYERS),
        experts=scheme,
        dense="f32",
        panel_width=width,
        head_width=96,
        target=lowering,
    )
    return GraphRunner(
        target,
        folder,
        {name: models[name] for name in ("expert", "gather", "scatter_add", "quantise") if name in models},
    )


def panel(
    target: Target, layout: PanelLayout, lowering: str = HOST_GRAPHS, seed: int = 1
) -> tuple[dict[str, Buffer], dict[str, np.ndarray]]:
    """Parts of a random panel inside one buffer as a lowering's graph takes them, and the same as `pack` gives them."""
    r = np.random.default_rng(seed)
    hidden, width = layout.hidden, layout.width
    gate, gate_scale = pack(r.standard_normal((hidden, width)) * 0.2, layout.scheme)
    up, up_scale = pack(r.standard_normal((hidden, width)) * 0.2, layout.scheme)
    down_t, down_scale = pack(r.standard_normal((hidden, width)) * 0.2, layout.scheme)  # one scale per input channel
    arrays = {"gate": gate, "up": up, "down": np.ascontiguousarray(down_t.T)}
    if gate_scale is not None and up_scale is not None and down_scale is not None:
        arrays |= {"gate_scale": gate_scale, "mid_scale": (up_scale * down_scale).astype(np.float16)}
    buffer = target.allocate(layout.panel_bytes, "panel")
    parts = {part.name: buffer.part(part.offset, part.nbytes) for part in layout.parts}
    for name, part in parts.items():
        given = taken(arrays[name], lowering)
        part.array(given.dtype, given.shape)[...] = given
    return parts, arrays


def want_expert(x: np.ndarray, gates: np.ndarray, w: dict[str, np.ndarray], *, integers: bool) -> np.ndarray:
    """The panel in float64; `integers`: through the integer path of the cpu target."""
    f64 = {name: value.astype(np.float64) for name, value in w.items()}
    gate_scale, mid_scale = f64.get("gate_scale", 128.0) / 128, f64.get("mid_scale", 128.0**2) / 128**2
    rows, scales = quantise_rows(x) if integers else (x.astype(np.float64), np.ones((len(x), 1)))
    middle = silu((rows @ f64["gate"]) * gate_scale * scales) * ((rows @ f64["up"]) * mid_scale)
    again, middle_scales = quantise_rows(middle) if integers else (middle, np.ones((len(x), 1)))
    return (again @ f64["down"]) * middle_scales * scales * gates


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (200, 96)])
def test_expert(target: Target, tmp_path: Path, scheme: str, lowering: str, hidden: int, width: int) -> None:
    run = runner(target, tmp_path, scheme, lowering, hidden, width)
    parts, arrays = panel(target, PanelLayout(hidden, width, scheme), lowering)
    r = np.random.default_rng(2)
    for rows in (1, 2, 7, 130):
        x = r.standard_normal((rows, hidden)).astype(np.float32)
        gates = r.random((rows, 1)).astype(np.float32)
        got = run.run("expert", {**parts, "x": x, "gates": gates}, rows=rows)["y"]
        plain = want_expert(x, gates, arrays, integers=False)
        if scheme == "int8" and lowering != "reference":
            assert relative_error(got, want_expert(x, gates, arrays, integers=True)) <= 2e-4, rows
            assert relative_error(got, plain) <= 0.04, rows
        else:
            assert relative_error(got, plain) <= 1e-5, rows


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_are_the_parts_of_a_panel(target: Target, tmp_path: Path, scheme: str) -> None:
    layout = PanelLayout(64, 32, scheme)
    inputs = runner(target, tmp_path, scheme, HOST_GRAPHS, 64, 32).graphs["expert"].inputs
    _, arrays = panel(target, layout)
    assert [name for name in inputs if name not in ("x", "gates")]
    rows = {"x", "gates"} | ({"x_scale"} if scheme == "int8" else set())
    assert set(inputs) == rows | {part.name for part in layout.parts}
    for part in layout.parts:
        assert inputs[part.name].shape == part.shape
        assert inputs[part.name].dtype == taken(arrays[part.name], HOST_GRAPHS).dtype


def test_channels_of_zeros_add_nothing(target: Target, tmp_path: Path) -> None:
    """The last panel of an expert is padded with zeros, scales too."""
    narrow, wide = PanelLayout(64, 32, "int8"), PanelLayout(64, 64, "int8")
    _, arrays = panel(target, narrow)
    axis = {"gate": 1, "up": 1, "down": 0, "gate_scale": 0, "mid_scale": 0}
    filled = {name: np.concatenate([value, np.zeros_like(value)], axis[name]) for name, value in arrays.items()}
    assert {name: value.shape for name, value in filled.items()} == {part.name: part.shape for part in wide.parts}
    r = np.random.default_rng(3)
    given = {"x": r.standard_normal((5, 64)).astype(np.float32), "gates": np.ones((5, 1), np.float32)}
    want = runner(target, tmp_path, "int8", HOST_GRAPHS, 64, 32).run("expert", {**arrays, **given}, rows=5)["y"]
    got = runner(target, tmp_path, "int8", HOST_GRAPHS, 64, 64).run("expert", {**filled, **given}, rows=5)["y"]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gate_of_zero_gives_zeros_and_gates_may_be_negative(target: Target, tmp_path: Path, scheme: str) -> None:
    run = runner(target, tmp_path, scheme, HOST_GRAPHS, 64, 32)
    parts, _ = panel(target, PanelLayout(64, 32, scheme))
    x = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float32)
    x[1:] = x[0]
    gates = np.array([[1.0], [0.0], [-1.0]], np.float32)
    y = run.run("expert", {**parts, "x": x, "gates": gates}, rows=3)["y"]
    assert not y[1].any()
    np.testing.assert_array_equal(y[2], -y[0])


def test_int8_rows_do_not_depend_on_their_number(target: Target, tmp_path: Path) -> None:
    run = runner(target, tmp_path, "int8", HOST_GRAPHS, 200, 96)
    parts, _ = panel(target, PanelLayout(200, 96, "int8"))
    r = np.random.default_rng(5)
    x, gates = r.standard_normal((512, 200)).astype(np.float32), r.random((512, 1)).astype(np.float32)
    whole = run.run("expert", {**parts, "x": x, "gates": gates}, rows=512)["y"]
    for first, rows in ((0, 1), (3, 7), (511, 1), (100, 257)):
        cut = slice(first, first + rows)
        part = run.run("expert", {**parts, "x": x[cut], "gates": gates[cut]}, rows=rows)["y"]
        np.testing.assert_array_equal(part, whole[cut], err_msg=str(rows))


def test_gather_and_scatter_in_place(target: Target, tmp_path: Path) -> None:
    run = runner(target, tmp_path, "f32", HOST_GRAPHS, 64, 32)
    r = np.random.default_rng(6)
    table = r.standard_normal((900, 64)).astype(np.float32)
    for rows in (1, 2, 512):
        index = r.permutation(900)[:rows]
        x = run.run("gather", {"table": table, "index": index}, rows=rows, table_rows=900)["x"]
        np.testing.assert_array_equal(x, table[index])
        y = r.standard_normal((rows, 64)).astype(np.float32)
        inputs: dict[str, np.ndarray | Buffer] = {"table": table, "index": index[:, None], "y": y}
        want = table.copy()
        want[index] += y
        for in_place in ({"table_out": "table"}, {}):
            got = run.run("scatter_add", inputs, in_place, rows=rows, table_rows=900)["table_out"]
            np.testing.assert_array_equal(got, want)


def test_quantised_rows_are_gathered_with_their_scales(target: Target, tmp_path: Path) -> None:
    run = runner(target, tmp_path, "int8", HOST_GRAPHS, 64, 32)
    normed = np.random.default_rng(7).standard_normal((90, 64)).astype(np.float32)
    normed[3] = 0
    tables = run.run("quantise", {"normed": normed}, table_rows=90)
    rows, scales = quantise_rows(normed)
    np.testing.assert_array_equal(tables["table"].astype(np.int64) - 128, rows)
    np.testing.assert_allclose(tables["table_scale"], scales, rtol=1e-6)
    index = np.array([5, 3, 88])
    got = run.run("gather", {**tables, "index": index}, rows=3, table_rows=90)
    np.testing.assert_array_equal(got["x"], tables["table"][index])
    np.testing.assert_array_equal(got["x_scale"], tables["table_scale"][index])


def test_gather_and_scatter_take_the_same_numbers(target: Target, tmp_path: Path) -> None:
    graphs = runner(target, tmp_path, "f32", HOST_GRAPHS, 64, 32).graphs
    assert graphs["gather"].inputs["index"].dtype == graphs["scatter_add"].inputs["index"].dtype == np.int64
