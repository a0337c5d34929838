"""qkv, o_router, o_norm, final_norm and head against float64, in every scheme on both CPU targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from estream.models.base import Architecture, LayerPlan
from estream.models.rope import rope_tables
from estream.runtime import Target, open_target
from qnn_graphs import build_graphs
from tests.support.graph_runner import GraphRunner, architecture, relative_error
from tests.support.schemes import LOWERINGS, dequantised, pack, product, rms_norm

SCHEMES = ("f32", "f16", "int8")
HEAD_WIDTH = 96
LAYERS = (LayerPlan(0, "moe"), LayerPlan(1, "dense"))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    opened = open_target("cpu", threads=2)
    yield opened
    opened.close()


def runner(target: Target, folder: Path, arch: Architecture, scheme: str, lowering: str) -> GraphRunner:
    models = build_graphs(arch, experts=scheme, dense=scheme, panel_width=32, head_width=HEAD_WIDTH, target=lowering)
    return GraphRunner(
        target, folder, {name: models[name] for name in ("qkv", "o_router", "o_norm", "final_norm", "head")}
    )


def weights(arch: Architecture, scheme: str, seed: int = 1) -> dict[str, np.ndarray]:
    """Graph inputs by name."""
    r, a, hidden = np.random.default_rng(seed), arch.attention, arch.hidden
    shapes = {"q": (hidden, a.q_width), "k": (hidden, a.k_width), "v": (hidden, a.k_width)}
    shapes |= {"o": (a.q_width, hidden), "head": (hidden, HEAD_WIDTH)}
    made: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        packed, scale = pack(r.standard_normal(shape) * 0.1, scheme)
        made[name] = packed
        if scale is not None:
            made[f"{name}.scale"] = scale
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "final_norm": hidden}
    norms |= {f"{x}_norm": a.head_dim if a.qk_norm == "head" else n for x, n in (("q", a.q_width), ("k", a.k_width))}
    biases = {"q.bias": a.q_width, "k.bias": a.k_width, "v.bias": a.k_width, "o.bias": hidden}
    for name, width in (norms | biases).items():
        made[name] = r.standard_normal(width).astype(np.float32)
    made["router"] = r.standard_normal((hidden, arch.router_width)).astype(np.float32)
    return made


def want_qkv(arch: Architecture, w: dict[str, np.ndarray], x: np.ndarray, lowering: str) -> dict[str, np.ndarray]:
    a = arch.attention
    normed = rms_norm(x, w["attn_norm"], arch.norm_eps)
    half = a.head_dim // 2
    cos, sin = w["cos"][:, None].astype(np.float64), w["sin"][:, None].astype(np.float64)
    results = {}
    for name, heads in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)):
        y = product(normed, w[name], w.get(f"{name}.scale"), lowering)
        if a.qkv_bias:
            y = y + w[f"{name}.bias"]
        if name != "v" and a.qk_norm == "projection":
            y = rms_norm(y, w[f"{name}_norm"], arch.norm_eps)
        split = y.reshape(len(x), heads, a.head_dim)
        if name != "v" and a.qk_norm == "head":
            split = rms_norm(split, w[f"{name}_norm"], arch.norm_eps)
        if a.clip is not None:
            split = np.clip(split, -a.clip, a.clip)
        if name != "v":
            first, second = split[..., :half], split[..., half:]
            split = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        results[f"{name}_out"] = split.reshape(len(x), -1)
    return results


def tolerance(scheme: str, lowering: str) -> float:
    """The integer path rounds: a value on the edge may fall to the other side in float64."""
    return 2e-4 if scheme == "int8" and lowering != "reference" else 1e-5


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": "projection", "clip": 0.8, "kv_heads": 4},
        {"qk_norm": "head", "bias": True, "head_dim": 12},
        {"bias": True, "heads": 3, "kv_heads": 1, "head_dim": 10, "clip": 2.5},
    ],
    ids=["plain", "projection-norm-clip", "head-norm-bias", "odd-head"],
)
def test_qkv(target: Target, tmp_path: Path, scheme: str, lowering: str, options: dict[str, object]) -> None:
    arch = architecture(layers=LAYERS, **options)  # type: ignore[arg-type]
    run = runner(target, tmp_path, arch, scheme, lowering)
    w = weights(arch, scheme)
    r = np.random.default_rng(2)
    for rows in (1, 2, 33):
        x = (r.standard_normal((rows, arch.hidden)) * 3).astype(np.float32)
        positions = np.arange(5, 5 + rows)
        w["cos"], w["sin"] = rope_tables(arch.attention.rope, arch.attention.head_dim, positions)
        got = run.run("qkv", {**w, "hidden": x}, rows=rows)
        for name, want in want_qkv(arch, w, x, lowering).items():
            assert relative_error(got[name].reshape(want.shape), want) <= tolerance(scheme, lowering), (name, rows)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bias", [False, True])
def test_closing_in_place(target: Target, tmp_path: Path, scheme: str, lowering: str, bias: bool) -> None:
    arch = architecture(layers=LAYERS, bias=bias)
    run = runner(target, tmp_path, arch, scheme, lowering)
    w = weights(arch, scheme)
    r = np.random.default_rng(3)
    for rows in (1, 33):
        attn = r.standard_normal((rows, arch.attention.q_width)).astype(np.float32)
        hidden = r.standard_normal((rows, arch.hidden)).astype(np.float32)
        out = hidden + product(attn, w["o"], w.get("o.scale"), lowering) + (w["o.bias"] if bias else 0.0)
        normed = rms_norm(out, w["ffn_norm"], arch.norm_eps)
        want = {"hidden_out": out, "normed": normed, "logits": normed @ w["router"].astype(np.float64)}
        inputs = {**w, "attn": attn, "hidden": hidden}
        for name in ("o_router", "o_norm"):
            apart = run.run(name, inputs, rows=rows)
            together = run.run(name, inputs, {"hidden_out": "hidden"}, rows=rows)
            assert set(apart) == (
                {"hidden_out", "normed", "logits"} if name == "o_router" else {"hidden_out", "normed"}
            )
            for tensor, value in together.items():
                assert relative_error(value, want[tensor]) <= tolerance(scheme, lowering), (name, tensor)
                np.testing.assert_array_equal(value, apart[tensor])


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_final_norm_and_head(target: Target, tmp_path: Path, scheme: str, lowering: str) -> None:
    arch = architecture(layers=LAYERS)
    run = runner(target, tmp_path, arch, scheme, lowering)
    w = weights(arch, scheme)
    for rows in (1, 2, 33):
        x = np.random.default_rng(rows).standard_normal((rows, arch.hidden)).astype(np.float32)
        normed = run.run("final_norm", {**w, "hidden": x}, rows=rows)["normed"]
        logits = run.run("head", {**w, "normed": normed}, rows=rows)["logits"]
        assert relative_error(normed, rms_norm(x, w["final_norm"], arch.norm_eps)) <= 1e-6
        want = product(normed.astype(np.float64), w["head"], w.get("head.scale"), lowering)
        assert relative_error(logits, want) <= tolerance(scheme, lowering)
        if scheme == "int8":
            assert relative_error(logits, normed @ dequantised(w["head"], w["head.scale"])) <= 0.03


def test_norm_with_massive_activations(target: Target, tmp_path: Path) -> None:
    """One element carries nearly the whole sum of squares, as in real models; float32 must not lose the others."""
    arch = architecture(hidden=2048, layers=LAYERS)
    run = runner(target, tmp_path, arch, "f32", "cpu")
    r = np.random.default_rng(4)
    x, weight = r.standard_normal((16, 2048)).astype(np.float32), r.standard_normal(2048).astype(np.float32)
    x[:, 7] = 3000.0
    got = run.run("final_norm", {"hidden": x, "final_norm": weight}, rows=16)["normed"]
    np.testing.assert_allclose(got, rms_norm(x, weight, arch.norm_eps), rtol=2e-6)


def test_int8_rows_do_not_depend_on_their_number(target: Target, tmp_path: Path) -> None:
    arch = architecture(layers=LAYERS, qk_norm="head", head_dim=20, hidden=96)
    run = runner(target, tmp_path, arch, "int8", "cpu")
    w = weights(arch, "int8")
    r = np.random.default_rng(5)
    data = {
        "hidden": r.standard_normal((512, arch.hidden)),
        "attn": r.standard_normal((512, arch.attention.q_width)),
        "normed": r.standard_normal((512, arch.hidden)),
        "cos": r.standard_normal((512, arch.attention.head_dim // 2)),
        "sin": r.standard_normal((512, arch.attention.head_dim // 2)),
    }
    data = {name: value.astype(np.float32) for name, value in data.items()}
    for graph, outputs in (
        ("qkv", ("q_out", "k_out", "v_out")),
        ("o_norm", ("hidden_out", "normed")),
        ("head", ("logits",)),
    ):
        whole = run.run(graph, {**w, **data}, rows=512)
        for first, rows in ((0, 1), (3, 7), (511, 1), (100, 257)):
            cut = {name: value[first : first + rows] for name, value in data.items()}
            part = run.run(graph, {**w, **cut}, rows=rows)
            for name in outputs:
                width = whole[name].shape[-1]
                want = whole[name].reshape(512, width)[first : first + rows]
                np.testing.assert_array_equal(part[name].reshape(rows, width), want, err_msg=f"{graph} {name} {rows}")


def test_a_row_of_zeros_stays_finite(target: Target, tmp_path: Path) -> None:
    arch = architecture(layers=LAYERS)
    run = runner(target, tmp_path, arch, "int8", "cpu")
    x = np.zeros((2, arch.hidden), np.float32)
    x[1] = 1.0
    logits = run.run("head", {**weights(arch, "int8"), "normed": x}, rows=2)["logits"]
    assert not logits[0].any()
    assert np.isfinite(logits).all() and logits[1].any()
