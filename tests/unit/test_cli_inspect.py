"""inspect: a checkpoint before packing, and the package after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from estream.cli.main import main
from estream.package.reader import Package
from tests.support.tiny_packages import OLMOE, QWEN2_MOE, write_checkpoint


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["inspect", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def rows(text: str) -> list[list[str]]:
    """Name and value of each row below the title."""
    return [line.strip().split("  ", 1) for line in text.splitlines()[1:]]


def test_checkpoint_shows_the_plan_before_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, QWEN2_MOE)
    text = shown(capsys, str(checkpoint))
    values = [value.strip() for name, value in rows(text) if name == "layers"]
    assert values == ["0: moe", "1: dense 72", "2: moe"]
    assert "4 experts of 40, 2 per token, shared expert 100" in text


@pytest.mark.parametrize("scheme", ["f32", "f16", "int8"])
@pytest.mark.parametrize("config", [OLMOE, QWEN2_MOE], ids=["olmoe", "qwen2_moe"])
def test_promised_sizes_are_the_packed_ones(
    config: dict[str, object], scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out.estream"
    write_checkpoint(checkpoint, config)
    promised = json.loads(shown(capsys, str(checkpoint), "--json"))["packed"][scheme]
    assert main(["pack", str(checkpoint), str(out), "--experts", scheme, "-q"]) == 0
    package = Package.open(out)
    assert promised == {
        "panel_width": package.pool.panel.width,
        "panels_per_expert": package.pool.panels_per_expert,
        "record_bytes": package.pool.record_bytes,
        "pool_bytes": package.pool.pool_bytes,
        "dense_bytes": sum(tensor.nbytes for tensor in package.dense.values()),
    }


def test_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out.estream"
    write_checkpoint(checkpoint, OLMOE)
    assert main(["pack", str(checkpoint), str(out), "--experts", "int8", "--panel", "32", "-q"]) == 0
    values = {name: value.strip() for name, value in rows(shown(capsys, str(out)))}
    assert values["family"] == "olmoe"
    assert values["layers"] == "0-1: moe"
    assert values["records"] == "6 of 48.0 KiB: 3 panel(s) of 16.0 KiB, width 32"
    assert values["graphs"] == "cpu, cpu-u8, reference"
    assert values["origin"] == "checkpoint"
    facts = json.loads(shown(capsys, str(out), "--json"))
    assert facts["kind"] == "package"
    assert facts["architecture"]["experts"] == 3
    assert facts["manifest"] == json.loads((out / "model.json").read_bytes())
    assert facts["file_bytes"] == sum(
        entry.stat().st_size for entry in out.rglob("*") if entry.name != "model.json" and entry.is_file()
    )
    assert "layers.1.q_norm" in shown(capsys, str(out), "-v")
