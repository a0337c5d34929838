"""Profiles on disk, times between measured points, predictions on the virtual clock, and what the solver chooses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from estream.cli.main import main
from estream.errors import MemoryBudgetError
from estream.package.reader import Package
from estream.package.synth import synthesize_small
from estream.solver.automatic import GROUP_BYTES
from estream.solver.latency import predict, workload
from estream.solver.load import draw_counts, expected_coverage
from estream.solver.profile import (
    DeviceProfile,
    ProfileError,
    Rate,
    Shape,
    interpolate,
    load_profile,
    profile_path,
    shape_elements,
    shape_key,
)
from estream.solver.search import configurations, solve

MACHINE = {"processor": "p", "backend": "cpu", "threads": 2}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    path = tmp_path_factory.mktemp("solver") / "small.estream"
    synthesize_small(path)
    return Package.open(path)


def profile(
    package: Package, *, bytes_per_s: float = 1e9, panel_s: float = 1e-3, slowdown: float = 1.0
) -> DeviceProfile:
    """Reads at one rate, a panel's tile takes panel_s whatever its rows, a dense layer 1 ms per 16 tokens."""
    shape = Shape(
        ((2.0, panel_s), (512.0, panel_s)), ((16.0, 1e-3), (2048.0, 0.128)), 1e-3, 0.0, *shape_elements(package)
    )
    rates = tuple(Rate(nbytes, lanes, bytes_per_s) for nbytes in (1 << 20, 1 << 24) for lanes in (1, 2))
    return DeviceProfile(MACHINE, rates, 1, 1.0, 1.0, 50 << 20, {shape_key(package): shape})


def test_between_points_are_lines() -> None:
    points = ((2.0, 1.0), (4.0, 3.0), (8.0, 3.0))
    assert [interpolate(points, x) for x in (2, 3, 4, 6, 8, 16)] == [1.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert interpolate(points, 1) == 0.0 and interpolate(points, -5) == 0.0  # never negative
    assert interpolate(((4.0, 2.0),), 8) == 4.0


def test_a_profile_survives_the_disk(package: Package, tmp_path: Path) -> None:
    made = profile(package)
    made.write(tmp_path / "p.json")
    assert DeviceProfile.read(tmp_path / "p.json") == made
    made.write(profile_path(MACHINE, tmp_path))
    assert load_profile(MACHINE, tmp_path) == made
    assert load_profile(MACHINE | {"threads": 3}, tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(version=2),
        lambda raw: raw.pop("rates"),
        lambda raw: raw.update(more=1),
        lambda raw: next(iter(raw["shapes"].values())).update(panel=[[2, 1], [1, 1]]),
        lambda raw: next(iter(raw["shapes"].values())).update(dense=[]),
    ],
)
def test_a_profile_that_is_none_is_refused(package: Package, tmp_path: Path, change: object) -> None:
    raw = profile(package).to_dict()
    raw = json.loads(json.dumps(raw))
    change(raw)  # type: ignore[operator]
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(ProfileError, match="is no device profile"):
        DeviceProfile.read(tmp_path / "p.json")
    assert load_profile(MACHINE, tmp_path) is None


def test_another_size_is_scaled_and_another_scheme_refused(package: Package) -> None:
    made = profile(package)
    (key, shape), panel = next(iter(made.shapes.items())), shape_elements(package)[0]
    half = Shape(shape.panel, shape.dense, 1.0, 0.0, panel // 2, shape.dense_elements)
    scaled = DeviceProfile(MACHINE, made.rates, 1, 1.0, 1.0, 0, {key.replace("2048x1024", "2048x512"): half})
    found = scaled.shape(package)
    assert found.scaled and found.panel == ((2.0, 2e-3), (512.0, 2e-3)) and found.dense == shape.dense
    other = DeviceProfile(MACHINE, made.rates, 1, 1.0, 1.0, 0, {key.replace("int8-int8", "f16-f16"): half})
    with pytest.raises(ProfileError, match=r"no figures for this package's schemes .asked experts int8, dense int8"):
        other.shape(package)


def test_loads_are_drawn_the_same_every_time() -> None:
    uniform, again = (draw_counts(64, 8, 512, 3) for _ in range(2))
    assert all(np.array_equal(one, two) for one, two in zip(uniform, again, strict=True))
    assert [int(counts.sum()) for counts in uniform] == [4096] * 3 and max(map(max, uniform)) < 2 * 64
    zipf = draw_counts(64, 8, 512, 1, skew=1.0)[0]
    assert int(zipf.sum()) == 4096 and zipf.max() > 400
    assert expected_coverage(64, 8, 1) == 0.125 and 0.87 < expected_coverage(64, 8, 16) < 0.89


def test_a_prediction_is_what_the_pipeline_does(package: Package) -> None:
    size = package.pool.panel.panel_bytes
    counts = [np.full(16, 10)]
    made = profile(package, bytes_per_s=size / 2e-3)  # 2 ms to read a panel, 1 ms to compute it
    shape = made.shape(package)
    work = workload(package, shape, 16, counts, 512)
    assert work.compute_s == pytest.approx(1e-3 + 16e-3 + package.head_slices * 1e-3)
    found = predict(package, made, shape, work, group=1, banks=2, lanes=1, prefetch="before-routing")
    # Reading starts at once: 16 panels in 32 ms, the last one computed after that, then the head.
    assert found.ttft_s == pytest.approx(33e-3 + package.head_slices * 1e-3)
    assert found.wait_s == pytest.approx(33e-3 - 17e-3) and found.flash_s == pytest.approx(32e-3)
    later = predict(package, made, shape, work, group=1, banks=2, lanes=1, prefetch="after-routing")
    assert later.ttft_s == pytest.approx(found.ttft_s + 1e-3)


def test_the_solver_says_what_binds(package: Package) -> None:
    slow = solve(package, profile(package, bytes_per_s=1e8), 512)
    assert (
        slow.bound == "flash" and slow.advice.startswith("all experts in memory") and slow.prediction.bubble_rate > 0.5
    )
    fast = solve(package, profile(package, bytes_per_s=1e10), 512)
    assert fast.prediction.ttft_s < slow.prediction.ttft_s and fast.bound in ("compute", "dispatch")
    assert fast.peak_bytes >= fast.configuration.arena_bytes + (50 << 20)


def test_few_tokens_read_only_what_they_need(package: Package) -> None:
    """One token of 16 experts: whole layers would be twice what its 8 experts take."""
    plan = solve(package, profile(package, bytes_per_s=1e8), 1)
    assert plan.configuration.prefetch == "after-routing"
    assert plan.prediction.bytes_read == 8 * package.pool.panel.panel_bytes


def test_a_budget_that_is_too_small_is_refused_with_one_that_works(package: Package) -> None:
    made = profile(package)
    with pytest.raises(MemoryBudgetError, match=r"smallest budget that works is --memory \d+") as refused:
        solve(package, made, 512, memory=60 << 20)
    least = int(str(refused.value).split("--memory ")[1].split()[0])
    assert solve(package, made, 512, memory=least).peak_bytes <= least
    larger = solve(package, made, 512, memory=2 * least)
    assert larger.configuration.arena_bytes > solve(package, made, 512, memory=least).configuration.arena_bytes


def test_a_large_budget_pins_and_later_prefills_read_less(package: Package) -> None:
    made = profile(package, bytes_per_s=1e8)
    least = solve(package, made, 512, memory=400 << 20)
    assert least.configuration.pinned > 0 and least.peak_bytes <= 400 << 20
    pinned = least.configuration.pinned_bytes
    assert least.again.bytes_read == least.prediction.bytes_read - pinned
    saved = least.prediction.ttft_s - least.again.ttft_s
    assert saved == pytest.approx(min(pinned / 1e8, least.prediction.wait_s), rel=0.05)
    unlimited = solve(package, made, 512)
    assert unlimited.configuration.pinned == 0 and unlimited.again == unlimited.prediction


def test_reads_of_paged_dense_weights_share_the_flash(package: Package) -> None:
    made, counts = profile(package, bytes_per_s=1e8), [np.full(16, 10)]
    shape = made.shape(package)
    work = workload(package, shape, 16, counts, 512)
    alone, shared = (
        predict(package, made, shape, work, group=1, banks=2, lanes=1, prefetch="before-routing", paged_bytes=nbytes)
        for nbytes in (0, 10_000_000)
    )
    assert shared.flash_s == pytest.approx(alone.flash_s + 0.1) and shared.bytes_read == alone.bytes_read + 10_000_000
    assert shared.ttft_s == pytest.approx(alone.ttft_s + 0.1, rel=0.02)


def test_plan_prints_and_draws(package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile(package).write(tmp_path / "p.json")
    arguments = ["plan", str(package.path), "--tokens", "128", "--profile", str(tmp_path / "p.json")]
    assert main([*arguments, "--plot", str(tmp_path / "t.svg"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["foreign"][0] == "processor p"
    assert {"configuration", "ttft_s", "bubble_rate", "peak_bytes", "bound", "advice"} <= set(said)
    picture = (tmp_path / "t.svg").read_text()
    assert picture.startswith("<svg") and "128 tokens, predicted" in picture and picture.count("<rect") > 5
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("flash    |") and lines[-1].startswith("experts  |") and len(lines[-1]) == 83
    assert main([*arguments, "--memory", "1MiB"]) == 2 or "smallest budget" in capsys.readouterr().err


def test_about_equal_groups_are_those_of_the_usual_size(package: Package) -> None:
    """Where neither flash nor dispatches tell groups apart, two huge banks would only fill later."""
    found = solve(package, profile(package, bytes_per_s=1e12), 512).configuration
    sizes = [one.bank_bytes for one in configurations(package.pool, found.arena_bytes, 1)]
    assert found.bank_bytes == min(sizes, key=lambda size: abs(math.log(size / GROUP_BYTES)))


def test_small_reads_are_no_faster_than_measured_ones(package: Package) -> None:
    noisy = (Rate(1 << 20, 1, 2e9), Rate(4 << 20, 1, 1e9))  # the line through the two is below 0 at half a MiB
    made = replace(profile(package), rates=noisy)
    assert made.bytes_per_s(1 << 19, 1) == pytest.approx(2e9)
    assert made.bytes_per_s(2 << 20, 1) == pytest.approx(
        (2 << 20) / ((1 << 20) / 2e9 + ((4 << 20) / 1e9 - (1 << 20) / 2e9) / 3)
    )
    assert solve(package, made, 16).prediction.ttft_s > 0
