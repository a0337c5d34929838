"""Compiled contexts on disk: what is written, and what loading says of those that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from estream import Engine
from estream.cli.main import main
from estream.doctor.package import check_contexts
from estream.errors import EStreamError, PackageError, TargetError
from estream.package.reader import Package
from estream.package.verify import verify
from qnn_graphs.builder import Builder
from qnn_graphs.htp.compiler import compile_graph
from qnn_graphs.htp.contexts import check_context
from qnn_graphs.htp.evaluate import evaluate, random_feeds
from qnn_graphs.htp.expert import ExpertGraph, build_expert
from tests.support.htp_packages import compiled

SOC = "graphs/htp/sm8650"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("contexts"), "mixtral", num_hidden_layers=1)[0]


@pytest.fixture
def package(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "m.estream"))


def test_a_folder_of_contexts_is_whole(package: Path) -> None:
    manifest = json.loads((package / SOC / "manifest.json").read_text())
    assert manifest["soc"] == "sm8650" and manifest["arch"] == 75 and manifest["qairt"].startswith("2.")
    assert set(manifest["graphs"]) == {"norm", "qkv", "attention", "o", "head", "expert.4x32", "expert.2x64"}
    files = {name for entry in manifest["graphs"].values() for name in entry["files"]}
    assert {path.name for path in (package / SOC).iterdir()} == files | {"manifest.json"}
    assert not [path for path in (package / SOC).parent.iterdir() if path.name != "sm8650"]
    assert verify(package).ok
    (finding,) = check_contexts(Package.open(package))
    assert (finding.name, finding.status) == ("contexts sm8650", "ok") and finding.found.startswith("7 load, ")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        (("qairt",), "2.0.0", r"field qairt \(asked '2.*had '2.0.0'\)"),
        (("soc",), "sm8850", "field soc"),
        (("arch",), 81, "field arch .asked 75, had 81"),
        (("scheme", "experts"), "int8", "field scheme.experts .asked 'f16', had 'int8'"),
        (("shapes", "hidden"), 64, "field shapes.hidden .asked 32, had 64"),
        (("shapes", "attention", "kv_heads"), 4, "field shapes.attention.kv_heads"),
        (("graphs", "norm", "graph"), "0" * 64, "hash of graph norm"),
        (("plan", "rows"), 64, "hash of graph norm"),
        (("plan", "colour"), 1, "cannot run on the NPU"),
    ],
)
def test_the_field_that_differs_is_named(package: Path, field: tuple[str, ...], value: Any, told: str) -> None:
    path = package / SOC / "manifest.json"
    document = json.loads(path.read_text())
    place = document
    for name in field[:-1]:
        place = place[name]
    place[field[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(EStreamError, match=told):
        Engine(package, "htp")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "estream-contexts", "version": 1, "graphs": {"../x": 1}}']
)
def test_a_manifest_that_is_none(package: Path, text: str) -> None:
    (package / SOC / "manifest.json").write_text(text)
    with pytest.raises(PackageError, match=r"manifest\.json.*Compile again: estream compile .* --soc sm8650"):
        Engine(package, "htp")


def test_a_damaged_context_never_reaches_native_code(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = package / SOC / "qkv_qnn.bin"
    content = bytearray(context.read_bytes())
    content[len(content) // 2] ^= 1
    context.write_bytes(content)
    monkeypatch.setattr("estream.runtime.htp.HtpTarget.load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(PackageError, match=r"qkv_qnn.bin is damaged.*Compile again: estream compile .* --soc sm8650"):
        Engine(package, "htp")
    assert [name for name in verify(package).damaged if "qkv_qnn.bin" in name]
    (finding,) = check_contexts(Package.open(package))
    assert finding.status == "missing" and "qkv_qnn.bin is damaged" in finding.found
    context.unlink()
    with pytest.raises(PackageError, match="No such file"):
        Engine(package, "htp")


def test_compile_prints_what_the_compiler_says(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(package), "--soc", "sm8850", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["socs"]["sm8850"]
    keys = {"name", "bytes", "seconds", "read_bytes", "write_bytes", "spill_bytes", "spill_fill_bytes", "operations"}
    assert len(report["graphs"]) == 8 and all(set(graph) == keys for graph in report["graphs"])
    assert report["context_bytes"] == sum(graph["bytes"] for graph in report["graphs"]) < 8 << 20
    assert all(graph["spill_bytes"] == 0 and graph["operations"]["vector"] > 0 for graph in report["graphs"])
    with Engine(package, "htp", soc="sm8850", max_tokens=8) as engine:
        assert np.isfinite(np.asarray(engine.prefill([1, 2]).logits)).all()
    assert main(["compile", str(package), "--soc", "sm8850,sm1"]) == 2


def test_a_context_with_other_numbers_is_refused() -> None:
    def scaled(factor: float) -> onnx.ModelProto:
        b = Builder("scaled")
        x, w = b.input("x", (32, 64), np.float16), b.input("down", (64, 96), np.float16)
        y = b.node("MatMul", x, w)
        b.node("Mul", y, b.constant(np.float16(factor)), out=b.output("y", (32, 96), np.float16))
        return b.model()

    made = compile_graph(scaled(1.5), "sm8650")
    assert check_context(scaled(1.5), made) < 2e-3
    with pytest.raises(
        TargetError, match=r"computes something else than numpy .asked a relative error of 0.01, had 0.5"
    ):
        check_context(scaled(1.0), made)


def test_numpy_evaluates_as_written() -> None:
    b = Builder("small")
    x = b.input("x", (2, 4), np.float16)
    b.node("Mul", x, b.node("Sigmoid", x), out=b.output("y", (2, 4), np.float16))
    feeds = random_feeds(b.model())
    x64 = feeds["x"].astype(np.float64)
    np.testing.assert_allclose(evaluate(b.model(), feeds)["y"], x64 / (1 + np.exp(-x64)), rtol=1e-5)


@pytest.mark.parametrize("scheme", ["f16", "int8", "int4"])
def test_what_contexts_are_checked_with_is_like_a_model(scheme: str) -> None:
    """Full-size weights of both signs whose outputs stay well inside float16."""
    model = build_expert(ExpertGraph(2048, 1024, scheme, slots=1, rows=32, chunks=2))
    feeds = random_feeds(model)
    assert 0.1 < np.median([np.abs(y).max() for y in evaluate(model, feeds).values()]) < 2000
    if scheme != "f16":
        matrix = feeds["slot0.gate.0"]
        assert (matrix & 15).min() == 1 and matrix.min() == 17 and matrix.max() == 255
