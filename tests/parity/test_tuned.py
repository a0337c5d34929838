"""On a machine that was measured, engines take the solver's group and lanes: the same bytes, the same promises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from estream import Engine
from estream.cache import cache_folder
from estream.package.reader import Package
from estream.runtime import open_target
from estream.solver.profile import DeviceProfile, Rate, Shape, identify, profile_path, shape_elements, shape_key
from estream.solver.search import solve
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Package, DeviceProfile]:
    """A package and this machine's profile in a cache: a flash so slow that small groups pay."""
    monkeypatch.setenv("ESTREAM_CACHE", str(tmp_path / "cache"))
    path, _ = packed(tmp_path, "olmoe")
    package = Package.open(path)
    target = open_target("cpu", threads=1)
    machine = identify("cpu", target.graphs, 1, package.experts_file)
    target.close()
    shape = Shape(((2.0, 1e-3), (64.0, 1e-3)), ((16.0, 1e-3), (64.0, 1e-3)), 1e-3, 0.0, *shape_elements(package))
    rates = tuple(Rate(1 << 20, lanes, 4e6 * lanes) for lanes in (1, 2, 4))
    profile = DeviceProfile(machine, rates, 4, 1.0, 1.0, 50 << 20, {shape_key(package): shape})
    profile.write(profile_path(machine, cache_folder()))
    return package, profile


def test_the_solver_chooses_where_a_profile_is(measured: tuple[Package, DeviceProfile]) -> None:
    package, profile = measured
    expected = solve(package, profile, 64).configuration
    with Engine(package.path, threads=1, max_tokens=64) as engine:
        chosen, logits = engine.configuration, engine.prefill(prompt(40)).logits
    assert (chosen["tuned"], chosen["group"], chosen["lanes"]) == (True, expected.group, 4)
    with Engine(package.path, threads=1, max_tokens=64, group=8) as engine:
        assert (engine.configuration["tuned"], engine.configuration["lanes"]) == (False, 2)
        assert np.array_equal(engine.prefill(prompt(40)).logits, logits)
        assert chosen["group"] != engine.configuration["group"]


def test_another_machine_is_not_this_one(measured: tuple[Package, DeviceProfile]) -> None:
    package, _ = measured
    with Engine(package.path, threads=2, max_tokens=64) as engine:  # measured with one thread
        assert engine.configuration["tuned"] is False


def test_a_damaged_profile_is_no_profile(measured: tuple[Package, DeviceProfile]) -> None:
    package, profile = measured
    profile_path(profile.machine, cache_folder()).write_text("{}")
    with Engine(package.path, threads=1, max_tokens=64) as engine:
        assert engine.configuration["tuned"] is False
