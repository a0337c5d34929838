"""The comparison script: what is measured in which order, what is kept, and the tables. Nothing is timed here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from estream.cli import bench_child
from estream.cli.bench_child import Job, run_apart
from scripts import bench_strategies
from scripts.bench.strategy_table import markdown, simulated

TEXT = [5, 4, 3]


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
        if job.window is not None:
            return {"quality": {"perplexity": 41.5, "predicted": 255, "tokens": 256}}
        if job.options["strategy"] == "per-expert-graph":
            return {"refused": "240 contexts are too many", "usage": True}
        if job.options["strategy"] == "padded" and len(measured) < 4:
            return {"failed": "the process was killed by SIGKILL"}
        return stats(float(len(measured)))

    package = SimpleNamespace(architecture=SimpleNamespace(vocab=10))
    letters = SimpleNamespace(encode=lambda text: TEXT)
    monkeypatch.setattr(bench_strategies, "Package", SimpleNamespace(open=lambda path: package))
    monkeypatch.setattr(bench_strategies, "Tokenizer", SimpleNamespace(open=lambda path: letters))
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
    order = [(job.options["strategy"], len(job.ids)) for job in found[:6]]
    assert order == [
        ("estream", 8),
        ("padded", 8),
        ("resident", 8),
        ("padded", 8),
        ("resident", 8),
        ("estream", 8),
    ]
    derived, other = str(packages[0]), str(packages[1])
    windows = [(job.package, job.window, job.ids) for job in found if job.window is not None]
    assert windows == [(derived, 99, TEXT)] * 3, "of the package with a tokenizer only"
    prompts = {(job.package, *job.ids) for job in found if job.window is None and len(job.ids) == 8}
    assert prompts == {(derived, 5, 4, 3, 5, 4, 3, 5, 4), (other, 8, 6, 5, 2, 3, 0, 0, 0)}
    common = {"backend": "cpu", "pinned": 0, "threads": None}
    assert found[0].options == common | {"memory": 1 << 30, "strategy": "estream"}
    assert found[1].options == common | {"memory": 1 << 30, "group": 4, "strategy": "padded"}
    assert found[2].options == common | {"memory": None, "strategy": "resident"}


def test_fewer_rounds_and_a_short_first_prefill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: list[Path]
) -> None:
    options = ("--strategies", "estream,padded,on-demand", "--tokens", "8", "--rounds", "3", "--first", "2")
    found = run(monkeypatch, tmp_path, packages[1:], *options, "--only", "padded:1", "--only", "on-demand:0")
    assert [job.options["strategy"] for job in found] == ["estream", "padded", "estream", "estream"]
    assert {job.first for job in found} == {2}
    assert len(run(monkeypatch, tmp_path, packages[1:], *options[:-2], "--only", "on-demand:0")) == 6, "not the same"
    for text in ("padded", "padded:", ":1", "padded:x"):
        with pytest.raises(SystemExit, match="STRATEGY:ROUNDS"):
            bench_strategies._only([text])


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
        "| strategy | tokens | TTFT | least to most | / estream | bubble | rows computed / useful | tokens dropped | "
        "peak memory | perplexity |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| estream | 8 | 6.00 s | 1.00 s to 8.00 s (3) | 1.000 | 0.600 | 1.250 | 12.50% | 512 MiB | "
        "41.500 (255 tokens) |",
        "| padded | 8 | 6.50 s | 4.00 s to 9.00 s (2) | 0.896 | 0.650 | 1.250 | 12.50% | 512 MiB | "
        "41.500 (255 tokens) |",
        "| per-expert-graph | 8 | refused | " + " | ".join(["not measured"] * 7) + " |",
        "",
        "padded, failed: the process was killed by SIGKILL",
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
        f"| estream | 8 | 2.00 s | 2.00 s to 2.00 s (1) | 1.000 | {unknown} | {unknown} | {unknown} | 512 MiB "
        f"| {unknown} |"
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
        f"| on-demand | 1024 | 750 ms | simulated | 1.500 | 0.090 | {unknown} | {unknown} | {unknown} | {unknown} |"
    )
    path.write_text(json.dumps([one | {"simulated": False}]))
    with pytest.raises(SystemExit, match="not of estream simulate"):
        simulated(path)


def test_what_is_no_answer_to_the_call_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "absent.estream" in run_apart(Job(str(tmp_path / "absent.estream"), [1, 2]))["failed"]
    assert run_apart(Job(str(tmp_path), [1, 2], {"wrong": 1}))["failed"].startswith("status 1: TypeError: ")
    assert run_apart(Job(str(tmp_path), [1], window=2))["failed"].startswith("the text is too short")
    assert run_apart(Job(str(tmp_path), [1, 2], window=1)) == {
        "refused": "a window needs 2 tokens at least (asked 1). Give --tokens of 2 or more",
        "usage": True,
    }
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr(bench_child, "_CHILD", ("-c", "kill -9 $$"))
    assert run_apart(Job(str(tmp_path), [1]))["failed"] == "the process was killed by SIGKILL"


@pytest.mark.parametrize("text", ["padded", "padded:group", "padded=4", ":"])
def test_options_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(SystemExit, match="STRATEGY:NAME=VALUE"):
        bench_strategies._given([text])
