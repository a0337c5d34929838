"""What a simulation is of: phones' files, outlines of presets, recorded loads; and the command that prints it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream.cli.main import main
from estream.errors import UsageError
from estream.package.outline import outline
from estream.package.reader import Package
from estream.package.synth import synthesize
from estream.solver.load import LoadRecorder, read_load
from estream.solver.phone import load_phone, phones, read_phone
from estream.solver.profile import ProfileError

MODEL = "olmoe-1b-7b"


@pytest.mark.parametrize("name", phones())
def test_every_figure_of_a_phone_has_a_source(name: str) -> None:
    text = resources.files("estream.solver").joinpath("phones", f"{name}.json").read_text()
    phone, raw = read_phone(name, text), json.loads(text)
    assert phone.machine["device"] == name and isinstance(phone.machine["fitted"], bool)
    words = ("published", "fitted", "derived", "assumed")
    for figure in raw["figures"].values():
        assert figure["source"].startswith(words)
    assert phone.machine["fitted"] == any(f["source"].startswith("fitted") for f in raw["figures"].values())
    sizes = [phone.profile.bytes_per_s(size, 2) for size in (1 << 18, 1 << 20, 1 << 22, 1 << 24)]
    assert all(smaller <= larger * (1 + 1e-9) for smaller, larger in pairwise(sizes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(version=2), "its format"),
        (lambda raw: raw["figures"].pop("dispatch_s"), "the figures"),
        (lambda raw: raw["figures"].update(more={}), "the figures"),
        (lambda raw: raw["figures"]["dispatch_s"].pop("source"), "dispatch_s must have"),
        (lambda raw: raw["figures"]["dispatch_s"].update(source=""), "dispatch_s has no source"),
        (lambda raw: raw["figures"]["dispatch_s"].update(value=0), "dispatch_s must be a positive number"),
        (lambda raw: raw["figures"]["dispatch_s"].update(unit="ms"), "dispatch_s is in 'ms'"),
        (lambda raw: raw["figures"]["flash_by_size"].update(value={"4096": 2}), "flash_by_size must be shares"),
        (lambda raw: raw["figures"]["flash_by_size"].update(value={"x": 1}), "flash_by_size must be shares"),
    ],
)
def test_a_phone_that_is_none_is_refused(change: Any, words: str) -> None:
    raw = json.loads(resources.files("estream.solver").joinpath("phones", "oneplus15.json").read_text())
    change(raw)
    with pytest.raises(ProfileError, match=words):
        read_phone("x", json.dumps(raw))


def test_the_older_phone_follows_from_the_fitted_one() -> None:
    older, fitted = load_phone("oneplus12"), load_phone("oneplus15")
    for name in ("matrix_flops", "latent_flops"):
        assert getattr(older, name) == pytest.approx(getattr(fitted, name) * 12 / 21, rel=0.01)


def test_an_outline_lays_out_what_synth_writes(tmp_path: Path) -> None:
    synthesize(MODEL, tmp_path / "m.estream", experts="int4", layers=1)
    written, there = Package.open(tmp_path / "m.estream"), outline(MODEL)
    assert written.pool.panel == there.pool.panel and written.pool.panels_per_expert == there.pool.panels_per_expert
    assert written.head_width == there.head_width
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in there.dense.items()}
    assert all(own[name] == (tensor.shape, tensor.dtype) for name, tensor in written.dense.items())
    with pytest.raises(UsageError, match="Did you mean olmoe-1b-7b"):
        outline("olmoe")


def recorded(path: Path, **changes: Any) -> Path:
    counts = [[8] * 64 for _ in range(16)]
    path.write_text(json.dumps({"format": "estream-load", "version": 1, "tokens": 64, "counts": counts, **changes}))
    return path


def test_recorded_loads_are_read_and_scaled(tmp_path: Path) -> None:
    counts = [[1, 63, *[64] * 7, *[0] * 55], *([8] * 64 for _ in range(15))]
    found = read_load(recorded(tmp_path / "l.json", counts=counts), 64, 8, 16, 128)
    assert found[0].tolist() == [2, 126, *[128] * 7, *[0] * 55] and found[1].tolist() == [16] * 64
    assert read_load(tmp_path / "l.json", 64, 8, 16, 8)[0][0] == 1  # an expert that was needed stays so


def test_an_observer_records_a_load(tmp_path: Path) -> None:
    """Of every expert the rows of its first panel; shared experts and the other graphs count nothing."""
    pool = replace(outline(MODEL).pool, panels_per_expert=2, experts=3, moe_layers=(1, 2))
    recorder, y = LoadRecorder(pool), {"y": np.zeros((5, 4), np.float32)}
    recorder(0, "input", slice(0, 20), {"hidden": np.zeros((20, 4), np.float32)})
    for panel in (0, 1, 4, 4, 4, 5):
        recorder(1, "expert", np.arange(5), y, panel)
    recorder(2, "shared", np.arange(5), y, 0)
    for panel in (0, 2, 2, 4):
        recorder(2, "expert", np.arange(5), y, panel)
    recorder.write(tmp_path / "l.json")
    assert [layer.tolist() for layer in read_load(tmp_path / "l.json", 3, 1, 2, 40)] == [[10, 0, 30], [10, 20, 10]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "its format"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"counts": 3}, "counts .asked 16 MoE layers, had no list"),
        ({"counts": [[8] * 64] * 15}, "counts .asked 16 MoE layers, had 15"),
        ({"counts": [[8] * 63] * 16}, "counts of MoE layer 0 .asked 64 experts"),
        ({"counts": [[8.5] * 64] * 16}, "whole numbers of 0 to 64"),
        ({"counts": [[65] * 64] * 16}, "whole numbers of 0 to 64"),
        ({"counts": [[7] * 64] * 16}, "sum .* of MoE layer 0 .asked 512: 64 tokens, 8 experts each, had 448"),
        ({"tokens": 10**400}, "tokens .asked a whole number"),
    ],
)
def test_a_load_that_is_none_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_load(recorded(tmp_path / "l.json", **changes), 64, 8, 16, 128)


def test_the_command_prints_the_keys_of_plan_and_says_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from estream.package.synth import synthesize_small
    from tests.unit.test_solver import profile

    synthesize_small(tmp_path / "small.estream")
    profile(Package.open(tmp_path / "small.estream")).write(tmp_path / "p.json")
    assert (
        main(
            ["plan", str(tmp_path / "small.estream"), "--tokens", "64", "--profile", str(tmp_path / "p.json"), "--json"]
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    arguments = ["simulate", MODEL, "--device", "oneplus15", "--tokens", "1024"]
    picture = tmp_path / "t.svg"
    assert main([*arguments, "--json", "--plot", str(picture), "--memory", "1GiB"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said) == [*plan, "simulated"] and said["simulated"] is True
    assert said["machine"]["device"] == "oneplus15" and said["peak_bytes"] <= 1 << 30
    assert "simulated" in picture.read_text() and picture.read_text().startswith("<svg")
    assert main([*arguments, "--load", str(recorded(tmp_path / "l.json")), "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.endswith("| simulated") for line in lines)
    assert main(["simulate", str(tmp_path / "small.estream"), "--device", "oneplus12", "--tokens", "64"]) == 0
    told = capsys.readouterr()
    assert "simulated: nothing was measured; its figures were not fitted" in told.out + told.err
    assert main(["simulate", "none.estream", "--device", "oneplus15", "--tokens", "64"]) == 2
    assert "no such package or preset" in capsys.readouterr().err
    both = ["simulate", str(tmp_path / "small.estream"), "--device", "oneplus15", "--tokens", "64", "--experts", "int8"]
    assert main(both) == 2 and "a package has its schemes" in capsys.readouterr().err


def test_files_of_loads_that_are_no_json(tmp_path: Path) -> None:
    for content, said in ((b"[" * 100_000, "nested too deeply"), (b"{", "in line 1"), (b'"\xff"', "not UTF-8 text")):
        (tmp_path / "l.json").write_bytes(content)
        with pytest.raises(UsageError, match=rf"^--load .*l\.json: .*{said}"):
            read_load(tmp_path / "l.json", 64, 8, 16, 128)


def test_what_is_not_simulated_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["simulate", MODEL, "--device", "oneplus15", "--tokens"]
    assert main([*call, "64", "--load", str(recorded(tmp_path / "l.json")), "--seed", "7"]) == 2
    assert "--load and --seed exclude each other" in capsys.readouterr().err
    assert main([*call, "4097"]) == 2
    assert "--tokens must lie within the model's context (asked 4097, had 1 to 4096)" in capsys.readouterr().err
    for option in (["--experts", "f32"], ["--experts", "f16"], ["--dense", "f32"]):
        with pytest.raises(SystemExit) as ended:
            main([*call, "64", *option])
        assert ended.value.code == 2 and "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "memory", "said"),
    [
        ("layer-streaming", "400MiB", "The smallest budget of --strategy layer-streaming is --memory "),
        ("resident", "1GiB", "The smallest budget of --strategy resident is --memory "),
        ("on-demand", "200MiB", "The smallest budget of --strategy on-demand is --memory "),
        ("estream", "200MiB", "The smallest budget that works is --memory "),
        ("padded", "200MiB", "The smallest budget that works is --memory "),
    ],
)
def test_the_smallest_budget_that_is_named_works(
    strategy: str, memory: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone: `simulate` has no other options of memory."""
    call = ["simulate", MODEL, "--device", "oneplus15", "--tokens", "4096", "--strategy", strategy, "--memory"]
    assert main([*call, memory]) == 1
    told = capsys.readouterr().err.strip()
    assert said in told
    least = int(told.partition(said)[2])
    assert main([*call, str(least), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] <= least
    assert main([*call, str(least - 1)]) == 1
