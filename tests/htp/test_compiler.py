"""The offline compiler in its own process: reports, refusals, static shapes."""

from __future__ import annotations

import numpy as np
import pytest

from estream.errors import TargetError, UsageError
from estream.runtime.soc import find_soc
from qnn_graphs.builder import Builder
from qnn_graphs.htp.compiler import compile_graph
from qnn_graphs.htp.report import parse_report
from qnn_graphs.htp.session import open_session
from qnn_graphs.htp.simulator import Simulator


def product(rows: int | str = 32) -> Builder:
    b = Builder("product")
    x, w = b.input("x", (rows, 64), np.float16), b.input("w", (64, 96), np.float16)
    b.node("MatMul", x, w, out=b.output("y", (rows, 96), np.float16))
    return b


def test_a_compiled_graph_has_a_report_and_runs_from_its_context(tmp_path) -> None:  # type: ignore[no-untyped-def]
    compiled = compile_graph(product().model(), "sm8850")
    report = compiled.report
    assert report.read_bytes >= 2 * (32 * 64 + 64 * 96) and report.write_bytes >= 2 * 32 * 96
    assert report.spill_bytes == report.spill_fill_bytes == 0
    assert report.scalar + report.vector > 0 and report.matrix > 0
    assert compiled.qairt.startswith("2.") and 0 < len(compiled.context) < 1 << 20
    session = open_session(compiled.write(tmp_path), find_soc("sm8850"))
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((32, 64)).astype(np.float16), rng.standard_normal((64, 96)).astype(np.float16)
    y = session.run(None, {"x": x, "w": w})[0]
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.astype(np.float64), rtol=0, atol=0.03)


def test_a_refused_operator_is_named() -> None:
    b = product()
    a = b.input("a", (32, 32), np.uint8)
    b.node("BitwiseAnd", a, a, out=b.output("c", (32, 32), np.uint8))
    for attempt in (lambda: compile_graph(b.model(), "sm8650"), lambda: Simulator(b.model(), "sm8650")):
        with pytest.raises(TargetError, match=r"refused by the NPU: operator BitwiseAnd, node BitwiseAnd_1"):
            attempt()


def test_a_symbolic_dimension_is_refused() -> None:
    with pytest.raises(TargetError, match=r"tensor x has a symbolic dimension.*static shapes.*'rows', 64"):
        compile_graph(product("rows").model(), "sm8650")


def test_an_unknown_soc_and_a_timeout_are_errors() -> None:
    with pytest.raises(UsageError, match="unknown SoC 'sm1'"):
        compile_graph(product().model(), "sm1")
    with pytest.raises(TargetError, match="did not compile in time"):
        compile_graph(product().model(), "sm8650", timeout_s=0.01)


def test_a_log_without_a_figure_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="read_total_bytes"):
        parse_report("runlist = 1 + 2 vec + 3 mtx", 1.0)
