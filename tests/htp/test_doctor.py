"""The doctor on the real libraries: versions, devices, contexts that load and one that does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from estream.doctor.npu import check_npu
from estream.doctor.package import check_contexts
from estream.package.reader import Package
from qnn_graphs.builder import Builder
from qnn_graphs.htp.compiler import compile_graph
from tests.support.faults import make_package


def test_libraries_and_devices() -> None:
    found = {finding.name: finding for finding in check_npu()}
    assert all(finding.status == "ok" for finding in found.values()), found
    assert found["libQnnHtp"].found.startswith("QAIRT 2.")
    assert "QNNExecutionProvider" in found["devices"].found


def test_a_damaged_context_is_a_finding(tmp_path: Path) -> None:
    b = Builder("product")
    x, w = b.input("x", (32, 64), np.float16), b.input("w", (64, 96), np.float16)
    b.node("MatMul", x, w, out=b.output("y", (32, 96), np.float16))
    model = make_package(tmp_path)
    folder = model / "graphs" / "htp" / "sm8650"
    folder.mkdir(parents=True)
    compile_graph(b.model(), "sm8650").write(folder)
    (finding,) = check_contexts(Package.open(model))
    assert (finding.status, finding.found) == ("ok", "loads: 2 inputs, 1 outputs")
    context = folder / "product_qnn.bin"
    context.write_bytes(context.read_bytes()[:1000])
    (finding,) = check_contexts(Package.open(model))
    assert finding.status == "missing" and finding.found.startswith("damaged, or for another device: ")
