"""The comparison script: what is measured in which order, what is kept, and the tables. Nothing is timed here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_strategies
from scripts.bench import one_run
from scripts.bench.one_run import Job
from scripts.bench.strategy_table import markdown, simulated


def stats(ttft_s: float, **more: Any) -> dict[str, Any]:
    figures = {"ttft_s": ttft_s, "bubble_rate": ttft_s / 10, "rows_computed": 30, "rows_useful": 24}
    return {"stats": figures | {"memory": {"peak_bytes": 1 << 29}, "dropped_rate": 0.125} | more, "configuration": {}}


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    """One with a tokenizer, one without."""
    found = [tmp_path / "derived.estream", tmp_path / "random.estream"]
    for package in found:
        package.mkdir()
        (package / "model.json").write_text(package.name)
    (found[0] / "tokenizer.json").write_text("{}")
    return found


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, packages: list[Path], *options: str) -> list[Job]:
    """Runs the script with `answers` in the place of measuring; the jobs that were measured."""
    measured: list[Job] = []

    def run_apart(job: Job, enter: object) -> dict[str, Any]:
        measured.append(job)
        if job.kind == "perplexity":
            return {"quality": {"perplexity": 41.5, "predicted": 255, "tokens": 256}}
        strategy = job.options.get("strategy", "estream")
        if strategy == "per-expert-graph":
            return {"refused": "240 contexts are too many"}
        if strategy == "padded" and len(measured) < 4:
            return {"failed": "status -9: said nothing"}
        return stats(float(len(measured)))

    monkeypatch.setattr(bench_strategies, "run_apart", run_apart)
    command = ["bench", *map(str, packages), "--out", str(folder / "out.jsonl"), "--memory", "1GiB", *options]
    monkeypatch.setattr(sys, "argv", command)
    bench_strategies.main()
    return measured


def test_strategies_are_interleaved_and_each_round_begins_with_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: list[Path]
) -> None:
    options = ("--strategies", "estream,padded,resident", "--tokens", "8,16", "--rounds", "2", "--window", "99")
    found = run(monkeypatch, tmp_path, packages, *options, "--with", "padded:group=4")
    order = [(job.options.get("strategy", "estream"), job.tokens) for job in found[:6]]
    assert order == [
        ("estream", 8),
        ("padded", 8),
        ("resident", 8),
        ("padded", 8),
        ("resident", 8),
        ("estream", 8),
    ]
    assert [job.kind for job in found].count("perplexity") == 3, "of the package with a tokenizer only"
    assert {job.tokens for job in found if job.kind == "perplexity"} == {99}
    assert {(Path(job.package).name, job.text and Path(job.text).name) for job in found} == {
        ("derived.estream", "evaluation.txt"),
        ("random.estream", None),
    }
    common = {"backend": "cpu", "pinned": 0, "threads": None}
    assert found[0].options == common | {"memory": 1 << 30}
    assert found[1].options == common | {"memory": 1 << 30, "group": 4, "strategy": "padded"}
    assert found[2].options == common | {"memory": None, "strategy": "resident"}


def test_what_is_there_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--strategies", "estream,padded,per-expert-graph", "--tokens", "8", "--rounds", "3")
    first = run(monkeypatch, tmp_path, packages[:1], *options)
    assert len(first) == 3 * 3 + 3
    table = capsys.readouterr().out
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"kind": "pre')  # killed in the middle of a line
    again = run(monkeypatch, tmp_path, packages[:1], *options)
    assert [job.options["strategy"] for job in again] == ["padded"], "failures are tried again, refusals are answers"
    assert all(json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert table.splitlines() == [
        "derived.estream, target cpu, measured; 1.00 GiB each, but for those with another budget; reads unlimited; "
        "prompts: evaluation.txt; up to 3 rounds, fresh processes",
        "",
        "| strategy | tokens | TTFT | least to most | bubble | rows computed / useful | tokens dropped | peak memory | "
        "perplexity |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| estream | 8 | 6.00 s | 1.00 s to 8.00 s (3) | 0.600 | 1.250 | 12.50% | 512 MiB | 41.500 (255 tokens) |",
        "| padded | 8 | 6.50 s | 4.00 s to 9.00 s (2) | 0.650 | 1.250 | 12.50% | 512 MiB | 41.500 (255 tokens) |",
        "| per-expert-graph | 8 | refused | " + " | ".join(["not measured"] * 6) + " |",
        "",
        "padded, failed: status -9: said nothing",
        "per-expert-graph, refused: 240 contexts are too many",
    ]
    (packages[0] / "model.json").write_text("packed again")
    assert len(run(monkeypatch, tmp_path, packages[:1], *options)) == 12


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    line = {
        "kind": "prefill",
        "package": "x.estream",
        "model": "0",
        "strategy": "estream",
        "tokens": 8,
        "round": 0,
        "text": None,
        "read_limit": "800MB",
        "options": {"backend": "cpu", "memory": None},
        **stats(2.0, dropped_rate=None, bubble_rate=None, rows_useful=None),
    }
    title, _, _, _, row = markdown([line], []).splitlines()
    assert "no budget; reads limited to 800MB/s; prompts: random tokens" in title
    unknown = "not measured"
    assert row == (
        f"| estream | 8 | 2.00 s | 2.00 s to 2.00 s (1) | {unknown} | {unknown} | {unknown} | 512 MiB | {unknown} |"
    )


def test_simulations_join_and_say_that_they_are(tmp_path: Path) -> None:
    path = tmp_path / "simulated.json"
    one = {"simulated": True, "package": "olmoe", "tokens": 1024, "memory": 1 << 30, "ttft_s": 0.5, "bubble_rate": 0.09}
    other = one | {"ttft_s": 0.75, "machine": {"name": "phone", "strategy": "on-demand"}}
    one["machine"] = {"name": "phone", "strategy": "estream"}
    path.write_text(json.dumps(one, indent=2) + "\n" + json.dumps([other]) + "\n")
    text = markdown([], simulated(path))
    unknown = "not measured"
    assert (
        text.splitlines()[0] == "olmoe, target htp, simulated: phone; 1.00 GiB each, but for those with another budget"
    )
    assert text.splitlines()[-1] == (
        f"| on-demand | 1024 | 750 ms | simulated | 0.090 | {unknown} | {unknown} | {unknown} | {unknown} |"
    )
    path.write_text(json.dumps([one | {"simulated": False}]))
    with pytest.raises(SystemExit, match="not of estream simulate"):
        simulated(path)


def test_a_refusal_is_a_result_and_a_crash_a_failure(tmp_path: Path) -> None:
    job = Job("prefill", str(tmp_path / "absent.estream"), 4, None)
    assert "absent.estream" in one_run.run_apart(job)["refused"]
    assert one_run.run_apart(Job("perplexity", str(tmp_path), 4, None))["failed"] == "status 1: AssertionError"


@pytest.mark.parametrize("text", ["padded", "padded:group", "padded=4", ":"])
def test_options_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(SystemExit, match="STRATEGY:NAME=VALUE"):
        bench_strategies._given([text])
