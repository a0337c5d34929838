from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream.errors import UsageError
from estream.models import family
from estream.package.presets import PRESETS, preset_config
from estream.package.reader import Package
from estream.package.synth import RandomWeights, synthesize
from estream.package.verify import verify
from estream.package.writer import Packing
from tests.support.schemes import dense_matrix, panel_numbers

TINY: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "vocab_size": 900,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 80,
    "shared_expert_intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
    "use_sliding_window": False,
}
SCHEMES = ["f32", "f16", "int8", "int4"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    monkeypatch.setattr(Packing, "graphs", lambda self: {})


def made(folder: Path, **options: Any) -> Package:
    synthesize("tiny", folder, **options)
    return Package.open(folder)


def expert_parts(package: Package, layer: int, expert: int) -> dict[str, np.ndarray]:
    pool = package.pool
    start = pool.panel_offset(layer, expert * pool.panels_per_expert)
    panel = np.fromfile(package.experts_file, np.uint8, pool.panel.panel_bytes, offset=start)
    return panel_numbers(pool.panel, panel)


def expert(part: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    a = x @ part["gate"] * part.get("gate_scale", 1)
    return (a / (1 + np.exp(-a)) * (x @ part["up"]) * part.get("mid_scale", 1)) @ part["down"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_package_is_whole_and_repeats_by_seed(tmp_path: Path, scheme: str) -> None:
    first = made(tmp_path / "a", experts=scheme, seed=3)
    assert verify(first.path).ok
    assert first.manifest.source == {"kind": "synth", "preset": "tiny", "seed": 3}
    made(tmp_path / "b", experts=scheme, seed=3)
    other = made(tmp_path / "c", experts=scheme, seed=4)
    for name in ("experts.safetensors", "dense.safetensors", "checksums.bin", "model.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert not np.isin(first.checksums[:64], other.checksums[:64]).any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_record_and_matrix_differs(tmp_path: Path, scheme: str) -> None:
    package = made(tmp_path / "a", experts=scheme)
    pool_crcs = package.checksums[: 4 * package.pool.panels_per_layer]
    assert len(np.unique(pool_crcs)) == len(pool_crcs) == 4 * 16
    values = [
        dense_matrix(package, f"layers.{layer}.{name}").tobytes() for layer in range(4) for name in ("q", "k", "o")
    ]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_deviations_of_weights(tmp_path: Path, scheme: str) -> None:
    package = made(tmp_path / "a", experts=scheme)
    branch = (2 * 4) ** -0.5
    expected = {"embed": 1.0, "layers.0.q": 128**-0.5, "layers.3.o": branch * 128**-0.5, "layers.1.router": 128**-0.5}
    for name, deviation in expected.items():
        values = dense_matrix(package, name)
        assert values.std() == pytest.approx(deviation, rel=0.05)
        assert abs(values.mean()) < 4 * deviation / values.size**0.5
    head = dense_matrix(package, "head.0")
    assert head[:, :900].std() == pytest.approx(2 * 128**-0.5, rel=0.05) and not head[:, 900:].any()
    norm = dense_matrix(package, "final_norm")
    assert 0.8 < norm.min() < norm.max() < 1.2 and norm.std() > 0.05
    part = expert_parts(package, 2, 5)
    for name in ("gate", "up"):
        assert (part[name] * part.get("gate_scale", 1))[:, :80].std() == pytest.approx(128**-0.5, rel=0.05)
        assert not part[name][:, 80:].any()
    assert not part["down"][80:].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activations_keep_their_size_through_the_experts(tmp_path: Path, scheme: str) -> None:
    package = made(tmp_path / "a", experts=scheme)
    x = np.random.default_rng(1).standard_normal((200, 128)).astype(np.float32)
    y = np.stack([expert(expert_parts(package, layer, 3), x) for layer in range(4)])
    assert np.sqrt((y**2).mean()) == pytest.approx((2 * 4) ** -0.5, rel=0.2)


def test_routing_is_spread_over_all_experts(tmp_path: Path) -> None:
    package = made(tmp_path / "a")
    with package.open_embedding() as embedding:
        hidden = embedding.rows(np.arange(900))
    normed = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True))
    for layer in range(4):
        choice = package.family.route(normed @ dense_matrix(package, f"layers.{layer}.router"))
        load = np.bincount(choice.experts.reshape(-1), minlength=16)
        assert load.min() > 0.4 * load.mean() and load.max() < 2 * load.mean()
        ordered = np.sort(choice.gates, axis=1)
        assert np.median(ordered[:, -1] / ordered[:, 0]) > 1.5
        assert choice.shared is not None and 0.05 < choice.shared.std() < 0.4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_several_panels_follow_the_same_recipe(scheme: str) -> None:
    """An intermediate of several panels: the last is partly fill, down is scaled by the whole intermediate."""
    model = family("qwen2_moe").from_config(TINY)
    width = 64 if scheme == "int4" else 32
    packing = Packing(model, scheme, None, width, {"kind": "checkpoint"})
    count, last = -(-80 // width), 80 % width
    panels = [panel for panel, _ in zip(RandomWeights(packing, 0).experts(), range(count), strict=False)]
    parts = [panel_numbers(packing.panel, panel) for panel in panels]
    assert parts[-1]["gate"][:, :last].all() and not parts[-1]["gate"][:, last:].any()
    assert parts[-1]["down"][:last].all() and not parts[-1]["down"][last:].any()
    x = np.random.default_rng(1).standard_normal((200, 128)).astype(np.float32)
    y = np.sum([expert(part, x) for part in parts], axis=0)
    assert np.sqrt((y**2).mean()) == pytest.approx((2 * 4) ** -0.5, rel=0.2)


def test_layers_cut(tmp_path: Path) -> None:
    assert len(made(tmp_path / "a", layers=2).architecture.layers) == 2
    for layers in (0, 5, -1):
        with pytest.raises(UsageError, match=r"--layers of tiny .asked"):
            synthesize("tiny", tmp_path / "b", layers=layers)


@pytest.mark.parametrize(
    "name, near", [("olmoe", "olmoe-1b-7b"), ("Mixtral-8x7b", "mixtral-8x7b"), ("qwen1.5-moe", "qwen1.5-moe-a2.7b")]
)
def test_unknown_preset_names_near_ones(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"Did you mean .*{near}"):
        preset_config(name)
    with pytest.raises(UsageError, match="Presets: "):
        preset_config("zzzzzz")


# (layers, hidden, expert intermediate, experts, top-k, heads, KV heads, vocab, theta, shared) of the public models
SHAPES = {
    "olmoe-1b-7b": (16, 2048, 1024, 64, 8, 16, 16, 50304, 1e4, 0),
    "qwen1.5-moe-a2.7b": (24, 2048, 1408, 60, 4, 16, 16, 151936, 1e6, 5632),
    "mixtral-8x7b": (32, 4096, 14336, 8, 2, 32, 8, 32000, 1e6, 0),
    "lfm2.5-8b-a1b": (22, 2048, 1792, 32, 4, 32, 8, 65536, 1e6, 0),
    "qwen3-30b-a3b": (48, 2048, 768, 128, 8, 32, 4, 151936, 1e6, 0),
    "deepseek-v2-lite": (26, 2048, 1408, 64, 6, 16, 16, 102400, 1e4, 2816),
    "phi-3.5-moe": (32, 4096, 6400, 16, 2, 32, 8, 32064, 1e4, 0),
    "gpt-oss-20b": (24, 2880, 2880, 32, 4, 64, 8, 201088, 1.5e5, 0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_presets_have_the_public_shapes(name: str) -> None:
    config = preset_config(name)
    arch = family(config["model_type"]).from_config(config).architecture()
    attention = arch.attention
    assert SHAPES[name] == (
        len(arch.moe_layers),
        arch.hidden,
        arch.expert_intermediate,
        arch.experts,
        arch.top_k,
        attention.heads,
        attention.kv_heads,
        arch.vocab,
        attention.rope.theta,
        arch.shared_intermediate,
    )
    heads = {"lfm2.5-8b-a1b": 64, "gpt-oss-20b": 64, "deepseek-v2-lite": 192}
    assert attention.head_dim == heads.get(name, 128)
    assert {plan.window for plan in arch.layers} == ({128, None} if name == "gpt-oss-20b" else {None})
    norms = {"olmoe-1b-7b": "projection", "lfm2.5-8b-a1b": "head", "qwen3-30b-a3b": "head"}
    assert attention.qk_norm == norms.get(name, "none")
    assert arch.shared_gate == (name == "qwen1.5-moe-a2.7b")
    assert attention.qkv_bias == (name in ("qwen1.5-moe-a2.7b", "phi-3.5-moe", "gpt-oss-20b"))


def test_size_of_olmoe_is_known_beforehand() -> None:
    config = preset_config("olmoe-1b-7b")
    packing = Packing(family("olmoe").from_config(config), "int8", None, None, {"kind": "checkpoint"})
    assert packing.panel.width == 1024 and packing.pool.panels_per_expert == 1
    assert 6.4e9 < packing.sizes["experts.safetensors"] < 6.5e9
    assert packing.pool.data_offset > 16384 and packing.pool.data_offset % 16384 == 0
