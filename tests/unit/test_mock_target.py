"""The mock target keeps the contract and records and injects what it promises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from estream.errors import TargetError
from estream.runtime import TensorInfo, open_target
from estream.runtime.mock import Faults, MockProgram, MockTarget

F32 = np.dtype(np.float32)
PATH = Path("double.onnx")


def double(tensors: Mapping[str, np.ndarray]) -> None:
    tensors["y"][...] = tensors["x"] * 2


DOUBLE = MockProgram({"x": TensorInfo(F32, ("rows", 2))}, {"y": TensorInfo(F32, ("rows", 2))}, double)


def test_runs_the_registered_function_on_bound_memory() -> None:
    with MockTarget({"double": DOUBLE}) as target:
        graph = target.load(PATH)
        x, y = target.allocate(64, "x"), target.allocate(64, "y")
        graph.bind("x", x, 2)
        graph.bind("y", y, 2)
        x.array(F32, (2, 2))[...] = [[1, 2], [3, 4]]
        graph.run()
        np.testing.assert_array_equal(y.array(F32, (4, 2)), [[2, 4], [6, 8], [0, 0], [0, 0]])
        graph.bind("y", x, 2)  # in place
        graph.run()
        np.testing.assert_array_equal(x.array(F32, (2, 2)), [[2, 4], [6, 8]])
        assert target.runs == {"double": 2}


def test_records_distinct_addresses_and_capacities() -> None:
    with MockTarget({"double": DOUBLE}) as target:
        graph = target.load(PATH)
        x = target.allocate(64, "x")
        for rows in (1, 2, 3):
            graph.bind("x", x, rows)
        assert target.bound == {(x.address, 64)}
        graph.bind("x", x.part(0, 32), 1)
        graph.bind("y", x.part(32, 32), 1)
        assert target.bound == {(x.address, 64), (x.address, 32), (x.address + 32, 32)}
        assert target.allocations == [("x", 64)]


def test_refuses_what_a_target_refuses() -> None:
    target = MockTarget({"double": DOUBLE})
    graph = target.load(PATH)
    x = target.allocate(16, "x")
    for name, rows, message in (
        ("z", 1, "graph double has no tensor z"),
        ("x", 3, r"tensor x: the buffer is too small \(asked 24 bytes, had 16"),
        ("x", None, "tensor x: rows missing"),
    ):
        with pytest.raises(TargetError, match=message):
            graph.bind(name, x, rows)
    assert not target.bound
    graph.bind("x", x, 1)
    with pytest.raises(TargetError, match="tensor y is not bound"):
        graph.run()
    target.close()
    target.close()
    with pytest.raises(TargetError, match="closed"):
        graph.bind("x", x, 1)
    with pytest.raises(TargetError, match="closed"):
        target.allocate(16, "more")
    with pytest.raises(TargetError, match="closed"):
        target.load(PATH)


def test_run_after_close_is_refused() -> None:
    target = MockTarget()
    graph = target.load(PATH)
    target.close()
    with pytest.raises(TargetError, match="cannot run graph double: the target is closed"):
        graph.run()


def test_injected_allocation_failures() -> None:
    target = MockTarget(faults=Faults(allocation=2))
    target.allocate(8, "first")
    with pytest.raises(TargetError, match=r"memory for second was refused \(injected\)"):
        target.allocate(8, "second")
    target.allocate(8, "third")
    target.faults.allocation_above = 100
    target.allocate(100, "fits")
    with pytest.raises(TargetError, match="asked 101 bytes"):
        target.allocate(101, "too large")
    target.close()


def test_injected_run_failures_and_delays() -> None:
    slept: list[float] = []
    faults = Faults(run=3, delay=lambda graph, run: {"a": 0.5, "b": 0.25}[graph] * run)
    with MockTarget(faults=faults, sleep=slept.append) as target:
        a, b = target.load(Path("a.onnx")), target.load(Path("b.onnx"))
        a.run()
        b.run()
        with pytest.raises(TargetError, match=r"graph a: run 3 failed \(injected\)"):
            a.run()
        b.run()
        assert slept == [0.5, 0.25, 1.0, 0.5]
        target.faults = Faults(run=3, run_graph="b")
        a.run()
        with pytest.raises(TargetError, match="graph b: run 3 failed"):
            b.run()


def test_wraps_another_target() -> None:
    inner = MockTarget({"double": DOUBLE}, max_rows=64, reference=True)
    with MockTarget(inner=inner) as target:
        assert (target.max_rows, target.graphs) == (64, "reference")
        graph = target.load(PATH)
        assert graph.inputs == DOUBLE.inputs
        x = target.allocate(64, "x")
        x.array(F32, (1, 2))[...] = 3
        graph.bind("x", x, 1)
        graph.bind("y", x, 1)
        graph.run()
        np.testing.assert_array_equal(x.array(F32, (1, 2)), [[6, 6]])
        assert target.runs == inner.runs == {"double": 1}
    assert inner.closed


def test_open_target_by_name() -> None:
    target = open_target("mock", reference=True)
    assert (target.name, target.graphs) == ("mock", "reference")
    graph = target.load(PATH)
    graph.bind("anything", target.allocate(8, "x"))  # a graph of which nothing is known takes any tensor
    graph.run()
    target.close()
