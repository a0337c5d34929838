"""Expert graphs in the simulator against float64 of their own dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest

from qnn_graphs.builder import Builder
from qnn_graphs.htp.compiler import compile_graph
from qnn_graphs.htp.expert import ExpertGraph, build_expert
from qnn_graphs.htp.quantised import WEIGHT_U8
from qnn_graphs.htp.simulator import Simulator
from qnn_graphs.htp.weights import weight_operand
from tests.support.htp import expert_case, relative, slot_result

SMALL = [
    ExpertGraph(128, 64, "f16", slots=3, rows=32, chunks=2),
    ExpertGraph(128, 64, "int8", slots=3, rows=32, chunks=2),
    ExpertGraph(128, 64, "int8", slots=2, rows=32, chunks=1, signed=True),
    ExpertGraph(128, 64, "int4", slots=2, rows=32, chunks=2),
    ExpertGraph(128, 64, "int8", slots=2, rows=32, chunks=2, tile="u16"),
    ExpertGraph(128, 64, "int4", slots=2, rows=32, chunks=1, tile="u16"),
]


def name(spec: ExpertGraph) -> str:
    return f"{spec.scheme}{'s' * spec.signed}-{spec.tile}-{spec.slots}x{spec.rows}-{spec.hidden}x{spec.width}"


@pytest.mark.parametrize("spec", SMALL, ids=name)
@pytest.mark.parametrize("outlier", [1.0, 20.0])
def test_every_slot_uses_its_own_weights_and_gates(spec: ExpertGraph, outlier: float) -> None:
    feeds, expected, _ = expert_case(spec, outlier=outlier)
    outputs = Simulator(build_expert(spec)).run(feeds)
    for slot, exact in enumerate(expected):
        assert relative(slot_result(spec, outputs, slot), exact) < 5e-3


def test_zero_rows_and_zero_gates_give_zeros() -> None:
    spec = ExpertGraph(128, 64, "int8", slots=2, rows=32, chunks=2)
    feeds, _, _ = expert_case(spec)
    feeds["slot0.x"][5] = 0
    feeds["slot1.gates"][6] = 0
    outputs = Simulator(build_expert(spec)).run(feeds)
    assert not slot_result(spec, outputs, 0)[5].any() and slot_result(spec, outputs, 0)[6].any()
    assert not slot_result(spec, outputs, 1)[6].any() and slot_result(spec, outputs, 1)[5].any()


@pytest.mark.parametrize("soc", ["sm8650", "sm8850"])
def test_int4_unpacks_exactly(soc: str) -> None:
    rng = np.random.default_rng(1)
    q = rng.integers(-7, 8, (128, 225))
    q[:64, :225], q[64:, :225] = np.divmod(np.arange(225), 15)[0] - 7, np.divmod(np.arange(225), 15)[1] - 7  # all pairs
    multiplier = rng.integers(1, 19, (4, 225)).astype(np.uint8)
    b = Builder("unpack")
    WEIGHT_U8.write(b, weight_operand(b, "w", (128, 225), "int4"), out=b.output("bytes", (128, 225), np.uint8))
    feeds = {"w": (136 + q[:64] + 16 * q[64:]).astype(np.uint8), "w_low": multiplier[:2], "w_high": multiplier[2:]}
    unpacked = Simulator(b.model(), soc).run(feeds)["bytes"].astype(np.int64) - 128
    np.testing.assert_array_equal(unpacked, q * np.repeat(multiplier.astype(np.int64), 32, axis=0))


@pytest.mark.parametrize("scheme", ["f16", "int8", "int4"])
def test_a_full_size_dispatch(scheme: str) -> None:
    """OLMoE's expert at 32 rows: numbers, and what the compiler says of 128 rows on SM8850."""
    spec = ExpertGraph(2048, 1024, scheme, slots=1, rows=32, chunks=4 if scheme == "f16" else 2)
    feeds, expected, _ = expert_case(spec)
    assert relative(slot_result(spec, Simulator(build_expert(spec)).run(feeds), 0), expected[0]) < 5e-3
    large = ExpertGraph(2048, 1024, scheme, slots=2, rows=128, chunks=spec.chunks)
    report = compile_graph(build_expert(large), "sm8850").report
    assert report.spill_bytes == 0
    assert report.traffic_bytes <= 1.05 * large.ideal_bytes
    if scheme == "int8":
        assert report.vector <= 2 * 300


def test_shapes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="width 100 does not divide into 3 column chunks"):
        ExpertGraph(96, 100, "int8", 1, 32, chunks=3)
    with pytest.raises(ValueError, match="int4 groups"):
        build_expert(ExpertGraph(96, 64, "int4", 1, 32))
    with pytest.raises(ValueError, match="no u16 tiles"):
        ExpertGraph(96, 64, "f16", 1, 32, tile="u16")
