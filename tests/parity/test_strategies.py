"""Strategies on target cpu: the same bytes, the same within rounding, and what the results say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream import Engine
from estream.cli.bench_child import Job, run_apart
from estream.cli.main import main
from estream.errors import UsageError
from estream.quality import perplexity, split_windows
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

SAME = ("resident", "on-demand", "layer-streaming", "cpu-only")
LENGTHS = (1, 3, 40, 600)


def answers(package: Path, name: str, **options: Any) -> list[Any]:
    with Engine(package, threads=1, strategy=name, max_tokens=600, **options) as engine:
        assert engine.configuration["strategy"] == name
        return [engine.prefill(prompt(length, seed=length), logits="all") for length in LENGTHS]


@pytest.mark.parametrize(("experts", "panel"), [("f32", None), ("int8", 32)])
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe"])
def test_the_same_bytes(tmp_path: Path, family: str, experts: str, panel: int | None) -> None:
    package, _ = packed(tmp_path, family, experts=experts, panel=panel)
    expected = answers(package, "estream")
    for name in SAME:
        for one, own in zip(answers(package, name), expected, strict=True):
            assert np.array_equal(one.logits, own.logits), name
            assert one.stats.dropped_rate == own.stats.dropped_rate == 0.0
            assert one.stats.rows_computed == own.stats.rows_computed
            assert name != "resident" or one.stats.bytes_read == 0


def test_groups_are_layers_and_experts(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe")
    with Engine(package, threads=1, strategy="layer-streaming") as engine:
        pool = engine.package.pool
        assert engine.configuration["arena_bytes"] == 2 * pool.layer_bytes
        assert (engine.configuration["group"], engine.configuration["banks"]) == (pool.panels_per_layer, 2)
        stats = engine.prefill(prompt(600)).stats
        assert (stats.bytes_read, stats.groups_skipped) == (pool.pool_bytes, 0)
    with Engine(package, threads=1, strategy="on-demand") as engine:
        needed = len(pool.moe_layers) * engine.package.architecture.top_k
        assert engine.prefill(prompt(1)).stats.bytes_read == needed * pool.record_bytes


@pytest.mark.parametrize("experts", ["f32", "int8"])
def test_padded(tmp_path: Path, experts: str) -> None:
    package, _ = packed(tmp_path, "qwen2_moe", experts=experts, panel=32, moe_intermediate_size=40)
    for length, one, own in zip(LENGTHS, answers(package, "padded"), answers(package, "estream"), strict=True):
        distance = np.abs(one.logits - own.logits).max() / np.ptp(own.logits)
        print(f"{experts}, {length} tokens: {distance:.2g} of the range")
        assert distance <= 1e-5
        assert one.stats.rows_useful == own.stats.rows_useful and one.stats.dropped_rate == 0.0
        rows = max(length, 1 if experts == "int8" else 2)
        assert one.stats.rows_computed == rows * sum(panels_of(package))


def panels_of(package: Path) -> tuple[int, int]:
    """Routed panels of all layers, and panels of shared experts and dense FFNs."""
    from estream.package.reader import Package

    opened = Package.open(package)
    records = sum(tensor.panels for tensor in opened.dense.values())
    return len(opened.pool.moe_layers) * opened.pool.panels_per_layer, records


@pytest.mark.parametrize(
    ("family", "experts", "wide"),
    [("olmoe", "f32", 80), ("qwen2_moe", "f32", 24), ("olmoe", "int8", 24), ("gpt_oss", "f16", 24)],
)
def test_a_graph_for_each_expert(tmp_path: Path, family: str, experts: str, wide: int) -> None:
    few = {"num_experts": 4, "num_experts_per_tok": 2}  # in two layers: as many as a phone holds contexts
    few |= {"num_local_experts": 4} if family == "gpt_oss" else {}
    few["moe_intermediate_size" if family == "qwen2_moe" else "intermediate_size"] = wide
    package, _ = packed(tmp_path, family, experts=experts, panel=32, **few)
    found = answers(package, "per-expert-graph", verify_reads=True, memory="2GiB")
    expected = answers(package, "estream")
    for length, one, own in zip(LENGTHS, found, expected, strict=True):
        distance = np.abs(one.logits - own.logits).max() / np.ptp(own.logits)
        print(f"{family} {experts}, {length} tokens: {distance:.2g} of the range")
        assert distance <= 1e-5
        assert one.configuration["expert_graphs"] == 8
        assert one.stats.rows_useful == own.stats.rows_useful and one.stats.bytes_read == 0
        assert one.stats.dropped_rate == 0.0


def test_refusals_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, _ = packed(tmp_path, "olmoe")
    call = ["prefill", str(package), "--ids", "1 2 3"]
    assert main([*call, "--strategy", "per-expert-graph"]) == 2
    assert "asked 16 contexts, had a limit of 8" in capsys.readouterr().err
    assert main([*call, "--strategy", "layer-streaming", "--group", "1"]) == 2
    assert "--strategy layer-streaming and --group 1 exclude each other" in capsys.readouterr().err
    assert main([*call, "--strategy", "cpu-only", "--backend", "htp"]) == 2
    assert "--strategy cpu-only and --backend htp exclude each other" in capsys.readouterr().err
    ids = tmp_path / "ids.txt"
    ids.write_text("1 2 3")
    text = ["perplexity", str(package), "--ids-file", str(ids)]
    assert main([*text, "--strategy", "layer-streaming", "--group", "1"]) == 2
    assert "--strategy layer-streaming and --group 1 exclude each other" in capsys.readouterr().err
    assert main([*text, "--strategy", "npumoe"]) == 2
    assert "--calibration" in capsys.readouterr().err
    assert main([*call, "--strategy", "layer-streaming", "--memory", "1MiB"]) == 1
    assert "The smallest budget of --strategy layer-streaming is --memory" in capsys.readouterr().err
    with pytest.raises(UsageError, match="unknown strategy"):
        Engine(package, strategy="best")


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, _ = packed(tmp_path, "olmoe")
    names = "estream,on-demand,per-expert-graph"
    call = ["bench", str(package), "--strategy", names, "--tokens", "3,40", "--rounds", "2", "--threads", "1"]
    assert main([*call, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [(cell["tokens"], cell["strategy"]) for cell in cells] == [
        (tokens, name) for tokens in (3, 40) for name in names.split(",")
    ]
    for cell in cells:
        if cell["strategy"] == "per-expert-graph":
            assert "16 contexts" in cell["failure"] and cell["ttft_s"] == [] and cell["configuration"] is None
            continue
        assert (
            cell["failure"] is None
            and len(cell["ttft_s"]) == len(cell["first_ttft_s"]) == 2
            and min(cell["ttft_s"]) > 0
        )
        assert cell["deviation"] == 0.0 and cell["median"]["dropped_rate"] == 0.0 and cell["exact"]
        assert cell["configuration"]["strategy"] == cell["strategy"] and cell["peak_bytes"] > 1 << 20
    tight = ["--strategy", "layer-streaming", "--tokens", "3", "--rounds", "1", "--memory", "1MiB"]
    assert main(["bench", str(package), *tight]) == 1
    assert "refused" in capsys.readouterr().out
    assert main(["bench", str(package), "--strategy", "per-expert-graph", "--tokens", "3", "--rounds", "1"]) == 2
    printed = capsys.readouterr().out
    assert "refused" in printed and "per-expert-graph, 3 tokens: --strategy per-expert-graph needs" in printed


def test_measurements_apart(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe")
    ids = [1, 2, 3, 4, 5]
    found = run_apart(Job(str(package), ids, {"strategy": "on-demand"}, first=2, logits=str(tmp_path / "logits.npy")))
    assert found["stats"]["rows_useful"] % len(ids) == 0 < found["first_ttft_s"], "of the second prefill"
    with Engine(package) as engine:
        assert np.array_equal(np.load(tmp_path / "logits.npy"), engine.prefill(ids).logits)
        expected = perplexity(engine, split_windows(ids, 3))
    quality = run_apart(Job(str(package), ids, window=3))["quality"]
    assert (quality["perplexity"], quality["predicted"]) == (expected.perplexity, 3)
