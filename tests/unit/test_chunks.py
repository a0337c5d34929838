"""How matrices are cut into column chunks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from estream.layers.signs import flip_signs, panel_preparation
from estream.models import family
from estream.models.base import Architecture, Attention, LayerPlan, Rope
from estream.package.chunks import CONV_LINEARS, MAX_CHUNKS, chunk_names, head_groups, linear_chunks, panel_chunks
from estream.package.dense import dense_specs, linear_name
from estream.package.layout import PanelLayout, default_panel_width, head_slices
from estream.package.presets import preset_config
from estream.package.quantise import panel_bytes, part_views
from estream.runtime.mock import MockTarget


def architecture(hidden: int, heads: int, kv_heads: int, head_dim: int = 128) -> Architecture:
    attention = Attention(heads, kv_heads, head_dim, Rope(1e4))
    return Architecture("test", hidden, 512, 4096, 1e-5, attention, (LayerPlan(0, "moe"),), 8, 2, 64)


def test_names() -> None:
    assert chunk_names("gate", 1) == ["gate"] and chunk_names("head.3", 2) == ["head.3.0", "head.3.1"]


def test_panels_of_public_models() -> None:
    shapes = {(2048, 1024): 2, (2048, 768): 2, (2048, 1408): 4, (4096, 2048): 8, (512, 1024): 1, (2048, 1056): 1}
    for (hidden, width), expected in shapes.items():
        for scheme in ("f16", "int8", "int4"):
            assert panel_chunks(hidden, width, scheme) == expected == PanelLayout(hidden, width, scheme).chunks
        assert panel_chunks(hidden, width, "f32") == 1


def test_dense_matrices_of_public_models() -> None:
    olmoe, qwen3, mixtral = architecture(2048, 16, 16), architecture(2048, 32, 4), architecture(4096, 32, 8)
    for arch, expected in ((olmoe, (4, 4, 4, 16)), (qwen3, (8, 4, 8, 16)), (mixtral, (16, 8, 16, 32))):
        widths = {"q": arch.attention.q_width, "k": arch.attention.k_width, "o": arch.hidden, "0": 8192}
        assert tuple(linear_chunks(arch, name, width, "int8") for name, width in widths.items()) == expected
        assert {linear_chunks(arch, name, width, "f32") for name, width in widths.items()} == {1}
        assert expected[0] % head_groups(arch.attention).groups == 0


def test_sizes_that_do_not_divide_have_one_chunk() -> None:
    odd = architecture(1500, 3, 1, 10)
    assert linear_chunks(odd, "o", 1500, "f16") == 1
    assert linear_chunks(odd, "q", 30, "f16") == 1


def test_sizes_of_a_strangers_package_cost_nothing() -> None:
    many = dataclasses.replace(architecture(1 << 20, 1 << 20, 1 << 20), hidden=1 << 30)
    for name in ("q", "k", "o", "0"):
        assert linear_chunks(many, name, 1 << 27, "int8") <= MAX_CHUNKS
    assert panel_chunks(1 << 40, 1 << 40, "int8") == MAX_CHUNKS


def test_default_panels_are_whole_experts_where_the_npu_takes_them() -> None:
    for scheme in ("f32", "f16", "int8"):
        assert [default_panel_width(2048, size, scheme) for size in (40, 768, 1024, 1408, 2560)] == [
            *(64, 768, 1024, 1408, 1280)
        ]
        assert default_panel_width(4096, 14336, scheme) == 2048
        assert default_panel_width(16384, 4096, scheme) == 512


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen1.5-moe-a2.7b", "mixtral-8x7b"])
def test_chunks_of_a_package_add_up(name: str) -> None:
    config = preset_config(name)
    arch = family(config["model_type"]).from_config(config).architecture()
    whole: dict[str, tuple[int, int]] = {}
    for key, dtype, shape, _ in dense_specs(arch, "int8", PanelLayout(arch.hidden, 64, "int8")):
        if dtype == "U8" and (owner := linear_name(key)) is not None:
            assert shape[0] * shape[1] <= 1 << 20 and shape[1] % 32 == 0
            whole[owner] = shape[0], whole.get(owner, (0, 0))[1] + shape[1]
    attention = arch.attention
    assert whole["layers.0.q"] == (arch.hidden, attention.q_width)
    assert whole["layers.1.v"] == (arch.hidden, attention.k_width)
    assert whole["layers.1.o"] == (attention.q_width, arch.hidden)
    assert whole["head.0"][0] == arch.hidden and len(whole) == 4 * len(arch.layers) + -(-arch.vocab // 8192)


def test_names_of_matrices() -> None:
    found = [linear_name(f"layers.3.{name}") for name in ("q", "q.1", "o.scale", "q.bias", "q_norm", "router", "ffn")]
    assert found == ["layers.3.q", "layers.3.q", "layers.3.o", None, None, None, None]
    assert [linear_name(name) for name in ("head.2", "head.2.0", "head.2.scale", "embed", "final_norm")] == [
        *("head.2", "head.2", "head.2", None, None)
    ]


def test_chunks_of_convolution_layers() -> None:
    config = preset_config("lfm2.5-8b-a1b", 3)
    arch = family(config["model_type"]).from_config(config).architecture()
    specs = {name: shape for name, _, shape, _ in dense_specs(arch, "int8", PanelLayout(arch.hidden, 64, "int8"))}
    for name in CONV_LINEARS:
        assert {specs[f"layers.0.{name}.{chunk}"] for chunk in range(8)} == {(2048, 256)}
        assert f"layers.0.{name}.8" not in specs and f"layers.2.{name}.0" not in specs
        assert linear_chunks(arch, name, 2048, "f32") == 1
    assert specs["layers.0.conv"] == (3, 2048) and specs["layers.2.expert_bias"] == (32,)
    absent = {"layers.0.q.0", "layers.0.q_norm", "layers.0.expert_bias", "layers.2.conv", "layers.2.o.bias"}
    assert not absent & set(specs)
    names = ("conv_b", "conv_x.3", "conv_c.scale", "conv_b.bias", "conv", "conv.bias", "expert_bias")
    assert [linear_name(f"layers.3.{name}") for name in names] == [
        *("layers.3.conv_b", "layers.3.conv_x", "layers.3.conv_c", None, None, None, None)
    ]


def test_signs_are_flipped_in_matrices_alone() -> None:
    layout = PanelLayout(64, 32, "int8")
    draw = np.random.default_rng(1)
    gate, up, down = (draw.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (64, 32), (32, 64)))
    packed = panel_bytes(layout, gate, up, down, ("g", "u", "d"))
    flipped = packed.copy()
    with MockTarget() as target:
        prepare = panel_preparation(target, layout)
        assert prepare is not None and panel_preparation(target, PanelLayout(64, 64, "int4")) is None
        prepare(memoryview(flipped))
        target.signed = False
        assert panel_preparation(target, layout) is None
    before, after = part_views(layout, packed), part_views(layout, flipped)
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(after[name].view(np.int8), before[name].astype(np.int16) - 128)
    for name in ("gate_scale", "mid_scale"):
        np.testing.assert_array_equal(after[name], before[name])
    flip_signs(memoryview(flipped)[: layout.matrix_bytes])
    np.testing.assert_array_equal(flipped, packed)


def test_default_widths_divide_into_chunks_that_fit() -> None:
    """Phi-3.5-MoE's experts and vocabulary, whose plain equal splits hardly divide; OLMoE's vocabulary, which does."""
    assert default_panel_width(4096, 6400, "int8") == 1280  # five panels: four of 1664 would have two chunks each
    assert default_panel_width(2880, 2880, "int8") == 768
    assert head_slices(32064) == (4, 8064)
    assert head_slices(50304) == (7, 7200)
    assert head_slices(96) == (1, 96)
