"""The convolution graph against float64, in every scheme on the CPU targets, its past carried in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from estream.models.base import LayerPlan
from estream.package.chunks import CONV_LINEARS
from estream.runtime import Target, open_target
from qnn_graphs import build_graphs
from tests.support.graph_runner import GraphRunner, architecture, relative_error
from tests.support.schemes import LOWERINGS, pack, product, rms_norm

LAYERS = (LayerPlan(0, "moe", mixer="conv"), LayerPlan(1, "dense"))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    opened = open_target("cpu", threads=2)
    yield opened
    opened.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scheme", ["f32", "f16", "int8"])
@pytest.mark.parametrize(("taps", "bias"), [(3, False), (4, True), (2, True)])
def test_conv(target: Target, tmp_path: Path, scheme: str, lowering: str, taps: int, bias: bool) -> None:
    """A prompt of 45 tokens in blocks of 33, 1, 1, 10: blocks shorter than the past, too."""
    arch = dataclasses.replace(architecture(layers=LAYERS), conv_kernel=taps, conv_bias=bias)
    models = build_graphs(arch, experts=scheme, dense=scheme, panel_width=32, head_width=96, target=lowering)
    assert ("conv" in models) and ("o.bias" in [value.name for value in models["o_norm"].graph.input]) is bias
    run, r, hidden = GraphRunner(target, tmp_path, {"conv": models["conv"]}), np.random.default_rng(1), arch.hidden
    w: dict[str, np.ndarray] = {"attn_norm": r.standard_normal(hidden), "conv": r.standard_normal((taps, hidden))}
    x = (3 * r.standard_normal((45, hidden))).astype(np.float32)
    normed, projected = rms_norm(x, w["attn_norm"].astype(np.float32), arch.norm_eps), {}
    for name in CONV_LINEARS:
        packed, scale = pack(0.1 * r.standard_normal((hidden, hidden)), scheme)
        w[name], w[f"{name}.bias"] = packed, r.standard_normal(hidden)
        if scale is not None:
            w[f"{name}.scale"] = scale
        projected[name] = product(normed, packed, scale, lowering) + (w[f"{name}.bias"] if bias else 0.0)
    w["conv.bias"] = r.standard_normal(hidden)
    z = projected["conv_b"] * projected["conv_x"]
    padded = np.concatenate([np.zeros((taps - 1, hidden)), z])
    want = sum(padded[tap : tap + len(x)] * w["conv"][tap] for tap in range(taps)) + (w["conv.bias"] if bias else 0.0)
    want = projected["conv_c"] * want
    past, start = np.zeros((taps - 1, hidden), np.float32), 0
    for rows in (33, 1, 1, 10):
        inputs = {**w, "hidden": x[start : start + rows], "past": past}
        apart = run.run("conv", inputs, rows=rows)
        got = run.run("conv", inputs, {"past_out": "past"}, rows=rows)
        limit = 5e-4 if scheme == "int8" and lowering != "reference" else 2e-5
        assert relative_error(got["attn"], want[start : start + rows]) <= limit, rows
        for name, value in apart.items():
            np.testing.assert_array_equal(got[name], value)
        past, start = got["past_out"], start + rows
        assert relative_error(past, padded[start : start + taps - 1]) <= limit
