"""int4 experts on the cpu target: graphs against float64 of the dequantised weights, and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from estream import Engine
from estream.models.base import LayerPlan
from estream.package.layout import PanelLayout
from estream.package.quantise import panel_bytes, part_views
from estream.runtime import Target, open_target
from qnn_graphs import build_graphs
from qnn_graphs.builder import FLOAT, Builder
from qnn_graphs.linear import declare_weight, linear
from tests.support.graph_runner import GraphRunner, architecture, relative_error
from tests.support.packages import packed
from tests.support.schemes import HOST_GRAPHS, LOWERINGS, panel_numbers, quantise_rows, silu, unpack_int4
from tests.support.tiny_checkpoints import prompt

NAMES = ("gate", "up", "down")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    opened = open_target("cpu", threads=2)
    yield opened
    opened.close()


def runner(target: Target, folder: Path, lowering: str, hidden: int, width: int) -> GraphRunner:
    models = build_graphs(
        architecture(hidden=hidden, layers=(LayerPlan(0, "moe"),)),
        experts="int4",
        dense="int8",
        panel_width=width,
        head_width=96,
        target=lowering,
    )
    return GraphRunner(target, folder, {"expert": models["expert"]})


def expert(x: np.ndarray, gates: np.ndarray, n: dict[str, np.ndarray], *, integers: bool) -> np.ndarray:
    """The panel in float64; `integers`: through the integer path of the cpu target."""
    rows, scales = quantise_rows(x) if integers else (x.astype(np.float64), np.ones((len(x), 1)))
    middle = silu((rows @ n["gate"]) * n["gate_scale"] * scales) * ((rows @ n["up"]) * n["mid_scale"])
    again, middle_scales = quantise_rows(middle) if integers else (middle, np.ones((len(x), 1)))
    return (again @ n["down"]) * middle_scales * scales * gates


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("hidden", "width"), [(64, 64), (192, 128)])
def test_expert(target: Target, tmp_path: Path, lowering: str, hidden: int, width: int) -> None:
    layout = PanelLayout(hidden, width, "int4")
    r = np.random.default_rng(1)
    gate, up = (r.standard_normal((hidden, width - 20)).astype(np.float32) * 0.2 for _ in range(2))
    down = r.standard_normal((width - 20, hidden)).astype(np.float32) * 0.2
    panel = panel_bytes(layout, gate, up, down, NAMES)
    buffer = target.allocate(layout.panel_bytes, "panel")
    buffer.array(np.uint8, panel.shape)[...] = panel
    parts = {part.name: buffer.part(part.offset, part.nbytes) for part in layout.parts}
    run = runner(target, tmp_path, lowering, hidden, width)
    inputs = run.graphs["expert"].inputs
    assert {
        name: (info.shape, info.dtype) for name, info in inputs.items() if name not in ("x", "x_scale", "gates")
    } == {name: (view.shape, view.dtype) for name, view in part_views(layout, panel).items()}
    numbers = panel_numbers(layout, panel)
    for rows in (1, 2, 7, 130):
        x = r.standard_normal((rows, hidden)).astype(np.float32)
        gates = r.random((rows, 1)).astype(np.float32)
        got = run.run("expert", {**parts, "x": x, "gates": gates}, rows=rows)["y"]
        plain = expert(x, gates, numbers, integers=False)
        if lowering != "reference":
            assert relative_error(got, expert(x, gates, numbers, integers=True)) <= 2e-4, rows
            assert relative_error(got, plain) <= 0.04, rows
        else:
            assert relative_error(got, plain) <= 1e-5, rows


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_byte_and_multiplier_unpacks_exactly(target: Target, tmp_path: Path, lowering: str) -> None:
    """Rows that pick one weight each: what comes back is the weight itself, rounded only by the pick's own scale."""
    stored = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)
    multipliers = (np.arange(16)[:, None] + np.arange(16)) % 16 + 1
    b = Builder("pick")
    x = b.input("x", ("rows", 512))
    linear(b, x, declare_weight(b, "w", (512, 16), "int4", lowering), "int4", lowering, out=b.output("y", ("rows", 16)))
    run = GraphRunner(target, tmp_path, {"pick": b.model()})
    feeds = {"x": np.eye(512, dtype=np.float32), "w": stored, "w_multiplier": multipliers.astype(np.uint8)}
    got = run.run("pick", feeds, rows=512)["y"]
    expected = unpack_int4(stored, multipliers)
    assert expected.min() == -128 and expected.max() == 112
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_weights_stay_in_8_bits_on_the_integer_path() -> None:
    graph = build_graphs(
        architecture(hidden=64), experts="int4", dense="int8", panel_width=64, head_width=96, target="cpu"
    )["expert"].graph
    casts = [node for node in graph.node if node.op_type == "Cast"]
    to_float = [node.input[0] for node in casts if onnx.helper.get_node_attr_value(node, "to") == FLOAT]
    assert len(casts) > 2 and to_float == ["gate_scale", "mid_scale"]
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in graph.node) == 3


def test_rows_do_not_depend_on_their_number(target: Target, tmp_path: Path) -> None:
    layout = PanelLayout(192, 128, "int4")
    r = np.random.default_rng(5)
    weights = [r.standard_normal(shape).astype(np.float32) for shape in ((192, 128), (192, 128), (128, 192))]
    parts = part_views(layout, panel_bytes(layout, weights[0], weights[1], weights[2], NAMES))
    x, gates = r.standard_normal((512, 192)).astype(np.float32), r.random((512, 1)).astype(np.float32)
    run = runner(target, tmp_path, HOST_GRAPHS, 192, 128)
    whole = run.run("expert", {**parts, "x": x, "gates": gates}, rows=512)["y"]
    for first, rows in ((0, 1), (3, 7), (100, 257)):
        cut = slice(first, first + rows)
        part = run.run("expert", {**parts, "x": x[cut], "gates": gates[cut]}, rows=rows)["y"]
        np.testing.assert_array_equal(part, whole[cut], err_msg=str(rows))


def test_streamed_equals_resident_and_stays_near_the_checkpoint(tmp_path: Path) -> None:
    """Two panels per expert, four of the shared one."""
    package, tiny = packed(tmp_path, "qwen2_moe", experts="int4", panel=64, hidden_size=64, moe_intermediate_size=100)
    ids = prompt(70, seed=7)
    with Engine(package, threads=1, resident="all") as engine:
        assert engine.package.pool.panels_per_expert == 2
        resident = engine.prefill(ids, logits="all").logits
    with Engine(package, threads=1, resident="all", reference=True) as engine:
        reference = engine.prefill(ids, logits="all").logits
    assert resident is not None and reference is not None
    for group, banks, lanes, mode in (
        (1, 1, 1, "on-demand"),
        (3, 2, 2, "before-routing"),
        (4, 3, 4, "after-routing"),
        (64, 1, 2, "before-routing"),
    ):
        with Engine(package, threads=1, group=group, banks=banks, lanes=lanes, prefetch=mode, max_tokens=70) as engine:
            np.testing.assert_array_equal(
                engine.prefill(ids, logits="all").logits, resident, err_msg=str((group, mode))
            )
    expected = tiny.logits(ids)
    assert relative_error(resident, reference) < 0.15
    assert relative_error(reference, expected) < 0.5
    assert not np.array_equal(resident, reference)
