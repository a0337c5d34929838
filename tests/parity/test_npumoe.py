"""npumoe on target cpu: exact where nothing is dropped, what it drops, paging, and calibration by the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from estream import Engine
from estream.calibrate.experts import measure_loads, text_windows
from estream.cli.main import main
from estream.errors import UsageError
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt
from tests.support.tiny_packages import OLMOE, QWEN2_MOE, write_checkpoint

LENGTHS = (1, 3, 40, 600)


def calibrated(package: Path, tokens: int = 1000, window: int = 64, vocab: int = 96) -> Path:
    with Engine(package, threads=1, max_tokens=window) as engine:
        loads = measure_loads(engine, text_windows(np.array(prompt(tokens, vocab, seed=9)), None, window, 0), 0)
    file = package.with_suffix(".json")
    loads.write(file)
    return file


def opened(package: Path, file: Path, paging: dict[str, Any] | None = None, **options: Any) -> Engine:
    npumoe = {"calibration": str(file), **options}
    return Engine(package, threads=1, strategy="npumoe", npumoe=npumoe, max_tokens=600, **(paging or {}))


def distance(one: Any, other: Any) -> float:
    return float(np.abs(one.logits - other.logits).max() / np.ptp(other.logits))


@pytest.mark.parametrize(
    ("family", "experts", "panel"),
    [
        ("olmoe", "f32", None),
        ("qwen2_moe", "f32", 32),
        ("olmoe", "int8", 32),
        ("qwen2_moe", "int8", 32),
        ("gpt_oss", "f16", None),
    ],
)
def test_unlimited_is_exact(tmp_path: Path, family: str, experts: str, panel: int | None) -> None:
    package, _ = packed(tmp_path, family, experts=experts, panel=panel)
    file = calibrated(package)
    with Engine(package, threads=1, max_tokens=600) as engine:
        expected = [engine.prefill(prompt(length, seed=length), logits="all") for length in LENGTHS]
    for options in ({}, {"group_experts": 1}, {"cold_below": 0.4}, {"cold_below": 1.0}, {"capacity_quantile": None}):
        with opened(package, file, unlimited=True, **options) as engine:
            for length, own in zip(LENGTHS, expected, strict=True):
                one = engine.prefill(prompt(length, seed=length), logits="all")
                assert distance(one, own) <= 1e-5
                assert one.stats.dropped_rate == 0.0 and one.stats.rows_useful == own.stats.rows_useful
                told = one.configuration
                assert (told["cold_experts"] > 0) == ("cold_below" in options)
                assert (told["cold_pairs"] > 0) == ("cold_below" in options) or length < 40
                if options.get("cold_below") == 1.0:
                    assert told["tier_rows"] == [] and told["groups"] == 0
                    assert one.stats.rows_computed == own.stats.rows_computed or length < 40


def test_capacities_drop_a_counted_share(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe")
    file = calibrated(package)
    ids = prompt(600, seed=600)
    with Engine(package, threads=1, max_tokens=600) as engine:
        pool, top_k = engine.package.pool, engine.package.architecture.top_k
        counts = np.zeros((2, pool.experts), np.int64)

        def count(layer: int, graph: str, rows: Any, arrays: Any, panel: int | None = None) -> None:
            if graph == "expert":
                counts[layer, panel] += len(rows)

        exact = engine.prefill(ids, logits="all", observe=count)
    routed, rates, errors = counts.copy(), [], []
    for quantile in (1.0, 0.5, 0.0):
        counts[:] = 0
        with opened(package, file, capacity_quantile=quantile) as engine:
            one = engine.prefill(ids, logits="all", observe=count)
            again = engine.prefill(ids, logits="all")
        assert np.array_equal(one.logits, again.logits)
        told = one.configuration
        rates.append(one.stats.dropped_rate)
        errors.append(distance(one, exact))
        assert one.stats.dropped_rate == pytest.approx(1 - counts.sum() / (2 * 600 * top_k), abs=1e-12)
        # The first layer's routes are those of the exact run.
        raw = json.loads(file.read_text())
        of_need = [np.interp(quantile, raw["quantiles"], expert) for expert in raw["layers"]["0"]["quantiles"]]
        sizes = list(zip(told["tier_rows"], told["capacities"], strict=True))
        capacity = [next(rows for size, rows in sizes if size >= need) for need in of_need]
        assert counts[0].tolist() == np.minimum(routed[0], capacity).tolist()
        assert one.stats.rows_computed >= one.stats.rows_useful == counts.sum()
    print([(f"{rate:.3f}", f"{error:.2g}") for rate, error in zip(rates, errors, strict=True)])
    assert rates == sorted(rates) and rates[0] < rates[-1] and rates[-1] > 0.1
    assert errors[-1] > 1e-3


def test_paging_changes_no_byte(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "qwen2_moe", experts="int8", panel=32)
    file = calibrated(package)
    for options in ({"capacity_quantile": 0.5, "cold_below": 0.4}, {"unlimited": True, "cold_below": 0.4}):
        answers = []
        for paging in (
            {"resident": "all"},
            {"group": 1, "banks": 1, "prefetch": "on-demand"},
            {"group": 3, "banks": 2, "lanes": 2},
            {"group": 2, "banks": 2, "pinned": 1},
        ):
            with opened(package, file, paging, **options) as engine:
                for length in (3, 200):
                    engine.prefill(prompt(length, seed=1))
                    answers.append((length, engine.prefill(prompt(length, seed=length), logits="all").logits))
        for length, logits in answers[2:]:
            assert np.array_equal(logits, answers[0 if length == 3 else 1][1]), (options, length)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two packages with tokenizers of 50 words."""
    made = []
    for name, config in (("a", QWEN2_MOE), ("b", OLMOE)):
        folder = tmp_path_factory.mktemp(name)
        write_checkpoint(folder / "checkpoint", config)
        tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(50)}, unk_token="w0"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        tokenizer.save(str(folder / "checkpoint" / "tokenizer.json"))
        made.append(folder / f"{name}.estream")
        assert main(["pack", str(folder / "checkpoint"), str(made[-1]), "-q"]) == 0
    yield made[0], made[1]


def test_calibrating_twice_gives_the_same_bytes(packages: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    first, other = packages
    text = tmp_path / "text.txt"
    words = np.random.default_rng(0).integers(0, 50, 500)
    text.write_text(" ".join(f"w{word}" for word in words))
    call = ["calibrate-experts", str(first), "--text", str(text), "--tokens", "200", "--window", "32", "--threads", "1"]
    outs = [tmp_path / f"{number}.json" for number in range(3)]
    for out, seed in zip(outs, ("1", "1", "2"), strict=True):
        assert main([*call, "--seed", seed, "--out", str(out), "-q"]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes() != outs[2].read_bytes()
    capsys.readouterr()
    assert main([*call, "--out", str(outs[2]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("calibration") == str(outs[2]) and told == json.loads(outs[2].read_text())
    assert (told["tokens"], told["window"], told["package"]["name"]) == (192, 32, "a.estream")
    for layer in told["layers"].values():  # two experts for each token
        assert sum(layer["mean"]) == pytest.approx(64) and sum(layer["popularity"]) == pytest.approx(2)
    run = ["prefill", str(first), "--ids", "1 2 3 4 5", "--strategy", "npumoe", "--calibration", str(outs[0]), "--json"]
    assert main([*run, "--capacity-quantile", "0", "--tiers", "2", "--group-experts", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["configuration"]["capacity"] == 0 and len(answer["configuration"]["tier_rows"]) <= 2
    assert answer["stats"]["dropped_rate"] > 0
    # Another package.
    assert main(["prefill", str(other), *run[2:]]) == 2
    said = capsys.readouterr().err
    assert "another package" in said and "a.estream" in said and "b.estream" in said
    with pytest.raises(UsageError, match="another package"):
        Engine(other, strategy="npumoe", npumoe={"calibration": str(outs[0])})
    # And side by side.
    bench = ["bench", str(first), "--strategy", "estream,npumoe", "--tokens", "20", "--rounds", "1", "--threads", "1"]
    assert main([*bench, "--calibration", str(outs[0]), "--capacity-quantile", "0.5", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["exact"] for cell in cells] == [True, False] and cells[1]["median"]["dropped_rate"] > 0
    assert main(["bench", str(first), "--tokens", "8", "--calibration", str(outs[0])]) == 2
    assert main([*run[:-3], "--tiers", "3"]) == 2


def test_wrong_calls(packages: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert main(["calibrate-experts", str(packages[0]), "--text", str(empty), "--out", str(tmp_path / "o.json")]) == 2
    assert "a calibration needs 2 tokens at least (had 0)" in capsys.readouterr().err
    assert main(["calibrate-experts", str(packages[0]), "--text", str(empty), "--out", str(packages[0] / "o")]) == 2
    assert not (tmp_path / "o.json").exists()


def test_a_text_of_less_than_a_window(packages: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    ids, out = tmp_path / "ids.txt", tmp_path / "o.json"
    call = ["calibrate-experts", str(packages[0]), "--ids-file", str(ids), "--out", str(out), "--threads", "1"]
    ids.write_text("7")
    assert main(call) == 2 and not out.exists()
    capsys.readouterr()
    ids.write_text("7 8")
    assert main(call) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == f"{out}: 2 tokens in 1 window"
    assert "warning: the text has 2 tokens, less than a window of 64" in told.err
    assert main([*call, "--window", "2"]) == 0
    assert "less than a window" not in capsys.readouterr().err


def test_a_damaged_calibration_is_refused_before_anything_runs(
    packages: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "o.json"
    run = ["prefill", str(packages[0]), "--ids", "1 2 3", "--strategy", "npumoe", "--calibration", str(file)]
    assert main(run) == 1
    assert capsys.readouterr().err == f"estream: error: {file}: No such file or directory\n"
    raw = json.loads(calibrated(packages[0], 100, 32, 50).read_text())
    missing = list(raw["layers"])[-1]
    del raw["layers"][missing]
    file.write_text(json.dumps(raw))
    assert main(run) == 2
    assert f"--calibration {file}: layer {missing} is missing. Measure again: " in capsys.readouterr().err
