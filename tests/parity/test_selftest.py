"""The selftest passes on a sound target and names what an unsound one does wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from estream.cli import main
from estream.cli.console import plain
from estream.package.manifest import Manifest
from estream.package.pack import pack
from estream.selftest import SelftestReport, selftest
from estream.selftest import run as selftest_run
from estream.selftest.compare import Comparer
from estream.selftest.record import Recorder
from estream.selftest.tolerances import Tolerances
from tests.support.faults import make_package
from tests.support.faulty_target import FaultyTarget, drop_row, misplace, repeat_first, stale, swap, zero
from tests.support.packages import packed
from tests.support.tiny_packages import QWEN2_MOE, save_weights, write_checkpoint

TOKENS = 20
HIDDEN, HEAD_WIDTH = 32, 64  # of the tiny model: three layers, the second one dense; two panels per expert


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates far enough from 0 that SwiGLU is not linear: there, exchanging its two factors' scales changes little."""
    folder = tmp_path_factory.mktemp("selftest")
    weights = write_checkpoint(folder / "checkpoint", QWEN2_MOE)
    save_weights(
        folder / "checkpoint", {name: 8 * weight if "gate_proj" in name else weight for name, weight in weights.items()}
    )
    pack(folder / "checkpoint", folder / "model.estream", experts="int8", panel=32)
    return folder / "model.estream"


@pytest.fixture(scope="module")
def f32_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("selftest-f32"), experts="f32")


def test_sound_target_passes_with_every_graph_compared(package: Path) -> None:
    report = selftest(package, threads=1, tokens=TOKENS)
    assert report.ok and report.faults == [] and report.reference
    dense = ["qkv", "attention"]
    moe = [*dense, "o_router", "shared", "expert", "sum"]
    assert [(item.layer, item.graph) for item in report.differences] == [
        *((0, graph) for graph in moe),
        *((1, graph) for graph in (*dense, "o_norm", "ffn", "sum")),
        *((2, graph) for graph in moe),
        (3, "final_norm"),
        (3, "head"),
    ]
    # 8-bit activations differ a little from the reference, and far less than is allowed.
    compared = [item for item in report.differences if item.graph != "final_norm"]
    assert all(1e-4 < item.error < 0.3 * item.tolerance.worst for item in compared)
    assert all(item.typical < 0.2 * item.tolerance.typical for item in compared)
    assert report.prompts_differ_by is not None and report.prompts_differ_by > 0.3


def test_float_target_is_the_reference(f32_package: Path) -> None:
    report = selftest(f32_package, threads=1, tokens=TOKENS)
    assert report.ok
    assert max(item.error for item in report.differences) < 1e-5


def test_longer_than_a_block(package: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("estream.layers.state.BLOCK", 7)
        assert selftest(package, threads=1, tokens=TOKENS).ok


PARTS = ("gate", "up", "down", "gate_scale", "mid_scale")


@pytest.mark.parametrize(
    ("target", "layer", "graph"),
    [
        (lambda: FaultyTarget("expert", before=stale(PARTS, run=9)), 0, "expert"),
        (lambda: FaultyTarget("expert", before=stale(("down",), run=9)), 0, "expert"),
        (lambda: FaultyTarget("expert", after=zero("y", HIDDEN, from_run=10)), 0, "expert"),
        (lambda: FaultyTarget("attention", after=zero("attn", HIDDEN)), 0, "attention"),
        (lambda: FaultyTarget("o_router", after=zero("logits", 5)), 0, "o_router"),
        (lambda: FaultyTarget("o_norm", after=zero("normed", HIDDEN)), 1, "o_norm"),
        (lambda: FaultyTarget("head", after=zero("logits", HEAD_WIDTH)), 3, "head"),
        (lambda: FaultyTarget("expert", before=swap("gate_scale", "mid_scale")), 0, "shared"),
        (lambda: FaultyTarget("expert", after=drop_row("y", HIDDEN, row=4)), 0, "shared"),
        (lambda: FaultyTarget("gather", after=drop_row("x_scale", 1, row=17)), 0, "shared"),
        (lambda: FaultyTarget("scatter_add", before=misplace("index")), 0, "sum"),
        (lambda: FaultyTarget("qkv", after=drop_row("k_out", HIDDEN // 2, row=11)), 0, "qkv"),
        (lambda: FaultyTarget("final_norm", after=zero("normed", HIDDEN)), 3, "final_norm"),
    ],
    ids=[
        *("stale-bank", "stale-part-of-a-bank", "zeroed-experts", "zeroed-attention", "zeroed-router", "zeroed-norm"),
        *("zeroed-head", "swapped-scales", "dropped-row", "dropped-in-gather", "misplaced-in-scatter", "dropped-key"),
        "zeroed-final-norm",
    ],
)
def test_faults_are_named(package: Path, target: object, layer: int, graph: str) -> None:
    report = selftest(package, target(), tokens=TOKENS)  # type: ignore[operator]
    assert not report.ok
    assert report.first is not None and (report.first.layer, report.first.graph) == (layer, graph), report.faults


def test_stale_bank_names_the_expert(package: Path) -> None:
    # Runs 1 to 4 are the shared expert's panels; 5, 6 expert 0; 7, 8 expert 1; 9 is the first of expert 2.
    report = selftest(package, FaultyTarget("expert", before=stale(PARTS, run=9)), tokens=TOKENS)
    assert "first in layer 0, expert, y of expert 2, panel 0, token" in report.faults[0]
    # What comes after has the reference's input again.
    assert {(item.layer, item.graph) for item in report.differences if item.diverged} <= {(0, "expert"), (0, "sum")}


def test_one_dropped_row_among_many_is_seen_by_its_own_error(package: Path) -> None:
    report = selftest(package, FaultyTarget("expert", after=drop_row("y", HIDDEN, row=4)), tokens=TOKENS)
    assert report.first is not None
    assert report.first.row == 4 and report.first.error == pytest.approx(1, abs=1e-6)
    assert report.first.typical < report.first.tolerance.typical


def test_one_slice_of_a_head_of_many() -> None:
    """Each slice counts by itself: one of forty would not show in the norm of all logits."""
    comparer = Comparer(Recorder(), Tolerances("cpu", "int8", "int8"))
    expected = np.random.default_rng(0).standard_normal((3, 400), dtype=np.float32)
    actual = expected.copy()
    actual[1, 70:80] = 0
    comparer.head(2, actual, expected, 10)
    (found,) = comparer.differences
    assert found.diverged and (found.row, found.panel, found.error) == (1, 7, pytest.approx(1))


def test_experts_left_out(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from estream.routing import RouteTable

    real = RouteTable.tiles
    target = FaultyTarget("expert")
    monkeypatch.setattr(
        RouteTable,
        "tiles",
        # Only of the engine under test: the reference runs before anything is loaded here.
        lambda table, expert, rows: () if expert == 1 and target.runs["expert"] else real(table, expert, rows),
    )
    report = selftest(package, target, tokens=TOKENS)
    assert report.first is not None and report.first.graph == "expert"
    assert "never computed" in report.faults[0]


@pytest.mark.parametrize(
    ("graph", "name", "width", "seen"),
    [("head", "logits", HEAD_WIDTH, "differ by 0"), ("attention", "attn", HIDDEN, "layer 0, attention: attn")],
)
def test_output_that_does_not_depend_on_the_prompt(
    package: Path, graph: str, name: str, width: int, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by the second prompt alone: without a reference, too."""
    monkeypatch.setattr(selftest_run, "has_reference", lambda package: False)
    report = selftest(package, FaultyTarget(graph, after=repeat_first(name, width)), tokens=TOKENS)
    assert not report.reference and report.differences == ()
    assert any(seen in fault for fault in report.faults), report.faults


def test_without_reference_graphs(package: Path, tmp_path: Path) -> None:
    copy = without_reference(package, tmp_path / "phone.estream")
    assert selftest(copy, threads=1, tokens=TOKENS).ok
    report = selftest(copy, FaultyTarget("attention", after=zero("attn", HIDDEN)), tokens=TOKENS)
    assert report.faults == ["3 output(s) are zero, first layer 0, attention: attn"]


def test_output_that_is_not_finite_is_a_finding(package: Path) -> None:
    def poison(graph: object, run: int) -> None:
        graph.output("hidden_out", HIDDEN)[5, 2] = np.inf  # type: ignore[attr-defined]

    report = selftest(package, FaultyTarget("o_norm", after=poison), tokens=TOKENS)
    assert not report.ok
    assert "first in layer 1, o_norm, hidden, token 5: error inf (not finite)" in report.faults[0]
    assert json.loads(json.dumps(plain(report.to_dict()), allow_nan=False))["first"]["error"] is None


def test_command(package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.main(["selftest", str(package), "--tokens", "9", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "passed (cpu, 9 tokens; two prompts differ by" in out and "o_router" in out
    assert main.main(["selftest", str(package), "--tokens", "9", "--threads", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and answer["first"] is None and len(answer["differences"]) == 19
    broken = selftest(package, FaultyTarget("expert", after=zero("y", HIDDEN)), tokens=9)
    monkeypatch.setattr("estream.selftest.selftest", lambda *args, **options: broken)
    assert main.main(["selftest", str(package)]) == 1
    out = capsys.readouterr().out
    assert "1.0000!" in out and "diverges from the reference, first in layer 0, shared, y of panel 0" in out


def without_reference(package: Path, out: Path) -> Path:
    """A copy as for a phone: no reference graphs, and a manifest that does not name them."""
    shutil.copytree(package, out)
    shutil.rmtree(out / "graphs" / "reference")
    manifest = Manifest.read(out)
    for name in [name for name in manifest.files if name.startswith("graphs/reference/")]:
        del manifest.files[name]  # type: ignore[attr-defined]
    (out / "model.json").write_bytes(manifest.to_json())
    return out


def test_report_without_faults_is_ok() -> None:
    report = SelftestReport(Path("x"), "cpu", "cpu", False, 4, False, 1, (), 0.5, (), (), None)
    assert report.ok and report.first is None


def test_convolution_layers_are_compared(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "lfm2_moe", experts="int8")
    report = selftest(package, threads=1, tokens=TOKENS)
    assert report.ok, report.faults
    assert [(item.layer, item.graph) for item in report.differences] == [
        *((0, graph) for graph in ("conv", "o_norm", "ffn", "sum")),
        *((1, graph) for graph in ("qkv", "attention", "o_router", "expert", "sum")),
        *((2, graph) for graph in ("conv", "o_router", "expert", "sum")),
        (3, "final_norm"),
        (3, "head"),
    ]
    report = selftest(package, FaultyTarget("conv", after=drop_row("attn", HIDDEN, row=3)), tokens=TOKENS)
    assert report.first is not None and (report.first.layer, report.first.graph) == (0, "conv"), report.faults
