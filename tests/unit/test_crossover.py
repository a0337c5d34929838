"""CPU or NPU for a prompt: both figures, advice and nothing more."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from android.calibrate import profile_path
from estream.cli.device.engine import advice
from estream.cli.main import main
from estream.errors import UsageError
from estream.package.reader import Package
from estream.package.synth import synthesize_small
from estream.solver.crossover import Crossover, compare
from estream.solver.profile import DeviceProfile, Rate, Shape, shape_elements, shape_key
from estream.solver.search import solve


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    path = tmp_path_factory.mktemp("crossover") / "small.estream"
    synthesize_small(path)
    return Package.open(path)


def profile(package: Package, backend: str) -> DeviceProfile:
    """The CPU's tiles take as long as they have rows, the NPU's always the same: short prompts are the CPU's."""
    panel = ((1.0, 1e-4), (512.0, 5e-2)) if backend == "cpu" else ((1.0, 2e-3), (512.0, 2e-3))
    shape = Shape(panel, ((16.0, 1e-3), (2048.0, 1e-3)), 1e-3, 0.0, *shape_elements(package))
    rates = (Rate(1 << 20, 1, 1e10), Rate(1 << 24, 1, 1e10))
    return DeviceProfile({"backend": backend}, rates, 1, 1.0, 1.0, 50 << 20, {shape_key(package): shape})


def test_both_sides_of_the_crossover(package: Package) -> None:
    npu, cpu = profile(package, "htp"), profile(package, "cpu")
    short, long = (compare(package, npu, cpu, tokens) for tokens in (4, 512))
    assert short.cpu_s < short.npu_s and short.advice.endswith("for this prompt --backend cpu is faster")
    assert long.cpu_s > long.npu_s and long.advice.endswith("the NPU is faster")
    assert (short.to_dict()["faster"], long.to_dict()["faster"]) == ("cpu", "htp")
    assert short.npu_s == solve(package, npu, 4).prediction.ttft_s
    assert Crossover(1, 0.5, 2.0).advice.startswith("500 ms predicted on the CPU, 2.00 s on the NPU: ")


def test_profiles_of_the_wrong_target(package: Package) -> None:
    npu, cpu = profile(package, "htp"), profile(package, "cpu")
    for pair in ((cpu, npu), (cpu, cpu), (npu, npu)):
        with pytest.raises(UsageError, match="a CPU is compared with an NPU"):
            compare(package, *pair, 4)


def test_plan_shows_both(package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for backend in ("htp", "cpu"):
        profile(package, backend).write(tmp_path / f"{backend}.json")
    command = ["plan", str(package.path), "--tokens", "4", "--profile", str(tmp_path / "htp.json")]
    assert main([*command, "--cpu-profile", str(tmp_path / "cpu.json"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["crossover"]["faster"] == "cpu" and answer["crossover"]["npu_s"] == answer["ttft_s"]
    assert main([*command, "--cpu-profile", str(tmp_path / "cpu.json")]) == 0
    assert "cpu       " in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["crossover"] is None
    assert main([*command, "--cpu-profile", str(tmp_path / "htp.json")]) == 2
    assert main([*command, "--cpu-profile", str(tmp_path / "no.json")]) == 2


def test_a_run_is_advised_where_both_were_measured(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTREAM_CACHE", str(tmp_path))
    npu: Any = argparse.Namespace(backend="htp", memory=None)
    profile(package, "htp").write(profile_path("S", "htp", tmp_path))
    assert advice(npu, package, "S", 4) is None
    profile(package, "cpu").write(profile_path("S", "cpu", tmp_path))
    said = advice(npu, package, "S", 4)
    assert said is not None and said.to_dict()["faster"] == "cpu"
    assert advice(npu, package, "another", 4) is None
    assert advice(argparse.Namespace(backend="cpu", memory=None), package, "S", 4) is None
    assert advice(argparse.Namespace(backend="htp", memory=1), package, "S", 4) is None
