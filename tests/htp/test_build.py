"""The set of graphs of a package, and its sizes for known models."""

from __future__ import annotations

import dataclasses

import pytest

from estream.models import family
from estream.models.base import Architecture, Attention, LayerPlan, Rope
from estream.package.presets import preset_config
from qnn_graphs.htp.build import MAX_CONTEXTS, build_graphs, default_ladder, default_plan
from qnn_graphs.htp.compiler import check_static, compile_graph
from qnn_graphs.htp.conv import build_conv


def architecture(hidden: int, heads: int, kv_heads: int, intermediate: int, layers: int = 1) -> Architecture:
    attention = Attention(heads, kv_heads, 128, Rope(1e4))
    plans = tuple(LayerPlan(i, "moe", window=None if i % 2 else 64) for i in range(layers))
    return Architecture("test", hidden, 4096, 4096, 1e-5, attention, plans, 8, 2, intermediate)


def test_graphs_do_not_depend_on_layers_experts_or_windows() -> None:
    built = []
    for layers, experts in ((1, 8), (30, 8)):
        arch = dataclasses.replace(architecture(256, 2, 2, 128, layers), experts=experts)
        plan = default_plan(arch, experts="int8", dense="int8")
        graphs = build_graphs(arch, experts="int8", dense="int8", head_width=512, plan=plan)
        for graph in graphs.values():
            check_static(graph)
        built.append({name: graph.SerializeToString(deterministic=True) for name, graph in graphs.items()})
    assert built[0] == built[1] and len(built[0]) == MAX_CONTEXTS


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        (architecture(2048, 16, 16, 1024), (256, 4, 1024, 2)),  # OLMoE
        (architecture(2048, 32, 4, 768), (128, 4, 768, 2)),  # Qwen3-30B-A3B
        (architecture(2048, 16, 16, 1408), (256, 4, 1408, 4)),  # DeepSeek-V2-Lite's experts
        (architecture(4096, 32, 8, 14336), (128, 4, 2048, 8)),  # Mixtral
    ],
)
def test_default_sizes(arch: Architecture, expected: tuple[int, int, int, int]) -> None:
    plan = default_plan(arch, experts="int8", dense="int8")
    assert (plan.rows, plan.steps, plan.width, plan.chunks) == expected


def test_int4_panels_of_wide_models_are_narrower() -> None:
    plan = default_plan(architecture(4096, 32, 8, 14336), experts="int4", dense="int8")
    assert (plan.width, plan.chunks, plan.ladder[0]) == (1024, 4, (8, 32))


@pytest.mark.parametrize(
    ("experts", "top_k", "int8", "int4"),
    [
        (64, 8, ((16, 32), (4, 128), (2, 256)), ((8, 32), (2, 128), (1, 256))),  # OLMoE: 125 rows at 1,000 tokens
        (128, 8, ((16, 32), (8, 64), (4, 128)), ((8, 32), (4, 64), (2, 128))),  # Qwen3: 62
        (64, 6, ((12, 32), (4, 96), (2, 192)), ((6, 32), (2, 96), (1, 192))),  # DeepSeek-V2-Lite: 93
        (8, 2, ((16, 32), (4, 128), (2, 256)), ((8, 32), (2, 128), (1, 256))),  # Mixtral: 250
    ],
)
def test_the_ladder_follows_from_the_fair_share(
    experts: int, top_k: int, int8: tuple[tuple[int, int], ...], int4: tuple[tuple[int, int], ...]
) -> None:
    assert default_ladder(experts, top_k, "int8") == int8 == default_ladder(experts, top_k, "f16")
    assert default_ladder(experts, top_k, "int4") == int4


def test_all_graphs_of_a_small_model_compile() -> None:
    arch = architecture(256, 4, 2, 128)
    plan = dataclasses.replace(default_plan(arch, experts="int8", dense="int8"), ladder=((2, 32), (1, 64)))
    graphs = build_graphs(arch, experts="int4", dense="int8", head_width=512, plan=plan)
    compiled = [compile_graph(graph, "sm8650") for graph in graphs.values()]
    assert sum(len(one.context) for one in compiled) < 8 << 20
    assert not any(one.report.spill_bytes for one in compiled)


def test_too_many_contexts_are_refused() -> None:
    arch = architecture(256, 2, 2, 128)
    plan = default_plan(arch, experts="int8", dense="int8")
    plan = dataclasses.replace(plan, ladder=(*plan.ladder, (1, 512)))
    with pytest.raises(ValueError, match="9 graphs"):
        build_graphs(arch, experts="int8", dense="int8", head_width=512, plan=plan)


def test_a_model_with_convolutions_has_one_rung_less() -> None:
    config = preset_config("lfm2.5-8b-a1b")
    arch = family(config["model_type"]).from_config(config).architecture()
    plan = default_plan(arch, experts="int8", dense="int8")
    assert (plan.rows, plan.width, plan.ladder) == (128, 1792, ((16, 32), (4, 128)))
    graphs = build_graphs(arch, experts="int8", dense="int8", head_width=8192, plan=plan)
    assert len(graphs) == MAX_CONTEXTS and "conv" in graphs
    for graph in graphs.values():
        check_static(graph)
    with pytest.raises(ValueError, match="3 taps in blocks of 2 rows"):
        build_conv(arch, "int8", 2)
