"""The attention graph, chunk by chunk over one cache, against float64 attention over the whole prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from estream.models.base import Attention, LayerPlan, Rope
from estream.runtime import Buffer, Target, open_target
from qnn_graphs import build_graphs
from qnn_graphs.attention import attention_name, build_attention
from tests.support.graph_runner import GraphRunner, architecture, relative_error

LENGTHS = (1, 2, 31, 32, 33, 130, 600)
GEOMETRIES = [(4, 4, 16), (4, 2, 16), (3, 1, 10), (6, 2, 20), (4, 4, 12), (8, 2, 64)]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    opened = open_target("cpu", threads=2)
    yield opened
    opened.close()


def want_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """q [N, heads, D], k and v [N, kv_heads, D] → [N, heads · D] in float64."""
    rows, heads, head_dim = q.shape
    group = heads // k.shape[1]
    q, k, v = q.astype(np.float64), k.astype(np.float64).repeat(group, 1), v.astype(np.float64).repeat(group, 1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(head_dim)
    i, j = np.indices((rows, rows))
    seen = (j <= i) if window is None else (j <= i) & (j > i - window)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v).reshape(rows, heads * head_dim)


def prefill(
    run: GraphRunner,
    name: str,
    attention: Attention,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    block: int,
    capacity: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention in blocks; also the caches afterwards. Caches start with rubbish beyond what is written."""
    rows = len(q)
    q, k, v = (x.reshape(rows, -1) for x in (q, k, v))
    shape = (1, attention.kv_heads, capacity, attention.cache_head_dim)
    keys, values = run.buffer(np.full(shape, 7.0, np.float32)), run.buffer(np.full(shape, -7.0, np.float32))
    results = []
    for start in range(0, rows, block):
        end = min(rows, start + block)
        inputs: dict[str, np.ndarray | Buffer] = {
            **{"q_in": q[None, start:end], "k_in": k[None, start:end], "v_in": v[None, start:end]},
            **{"past_key": keys, "past_value": values},
            **{"last": np.array([end - 1]), "total": np.array([end])},
        }
        in_place = {"present_key": "past_key", "present_value": "past_value"}
        got = run.run(name, inputs, in_place, rows=end - start, kv_rows=capacity)
        results.append(got["attn"][0])
    return np.concatenate(results), keys.array(np.float32, shape)[0], values.array(np.float32, shape)[0]


@pytest.mark.parametrize(
    ("geometry", "window"),
    [(geometry, None) for geometry in GEOMETRIES]
    + [(geometry, window) for geometry in ((4, 4, 16), (3, 1, 10)) for window in (1, 2, 5, 128)],
    ids=str,
)
def test_chunks_over_one_cache(
    target: Target, tmp_path: Path, geometry: tuple[int, int, int], window: int | None
) -> None:
    heads, kv_heads, head_dim = geometry
    attention = Attention(heads, kv_heads, head_dim, Rope(10000.0))
    name = attention_name(window)
    run = GraphRunner(target, tmp_path, {name: build_attention(attention, window)})
    r = np.random.default_rng(1)
    for rows in LENGTHS:
        q = r.standard_normal((rows, heads, head_dim)).astype(np.float32) * 2
        k, v = r.standard_normal((2, rows, kv_heads, head_dim)).astype(np.float32)
        want = want_attention(q, k, v, window)
        for block in (256, 37, 1) if rows in (33, 130) else (256, 37):
            got, keys, values = prefill(run, name, attention, q, k, v, block, max(rows, 40))
            assert relative_error(got, want) <= 1e-5, (rows, block)
            for cache, source, beyond in ((keys, k, 7.0), (values, v, -7.0)):
                np.testing.assert_array_equal(cache[:, :rows, :head_dim], source.transpose(1, 0, 2))
                assert not cache[:, :rows, head_dim:].any()
                assert (cache[:, rows:] == beyond).all()  # nothing is written past the prompt


def test_capacity_does_not_change_the_result(target: Target, tmp_path: Path) -> None:
    attention = Attention(4, 2, 16, Rope(10000.0))
    run = GraphRunner(target, tmp_path, {"attention": build_attention(attention, None)})
    r = np.random.default_rng(2)
    q, k, v = (r.standard_normal((70, heads * 16)).astype(np.float32) for heads in (4, 2, 2))
    tight, _, _ = prefill(run, "attention", attention, q, k, v, block=32, capacity=70)
    loose, _, _ = prefill(run, "attention", attention, q, k, v, block=32, capacity=1024)
    np.testing.assert_array_equal(tight, loose)


def test_one_graph_per_window() -> None:
    layers = tuple(LayerPlan(index, "moe", window) for index, window in enumerate((None, 5, None, 7, 5)))
    models = build_graphs(
        architecture(layers=layers), experts="f32", dense="f32", panel_width=32, head_width=96, target="cpu"
    )
    assert {name for name in models if name.startswith("attention")} == {"attention", "attention.w5", "attention.w7"}
    assert "o_norm" not in models
