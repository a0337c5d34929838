"""Norm, qkv, attention core, output projection and head in the simulator against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from estream.models.base import Architecture, Attention, LayerPlan, Rope
from estream.models.rope import rope_tables
from estream.package.chunks import CONV_LINEARS, chunk_names, column_chunks, head_groups, qkv_chunks
from estream.runtime import tiles
from qnn_graphs.htp.attention import MASKED, build_attention
from qnn_graphs.htp.conv import build_conv
from qnn_graphs.htp.dense import build_head, build_norm, build_o, build_qkv
from qnn_graphs.htp.simulator import Simulator
from tests.support.htp import Feeds, columns, pack_int8, relative
from tests.support.numpy_reference import _norm as rms_norm
from tests.support.numpy_reference import _rotate as rotate

ROWS = 32


def architecture(attention: Attention, hidden: int = 128) -> Architecture:
    return Architecture("test", hidden, 512, 4096, 1e-5, attention, (LayerPlan(0, "moe"),), 8, 2, 64)


GROUPED = Attention(4, 2, 32, Rope(1e4), qk_norm="head", clip=3.0)
PLAIN = Attention(8, 8, 32, Rope(1e4), qkv_bias=True, o_bias=True, qk_norm="projection")


def weight_feeds(
    rng: np.random.Generator, name: str, shape: tuple[int, int], scheme: str, chunks: int
) -> tuple[Feeds, np.ndarray]:
    """A weight's inputs in column chunks, and the weight dequantised."""
    weight = rng.standard_normal(shape) * shape[0] ** -0.5
    if scheme == "f16":
        half = weight.astype(np.float16)
        return columns(half, name, chunks), half.astype(np.float64)
    data, magnitude, exact = pack_int8(weight, 0)
    return columns(data, name, chunks) | columns(magnitude[None], f"{name}.scale", chunks), exact


def test_massive_activations_stay_finite_and_accurate_through_the_norm() -> None:
    arch, rng = architecture(PLAIN, 512), np.random.default_rng(0)
    hidden = rng.standard_normal((ROWS, 512)).astype(np.float32)
    hidden[1, 5] = 3000
    hidden[2] *= 20000 / np.linalg.norm(hidden[2])
    hidden[3] = 16 * np.sign(hidden[3])
    hidden[4] *= 1e-3  # where epsilon counts
    hidden[5, 9] = -60000
    norm, router = (
        rng.uniform(0.5, 1.5, 512).astype(np.float16),
        rng.standard_normal((512, 8)) * 0.1,
    )
    halves = np.concatenate([router.astype(np.float16), (router - router.astype(np.float16)).astype(np.float16)])
    rows, factor = tiles.half_rows(hidden)
    assert np.abs(rows).max() <= 16 and (factor[[0, 4]] == 1).all() and factor[5] == 2.0**-12
    out = Simulator(build_norm(arch, ROWS)).run({"hidden": rows, "norm": norm, "router": halves})
    expected = rms_norm(hidden.astype(np.float64), norm.astype(np.float64), 1e-5)
    for row in range(6):
        assert relative(out["normed"][row], expected[row]) < 2e-3, row
    assert relative(out["logits"], expected @ router) < 2e-3
    # Of the rows that the experts get, router logits are exact far beyond float16.
    logits = out["logits"].astype(np.float64) + out["rest"]
    assert relative(logits, out["normed"].astype(np.float64) @ router) < 2e-5


@pytest.mark.parametrize("scheme", ["f16", "int8"])
@pytest.mark.parametrize("attention", [GROUPED, PLAIN], ids=["grouped", "plain"])
def test_qkv(attention: Attention, scheme: str) -> None:
    arch, rng, d = architecture(attention), np.random.default_rng(1), attention.head_dim
    groups = head_groups(attention)
    x = rng.standard_normal((ROWS, arch.hidden)).astype(np.float16)
    cos, sin = (table.astype(np.float16) for table in rope_tables(attention.rope, d, np.arange(100, 100 + ROWS)))
    feeds: Feeds = {"normed": x, "cos": cos, "sin": sin}
    expected = {}
    for name, heads in (("q", attention.heads), ("k", attention.kv_heads), ("v", attention.kv_heads)):
        width, chunks = heads * d, qkv_chunks(arch, name)
        own, weight = weight_feeds(rng, name, (arch.hidden, width), scheme, chunks)
        feeds |= own
        y = x.astype(np.float64) @ weight
        if attention.qkv_bias:
            bias = rng.standard_normal(width).astype(np.float16)
            feeds |= columns(bias[None], f"{name}.bias", chunks)
            y += bias
        if name != "v":
            per_head = attention.qk_norm == "head"
            norm = rng.uniform(0.5, 1.5, d if per_head else width).astype(np.float16)
            feeds[f"{name}_norm"] = norm
            shape = (ROWS, heads, d) if per_head else (ROWS, width)
            y = rms_norm(y.reshape(shape), norm.astype(np.float64), arch.norm_eps)
        if attention.clip is not None:
            y = np.clip(y, -attention.clip, attention.clip)
        y = y.reshape(ROWS, heads, d).swapaxes(0, 1)
        expected[name] = y if name == "v" else rotate(y, cos.astype(np.float64), sin.astype(np.float64))
    out = Simulator(build_qkv(arch, scheme, ROWS)).run(feeds)
    q = np.concatenate([out[f"q_out.{g}"].reshape(-1, ROWS, d) for g in range(groups.groups)])
    k = np.concatenate([out[f"k_out.{g}"] for g in range(groups.kv_groups)]).swapaxes(1, 2)
    v = np.concatenate([out[f"v_out.{g}"] for g in range(groups.kv_groups)])
    for name, actual in (("q", q), ("k", k), ("v", v)):
        assert relative(actual, expected[name]) < 3e-3, name


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_in_blocks_is_attention(heads: int, kv_heads: int, window: int | None) -> None:
    """80 tokens in blocks of 32, the last one ragged, two key blocks per call: masked blocks, windows, folded heads."""
    d, count, steps = 32, 80, 2
    groups = head_groups(Attention(heads, kv_heads, d, Rope(1e4)))
    assert groups.groups == 1
    rng = np.random.default_rng(2)
    q = rng.standard_normal((heads, 96, d)).astype(np.float16) * np.float16(2)
    k, v = (rng.standard_normal((kv_heads, 96, d)).astype(np.float16) for _ in range(2))
    distance = np.arange(96)[:, None] - np.arange(96)[None, :]
    seen = (distance >= 0) & (distance < (window or 96))
    core = Simulator(build_attention(groups, ROWS, ROWS, steps))
    for block in range(3):
        rows = slice(block * ROWS, (block + 1) * ROWS)
        state = {
            "max": np.full((kv_heads, heads // kv_heads * ROWS, 1), MASKED, np.float16),
            "sum": np.zeros((kv_heads, heads // kv_heads * ROWS, 1), np.float16),
            "attn": np.zeros(groups.q_shape(ROWS), np.float16),
        }
        for first in range(0, block + 1, steps):
            feeds = {"q": q[:, rows].reshape(groups.q_shape(ROWS)), **state}
            for step in range(steps):
                keys = slice((first + step) * ROWS % 96, (first + step) * ROWS % 96 + ROWS)  # beyond the end: any keys
                live = seen[rows, keys] if first + step <= block else np.zeros((ROWS, ROWS), bool)
                feeds[f"mask.{step}"] = np.where(live, 0, MASKED).astype(np.float16)
                feeds[f"k.{step}"] = np.ascontiguousarray(k[:, keys].swapaxes(1, 2))
                feeds[f"v.{step}"] = np.ascontiguousarray(v[:, keys])
            out = core.run(feeds)
            state = {name: out[f"{name}_out"] for name in state}
        actual = state["attn"].reshape(heads, ROWS, d)[:, : count - block * ROWS]
        kk, vv = (np.repeat(t.astype(np.float64), heads // kv_heads, axis=0) for t in (k, v))
        scores = np.where(seen[rows], q[:, rows].astype(np.float64) @ kk.swapaxes(1, 2) * d**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        exact = (weights / weights.sum(axis=-1, keepdims=True) @ vv)[:, : count - block * ROWS]
        assert relative(actual, exact) < 5e-3, block


@pytest.mark.parametrize("scheme", ["f16", "int8"])
def test_output_projection_and_head(scheme: str) -> None:
    arch, rng = architecture(PLAIN), np.random.default_rng(3)
    groups, width = head_groups(PLAIN), PLAIN.q_width
    assert groups.groups == 2
    attn = rng.standard_normal((ROWS, width)).astype(np.float16)
    by_head = attn.reshape(ROWS, PLAIN.heads, PLAIN.head_dim).swapaxes(0, 1)
    pieces = np.split(by_head, groups.groups)
    feeds = {f"attn.{g}": np.ascontiguousarray(piece).reshape(groups.q_shape(ROWS)) for g, piece in enumerate(pieces)}
    chunks = column_chunks(width, arch.hidden)
    own, weight = weight_feeds(rng, "o", (width, arch.hidden), scheme, chunks)
    bias = rng.standard_normal(arch.hidden).astype(np.float16)
    out = Simulator(build_o(arch, scheme, ROWS)).run(feeds | own | columns(bias[None], "o.bias", chunks))
    delta = np.concatenate([out[name] for name in chunk_names("delta", chunks)], axis=1)
    assert relative(delta, attn.astype(np.float64) @ weight + bias) < 2e-3

    x = rng.standard_normal((ROWS, arch.hidden)).astype(np.float16)
    own, weight = weight_feeds(rng, "head", (arch.hidden, 256), scheme, 1)
    out = Simulator(build_head(arch, scheme, ROWS, 256)).run({"normed": x} | own)
    assert relative(out["logits"], x.astype(np.float64) @ weight) < 2e-3


@pytest.mark.parametrize("scheme", ["f16", "int8"])
@pytest.mark.parametrize("attention", [GROUPED, PLAIN], ids=["grouped", "plain"])
def test_conv(attention: Attention, scheme: str) -> None:
    """Two blocks, the second one after the last rows of the first."""
    taps, bias = (3, False) if attention is GROUPED else (5, True)
    hidden, groups = attention.q_width, head_groups(attention)
    arch = dataclasses.replace(architecture(attention, hidden), conv_kernel=taps, conv_bias=bias)
    rng, chunks = np.random.default_rng(4), qkv_chunks(arch, "q")
    x = rng.standard_normal((2 * ROWS, hidden)).astype(np.float16)
    kernel = rng.standard_normal((taps, hidden)).astype(np.float16)
    pieces = kernel.reshape(-1, 1, hidden // groups.groups)
    feeds: Feeds = dict(zip(chunk_names("conv", taps * groups.groups), pieces, strict=True))
    projected = []
    for name in CONV_LINEARS:
        own, weight = weight_feeds(rng, name, (hidden, hidden), scheme, chunks)
        feeds |= own
        projected.append(x.astype(np.float64) @ weight)
        if bias:
            vector = rng.standard_normal(hidden).astype(np.float16)
            feeds |= columns(vector[None], f"{name}.bias", chunks)
            projected[-1] += vector
    gate, out, value = projected
    padded = np.concatenate([np.zeros((taps - 1, hidden)), gate * value])
    mixed = sum(padded[tap : tap + len(x)] * kernel[tap].astype(np.float64) for tap in range(taps))
    if bias:
        vector = rng.standard_normal(hidden).astype(np.float16)
        feeds |= columns(vector[None], "conv.bias", groups.groups)
        mixed += vector
    expected = out * mixed
    graph = Simulator(build_conv(arch, scheme, ROWS))
    past = {f"past.{g}": np.zeros((taps - 1, hidden // groups.groups), np.float16) for g in range(groups.groups)}
    for start in (0, ROWS):
        result = graph.run(feeds | past | {"normed": x[start : start + ROWS]})
        heads = [result[f"attn.{g}"].reshape(-1, ROWS, attention.head_dim) for g in range(groups.groups)]
        actual = np.concatenate(heads).swapaxes(0, 1).reshape(ROWS, hidden)
        assert relative(actual, expected[start : start + ROWS]) < 3e-3
        past = {f"past.{g}": result[f"past_out.{g}"] for g in range(groups.groups)}
        rows = np.concatenate(list(past.values()), axis=1)
        assert relative(rows, padded[start + ROWS : start + ROWS + taps - 1]) < 3e-3


def test_head_groups_cover_all_heads() -> None:
    def shape(heads: int, kv_heads: int) -> tuple[int, int, int, int]:
        groups = head_groups(Attention(heads, kv_heads, 128, Rope(1e4)))
        return groups.groups, groups.heads, groups.kv_heads, groups.sharing

    assert shape(16, 16) == (4, 4, 4, 1)  # OLMoE
    assert shape(32, 4) == (8, 4, 1, 2)  # Qwen3-30B-A3B: two groups share a KV head
    assert shape(32, 8) == (8, 4, 1, 1)  # Mixtral
    assert shape(6, 3) == (3, 2, 1, 1)


def test_column_chunks_hold_a_million_elements_and_whole_heads() -> None:
    assert column_chunks(2048, 2048, unit=128, multiple_of=4) == 4
    assert column_chunks(2048, 4096, unit=128, multiple_of=8) == 8
    assert column_chunks(4096, 4096, unit=128, multiple_of=8) == 16
    assert column_chunks(2048, 8192) == 16
    with pytest.raises(ValueError, match="96 columns"):
        column_chunks(64, 96, unit=32, multiple_of=5)
