"""npumoe without a run time: tiers, pruning, groups, the calibration file, options."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream.calibrate.experts import text_windows
from estream.cli.main import main
from estream.errors import UsageError
from estream.layers.htp.ladder import Dispatch
from estream.opening import Options
from estream.package.layout import PanelLayout, PoolLayout
from estream.package.reader import Package
from estream.routing import RouteTable
from estream.strategies import STRATEGIES, find_strategy
from estream.strategies.loads import ExpertLoads
from estream.strategies.npumoe_options import NpuMoeOptions
from estream.strategies.tiers import REACH, Tiers, fit_tiers, group_tiles, prune

POOL = PoolLayout(PanelLayout(32, 32, "f32"), 2, 4, (0, 2))


def padded(needs: list[int], tiers: tuple[int, ...]) -> int:
    return sum(min(size for size in tiers if size >= need) for need in needs)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 4))
def test_tiers_are_the_best_of_all_choices(needs: list[int], count: int) -> None:
    tiers = fit_tiers(np.array(needs), count)
    assert list(tiers) == sorted(set(tiers)) and len(tiers) <= count and tiers[-1] == max(needs)
    sizes = sorted(set(needs))
    choices = [
        choice
        for number in range(1, min(count, len(sizes)) + 1)
        for choice in itertools.combinations(sizes, number)
        if choice[-1] == sizes[-1]
    ]
    assert padded(needs, tiers) == min(padded(needs, choice) for choice in choices)


def test_no_expert_is_hot() -> None:
    assert fit_tiers(np.array([], np.int64), 4) == ()


@st.composite
def routed(draw: st.DrawFn) -> tuple[RouteTable, np.ndarray, np.ndarray]:
    """A table of up to 4 experts, saliencies with many ties, capacities with -1 among them."""
    experts = [sorted(draw(st.sets(st.integers(0, 9), max_size=8))) for _ in range(draw(st.integers(1, 4)))]
    rows = np.array([row for expert in experts for row in expert], np.int32)
    offsets = np.cumsum([0, *(len(expert) for expert in experts)])
    saliency = np.array(draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))), np.float32)
    capacity = np.array([draw(st.integers(-1, 6)) for _ in experts])
    return RouteTable(offsets, rows, np.arange(len(rows), dtype=np.float32)), saliency, capacity


@given(routed(), st.randoms())
def test_the_most_salient_rows_are_kept_whatever_their_order(
    case: tuple[RouteTable, np.ndarray, np.ndarray], random: Any
) -> None:
    table, saliency, capacity = case
    kept = prune(table, saliency, capacity)
    shuffled_rows, shuffled = table.rows.copy(), saliency.copy()
    for expert, most in enumerate(capacity):
        own = slice(int(table.offsets[expert]), int(table.offsets[expert + 1]))
        has = slice(int(kept.offsets[expert]), int(kept.offsets[expert + 1]))
        count = own.stop - own.start
        by_row = dict(zip(table.rows[own].tolist(), zip(saliency[own], table.gates[own], strict=True), strict=True))
        rows = kept.rows[has].tolist()
        assert len(rows) == (count if most < 0 else min(count, most)) and rows == sorted(rows)
        assert [by_row[row][1] for row in rows] == kept.gates[has].tolist()
        # None that went is more salient than one that stayed, or as salient and earlier.
        gone = [row for row in by_row if row not in rows]
        assert all((by_row[row][0], -row) > (by_row[other][0], -other) for row in rows for other in gone)
        order = list(range(own.start, own.stop))
        random.shuffle(order)
        shuffled_rows[own], shuffled[own] = table.rows[order], saliency[order]
    again = prune(RouteTable(table.offsets, shuffled_rows, table.gates), shuffled, capacity)
    for expert in range(len(capacity)):
        piece = slice(int(kept.offsets[expert]), int(kept.offsets[expert + 1]))
        assert sorted(again.rows[piece].tolist()) == kept.rows[piece].tolist()


def test_nothing_to_prune_is_the_table_itself() -> None:
    table = RouteTable(np.array([0, 2]), np.array([0, 1], np.int32), np.ones(2, np.float32))
    assert prune(table, np.ones(2, np.float32), np.array([2])) is table


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2), max_size=60))
def test_groups_hold_every_tile_once_and_wait_for_a_bounded_time(rungs: list[int]) -> None:
    slots = [4, 2, 1]
    found = group_tiles(((place, rung, slice(0, 1)) for place, rung in enumerate(rungs)), slots)
    places = [panel for dispatch in found for panel, _ in dispatch.tiles]
    assert sorted(places) == list(range(len(rungs)))
    for dispatch in found:
        own = [panel for panel, _ in dispatch.tiles]
        assert own == sorted(own) and len(own) <= slots[dispatch.rung] and own[-1] - own[0] < REACH * 4
        assert {rungs[panel] for panel in own} == {dispatch.rung}


def test_groups_are_full_where_tiles_are_alike() -> None:
    tiles = [(panel, 0, slice(0, 1)) for panel in range(5)]
    assert group_tiles(tiles, [2]) == [
        Dispatch(0, [(0, slice(0, 1)), (1, slice(0, 1))]),
        Dispatch(0, [(2, slice(0, 1)), (3, slice(0, 1))]),
        Dispatch(0, [(4, slice(0, 1))]),
    ]


def package(path: Path, content: str = "{}") -> Package:
    """As far as the file of loads looks at one."""
    path.mkdir(exist_ok=True)
    (path / "model.json").write_text(content)
    return cast(Package, SimpleNamespace(path=path, pool=POOL, architecture=SimpleNamespace(context=64)))


def loads(tmp_path: Path) -> ExpertLoads:
    counts = {0: np.array([[8, 2, 0, 6], [4, 3, 1, 8]]), 2: np.array([[1, 1, 7, 7], [1, 1, 7, 7]])}
    return ExpertLoads.measured(package(tmp_path / "a.estream"), np.zeros((2, 8), np.int64), 3, 8, counts)


def test_what_is_chosen_from_loads(tmp_path: Path) -> None:
    measured = loads(tmp_path)
    assert measured.tokens == 16 and measured.mean[0].tolist() == [6, 2.5, 0.5, 7]
    assert measured.popularity[2].tolist() == [0.125, 0.125, 0.875, 0.875]
    assert measured.load(0, 1.0).tolist() == [8, 3, 1, 8] and measured.load(0, 0.5).tolist() == [6, 2.5, 0.5, 7]
    tiers = Tiers.choose(measured, 2, 1.0, 0.1)
    assert tiers.rows == (3, 8) and tiers.of[0].tolist() == [1, 0, -1, 1] and tiers.of[2].tolist() == [0, 0, 1, 1]
    assert tiers.hot() == [3, 4] and tiers.cold() == 1
    assert tiers.capacities(8) == [3, 8] and tiers.capacities(3) == [2, 3] and tiers.capacities(1) == [1, 1]
    assert tiers.capacities(20) == [8, 20]
    nothing = Tiers.choose(measured, 2, 1.0, 1.0)
    assert nothing.rows == () and nothing.cold() == 8


def test_the_file_of_loads(tmp_path: Path) -> None:
    measured, file, own = loads(tmp_path), tmp_path / "loads.json", package(tmp_path / "a.estream")
    measured.write(file)
    text = file.read_bytes()
    read = ExpertLoads.read(file, own)
    assert read.to_dict() == measured.to_dict()
    read.write(file)
    assert file.read_bytes() == text
    raw = json.loads(text)
    assert (raw["format"], raw["version"]) == ("estream-experts", 1)
    other = package(tmp_path / "b.estream", '{"other": 1}')
    with pytest.raises(UsageError, match=r"loads\.json holds .*another package \(asked b\.estream.*had a\.estream"):
        ExpertLoads.read(file, other)


def within(layer: str, name: str, value: Any) -> Any:
    """A change of one list of a layer's loads."""
    return lambda raw: raw["layers"][layer].update({name: value})


TWO = [[1.0] * 11, [1.0] * 11]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "estream-profile"}, "its format is not estream-experts"),
        ({"version": 2}, "its version is 2, not 1"),
        ({"version": True}, "its version is True, not 1"),
        ({"window": 0}, "window must be a whole number of 1 to .*, not 0"),
        ({"window": True}, "window must be a whole number"),
        ({"window": 8.0}, "window must be a whole number"),
        ({"window": "8"}, "window must be a whole number"),
        ({"window": -8}, "window must be a whole number"),
        ({"tokens": 7}, "7 tokens are not whole windows of 8"),
        ({"tokens": 0}, "tokens must be a whole number"),
        ({"tokens": True}, "tokens must be a whole number"),
        ({"tokens": 1 << 60}, "tokens must be a whole number"),
        ({"tokens": 1280, "window": 128}, "its window of 128 tokens is beyond the model's context of 64"),
        ({"seed": -1}, "seed must be a whole number of 0 to"),
        ({"quantiles": [0.5]}, "its quantiles are other ones"),
        ({"package": None}, "package must be an object, not None"),
        ({"package": {"name": "a"}}, "model_sha256 must be a text and is missing"),
        ({"text_sha256": 1}, "text_sha256 must be a text, not 1"),
        ({"layers": []}, r"layers must be an object, not \[\]"),
        (lambda raw: raw.pop("tokens"), "tokens must be a whole number of 1 to .* and is missing"),
        (lambda raw: raw.pop("layers"), "layers must be an object and is missing"),
        (lambda raw: raw["layers"].pop("2"), "layer 2 is missing"),
        (lambda raw: raw["layers"].update({"7": raw["layers"]["0"]}), "layer 7 is no MoE layer of the package"),
        (lambda raw: raw["layers"].update({"00": raw["layers"]["0"]}), "'00' is no number of a layer"),
        (lambda raw: raw["layers"].update({"2": None}), "2 must be an object, not None"),
        (within("0", "mean", [1.0, 1.0]), "layer 0: mean, quantiles and popularity are of different numbers"),
        (within("0", "mean", [1.0, 1.0, 1.0, 8.5]), "layer 0: mean must be a list of numbers from 0 to 8"),
        (within("2", "mean", [1.0, 1.0, 1.0, True]), "layer 2: mean must be a list of numbers"),
        (within("2", "mean", [1.0, 1.0, 1.0, "1"]), "layer 2: mean must be a list of numbers"),
        (within("2", "mean", [1.0, 1.0, 1.0, float("nan")]), "layer 2: mean must be a list of numbers"),
        (within("2", "mean", None), "layer 2: mean must be a list of numbers"),
        (within("2", "popularity", [0.5, 0.5, 0.5, 1.5]), "layer 2: popularity must be a list of numbers from 0 to 1"),
        (within("2", "popularity", [0.5, 0.5, 0.5, False]), "layer 2: popularity must be a list of numbers"),
        (within("2", "popularity", [0.5, 0.5, 0.5, -0.1]), "layer 2: popularity must be a list of numbers"),
        (within("0", "quantiles", 1), "layer 0: quantiles must be a list for each expert"),
        (within("0", "quantiles", [[1.0]] * 4), "layer 0: quantiles must be 11 for each expert"),
        (within("0", "quantiles", [[9.0] * 11] * 4), "layer 0: quantiles must be a list of numbers from 0 to 8"),
        (within("0", "quantiles", [[2.0] + [1.0] * 10] * 4), "layer 0: quantiles must not fall"),
        (
            lambda raw: raw["layers"].update({"0": {"mean": [1, 1], "quantiles": TWO, "popularity": [1, 1]}}),
            "layer 0 has 2 experts, in the package 4",
        ),
    ],
)
def test_damaged_files_are_refused_when_they_are_read(tmp_path: Path, change: Any, said: str) -> None:
    file, raw = tmp_path / "loads.json", loads(tmp_path).to_dict()
    if callable(change):
        change(raw)
    else:
        raw |= change
    file.write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=rf"^--calibration .*loads\.json: .*{said}.*\. Measure again: ") as refused:
        ExpertLoads.read(file, package(tmp_path / "a.estream"))
    assert refused.value.exit_status == 2


def test_files_that_are_none(tmp_path: Path) -> None:
    file, own = tmp_path / "loads.json", package(tmp_path / "a.estream")
    with pytest.raises(FileNotFoundError):
        ExpertLoads.read(file, own)
    for content, said in (
        (b"[" * 100_000, "nested too deeply"),
        (b"[1", "not valid JSON: .* in line 1, column 3"),
        (b'{"a": "\xff"}', "not UTF-8 text"),
        (b"[" + b"1" * 5000 + b"]", "a number of too many digits"),
        (b"[]", "its format is not estream-experts"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=rf"^--calibration .*loads\.json: .*{said}"):
            ExpertLoads.read(file, own)


def test_windows() -> None:
    ids = np.arange(22)
    assert text_windows(ids, None, 5, 0).tolist() == ids[:20].reshape(4, 5).tolist()
    assert text_windows(ids, None, 50, 0).tolist() == [ids.tolist()]
    few = text_windows(ids, 12, 5, 7)
    assert few.shape == (2, 5) and few.tolist() == text_windows(ids, 12, 5, 7).tolist()
    assert len({str(text_windows(ids, 12, 5, seed).tolist()) for seed in range(20)}) > 1
    with pytest.raises(UsageError, match="less than a window"):
        text_windows(ids, 4, 5, 0)
    with pytest.raises(UsageError, match=r"2 tokens at least .had 0"):
        text_windows(ids[:0], None, 5, 0)
    for short, tokens in ((ids[:1], None), (ids, 1)):
        with pytest.raises(UsageError, match=r"2 tokens at least .had 1"):
            text_windows(short, tokens, 1, 0)


def test_the_strategy_and_its_option_need_each_other() -> None:
    assert not STRATEGIES["npumoe"].exact
    chosen = Options(strategy="npumoe", npumoe={"calibration": "f"})
    assert chosen.settled(find_strategy("npumoe"), POOL) == chosen
    with pytest.raises(UsageError, match="--strategy npumoe needs --calibration"):
        Options(strategy="npumoe").settled(find_strategy("npumoe"), POOL)
    with pytest.raises(UsageError, match=r"--calibration is of --strategy npumoe \(asked --strategy padded"):
        Options(strategy="padded", npumoe={"calibration": "f"}).settled(find_strategy("padded"), POOL)


@pytest.mark.parametrize(
    ("given_options", "said"),
    [
        ({}, "no calibration"),
        ({"calibration": 1}, "--calibration must be the name of a file"),
        ({"calibration": "f", "tier": 2}, "unknown option tier"),
        ({"calibration": "f", "tiers": 0}, "--tiers must be"),
        ({"calibration": "f", "tiers": True}, "--tiers must be"),
        ({"calibration": "f", "group_experts": 65}, "--group-experts must be"),
        ({"calibration": "f", "capacity_quantile": 1.5}, "--capacity-quantile must be"),
        ({"calibration": "f", "cold_below": float("nan")}, "--cold-below must be"),
        ({"calibration": "f", "capacity_quantile": 0.9, "unlimited": True}, "exclude each other"),
    ],
)
def test_options_that_cannot_be_meant(given_options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        NpuMoeOptions.of(given_options)


def test_the_command_line_checks(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["prefill", "x.estream", "--ids", "1", "--strategy", "npumoe"]
    for arguments, said in (
        (["--capacity-quantile", "2"], "not a number from 0 to 1"),
        (["--capacity", "some"], "invalid choice"),
        (["--capacity", "unlimited", "--capacity-quantile", "0.5"], "not allowed with"),
        (["--cold-below", "x"], "not a number from 0 to 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*call, *arguments])
        assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("command", [["prefill", "x.estream", "--ids", "1"], ["bench", "x.estream", "--tokens", "8"]])
def test_its_options_are_its_own(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the strategy that comes first, and not what the options need."""
    arch = SimpleNamespace(context=64, vocab=10)
    opened = SimpleNamespace(architecture=arch, check_unchanged=lambda: None)
    monkeypatch.setattr("estream.package.reader.Package", SimpleNamespace(open=lambda path: opened))
    for option in (["--cold-below", "0.1"], ["--tiers", "3"], ["--capacity", "unlimited"], ["--calibration", "f"]):
        assert main([*command, *option]) == 2
        assert f"{option[0]} is of --strategy npumoe (asked --strategy estream" in capsys.readouterr().err
    assert main([*command, "--strategy", "npumoe", "--tiers", "3"]) == 2
    assert "--strategy npumoe needs --calibration" in capsys.readouterr().err


def test_bench_reads_the_calibration_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, file = package(tmp_path / "a.estream"), tmp_path / "loads.json"
    monkeypatch.setattr("estream.package.reader.Package", SimpleNamespace(open=lambda path: own))
    monkeypatch.setattr("estream.cli.bench.run_apart", lambda *job: pytest.fail("measured"))
    call = ["bench", str(own.path), "--tokens", "8", "--strategy", "estream,npumoe"]
    assert main([*call, "--calibration", str(file)]) == 1
    assert capsys.readouterr().err == f"estream: error: {file}: No such file or directory\n"
    loads(tmp_path).write(file)
    assert main([*call, "--calibration", str(file), "--tiers", "65"]) == 2
    package(own.path, '{"other": 1}')
    assert main([*call, "--calibration", str(file)]) == 2
    assert "another package" in capsys.readouterr().err
