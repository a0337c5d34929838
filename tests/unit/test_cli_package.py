"""pack, synth, verify: the options arrive, and the results are said, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from estream.cli.main import main
from estream.package.verify import VerifyReport
from estream.package.writer import PackResult

RESULT = PackResult(
    path=Path("out.estream"),
    family="olmoe",
    experts="int8",
    dense="f16",
    panel_width=512,
    panels_per_expert=2,
    panel_bytes=3 << 20,
    files={"model.json": 1000, "experts.safetensors": 6 << 30},
    seconds=61.25,
)


class Recorder:
    """Stands for pack, synthesize or verify: remembers its arguments, reports progress, returns a result."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        options.pop("progress")("experts", 1, 2)
        self.arguments, self.options = arguments, options
        return self.result


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(RESULT)
    monkeypatch.setattr("estream.package.pack.pack", recorder)
    monkeypatch.setattr("estream.package.synth.synthesize", recorder)
    return recorder


def test_pack_defaults(packing: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "checkpoint", "out.estream"]) == 0
    assert packing.arguments == (Path("checkpoint"), Path("out.estream"))
    assert packing.options == {"experts": "f16", "dense": None, "panel": None, "force": False}
    assert capsys.readouterr().out.splitlines() == [
        "out.estream: olmoe, experts int8, dense f16, 6.00 GiB in 61.2 s",
        "  records  6.00 MiB per expert: 2 panel(s) of 3.00 MiB, width 512",
    ]


def test_pack_options(packing: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--experts", "int8", "--dense", "f16", "--panel", "512", "--force", "-q"]
    assert main(["pack", "checkpoint", "out.estream", *options]) == 0
    assert packing.options == {"experts": "int8", "dense": "f16", "panel": 512, "force": True}
    assert capsys.readouterr() == ("out.estream: olmoe, experts int8, dense f16, 6.00 GiB in 61.2 s\n", "")


def test_pack_json(packing: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "checkpoint", "out.estream", "--json"]) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out) == RESULT.to_dict()


def test_pack_verbose_lists_files(packing: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "checkpoint", "out.estream", "-v"]) == 0
    assert "  experts.safetensors  6.00 GiB" in capsys.readouterr().out


def test_synth(packing: Recorder) -> None:
    assert main(["synth", "olmoe-1b-7b", "out.estream"]) == 0
    assert packing.arguments == ("olmoe-1b-7b", Path("out.estream"))
    assert packing.options == {"experts": "int8", "dense": None, "layers": None, "seed": 0, "force": False}
    assert main(["synth", "olmoe-1b-7b", "out.estream", "--layers", "2", "--seed", "7", "--experts", "f32"]) == 0
    assert packing.options == {"experts": "f32", "dense": None, "layers": 2, "seed": 7, "force": False}


def test_synth_names_near_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["synth", "olmoe-1b", str(tmp_path / "x.estream")])
    assert "Did you mean olmoe-1b-7b?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def verifying(monkeypatch: pytest.MonkeyPatch, *damaged: str) -> None:
    report = VerifyReport(path=Path("x.estream"), damaged=damaged, files=9, bytes=2 << 30, seconds=2.0)
    monkeypatch.setattr("estream.package.verify.verify", Recorder(report))


def test_verify_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verifying(monkeypatch)
    assert main(["verify", "x.estream"]) == 0
    assert capsys.readouterr() == ("x.estream: whole (9 files, 2.00 GiB read in 2.00 s, 1.07 GB/s)\n", "")


def test_verify_names_each_damaged_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verifying(monkeypatch, "layers.3.experts.17 panel 0", "layers.3.q")
    assert main(["verify", "x.estream"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == ["damaged: layers.3.experts.17 panel 0", "damaged: layers.3.q"]
    assert out.splitlines()[2].startswith("x.estream: 2 damaged (9 files, ")
    assert err.startswith("estream: error: x.estream is damaged.")
    assert main(["verify", "x.estream", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is False
    assert facts["damaged"] == ["layers.3.experts.17 panel 0", "layers.3.q"]


def test_inspect_refuses_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "neither a packed model nor a checkpoint" in capsys.readouterr().err
