"""What `build_graphs` returns: names, repeatable bytes, no weight inside."""

from __future__ import annotations

import onnx
import pytest

from estream.models.base import LayerPlan
from estream.package.layout import default_dense
from qnn_graphs import TARGETS, build_graphs
from tests.support.graph_runner import architecture

ALWAYS = {"qkv", "attention", "expert", "gather", "scatter_add", "final_norm", "head"}


def build(target: str = "cpu", scheme: str = "int8", **options: object) -> dict[str, onnx.ModelProto]:
    arch = architecture(**options)  # type: ignore[arg-type]
    dense = default_dense(scheme)
    return build_graphs(arch, experts=scheme, dense=dense, panel_width=64, head_width=96, target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scheme", ["f32", "f16", "int8", "int4"])
def test_models_are_valid_repeatable_and_hold_no_weight(target: str, scheme: str) -> None:
    options = {"qk_norm": "head", "bias": True, "clip": 3.0, "head_dim": 12, "hidden": 2048}
    first, second = build(target, scheme, **options), build(target, scheme, **options)
    integers = {"quantise"} if scheme in ("int8", "int4") and target != "reference" else set()
    assert set(first) == ALWAYS | {"o_router"} | integers
    for name, model in first.items():
        onnx.checker.check_model(model)
        assert model.SerializeToString() == second[name].SerializeToString()
        assert len(model.SerializeToString()) < 8192, name  # a hidden size of 2048 does not show
        assert model.graph.name == name


def test_closing_graphs_follow_the_plan() -> None:
    moe, dense = LayerPlan(0, "moe"), LayerPlan(1, "dense")
    assert set(build(layers=(dense,))) == ALWAYS | {"o_norm", "quantise"}
    assert set(build(layers=(moe, dense))) == ALWAYS | {"o_norm", "o_router", "quantise"}


def test_the_integer_path_is_the_cpu_targets_alone() -> None:
    for target, expected in (("cpu", True), ("cpu-u8", True), ("reference", False)):
        for name in ("qkv", "o_router", "expert", "head"):
            operators = {node.op_type for node in build(target)[name].graph.node}
            assert ("MatMulIntegerToFloat" in operators) is expected, (target, name)


def test_rows_are_quantised_once_per_tensor() -> None:
    for name, times in (("qkv", 1), ("expert", 1), ("head", 1), ("o_router", 1), ("quantise", 1)):
        operators = [node.op_type for node in build()[name].graph.node]
        assert operators.count("QuantizeLinear") == times, name


@pytest.mark.parametrize(("target", "scheme"), [("tpu", "f32"), ("cpu", "int3")])
def test_unknown_names_are_refused(target: str, scheme: str) -> None:
    with pytest.raises(ValueError, match="is none of"):
        build(target, scheme)


def test_int4_is_a_scheme_of_experts_alone() -> None:
    with pytest.raises(ValueError, match="'int4' is none of"):
        build_graphs(architecture(), experts="int4", dense="int4", panel_width=64, head_width=96, target="cpu")
