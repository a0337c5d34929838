"""prefill: four ways to give a prompt, the options on their way to the engine, the answer. The engine is a stand-in."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from estream.cli.main import main
from estream.errors import FlashError
from estream.models import family
from estream.package.dense import dense_specs, place
from estream.package.layout import PanelLayout, PoolLayout
from estream.telemetry.stats import MemoryStats, PrefillStats

ARCHITECTURE = (
    family("olmoe")
    .from_config(
        {
            "model_type": "olmoe",
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": 100,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    )
    .architecture()
)
POOL = PoolLayout(PanelLayout(64, 32, "f32"), 1, 8, (0, 1))
CONFIGURATION = {
    "strategy": "estream",
    "backend": "cpu",
    "graphs": "cpu",
    "threads": 2,
    "group": 4,
    "banks": 3,
    "lanes": 2,
    "prefetch": "before-routing",
    "resident": "none",
    "arena_bytes": 12 * POOL.panel.panel_bytes,
    "dense_weights": "resident",
    "dense_bytes": 1 << 20,
    "pinned": 0,
    "pinned_bytes": 0,
    "memory": None,
    "experts": "f32",
    "dense": "f32",
    "direct_io": True,
}
STATS = PrefillStats(
    ttft_s=2.0,
    load_s=0.5,
    attention_s=0.25,
    router_s=0.05,
    dispatch_s=1.5,
    flash_wait_s=0.1,
    flash_busy_s=0.5,
    bytes_read=1 << 30,
    records_read=14,
    records_needed=13,
    groups_skipped=1,
    direct_io=False,
    direct_io_reason="tmpfs has no O_DIRECT",
    memory=MemoryStats(arena_bytes=48 << 20, resident_weight_bytes=16 << 20, peak_bytes=1 << 30),
)


class FakeEngine:
    """Answers with fixed logits; row r of all logits is the last row minus r."""

    opened: dict[str, Any]
    ids: list[int]
    error: Exception | None = None
    last = np.linspace(-1, 1, 100, dtype=np.float32)

    def __init__(self, path: Path, *, backend: str, memory: int | None, **options: Any) -> None:
        options.pop("progress")("resident", 1, 2)
        FakeEngine.opened = {"path": path, "backend": backend, "memory": memory, **options}
        self.configuration = CONFIGURATION | {"memory": memory}

    def prefetch_for(self, tokens: int) -> str:
        return "before-routing"

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def prefill(self, ids: np.ndarray, logits: str, logits_sink: Any = None) -> Any:
        FakeEngine.ids = [int(token) for token in ids]
        if self.error is not None:
            raise self.error
        if logits_sink is not None:
            every = self.last - np.arange(len(ids), dtype=np.float32)[::-1, None]
            for column in (0, 64):
                logits_sink(0, column, every[:, column : column + 64])
        return SimpleNamespace(
            tokens=len(ids),
            logits=self.last if logits == "last" else None,
            stats=STATS,
            configuration=self.configuration,
        )


class Words:
    """A tokenizer of one token per letter, whose decoder drops a space that begins the text."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token + 32) for token in ids).removeprefix(" ")


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    dense = {item.name: item for item in place(dense_specs(ARCHITECTURE, "f32", POOL.panel), 0)}
    package = SimpleNamespace(architecture=ARCHITECTURE, pool=POOL, dense=dense, check_unchanged=lambda: None)
    monkeypatch.setattr("estream.package.reader.Package", SimpleNamespace(open=lambda path: package))
    monkeypatch.setattr("estream.engine.Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "error", None)
    return FakeEngine


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream.cli.prompt.load_tokenizer", lambda package: Words())


def test_defaults_reach_the_engine() -> None:
    assert main(["prefill", "x.estream", "--ids", "1 2 3"]) == 0
    assert FakeEngine.ids == [1, 2, 3]
    assert FakeEngine.opened == {
        "path": Path("x.estream"),
        "backend": "cpu",
        "soc": None,
        "memory": None,
        "group": None,
        "banks": None,
        "lanes": None,
        "prefetch": "auto",
        "resident": None,
        "strategy": "estream",
        "npumoe": None,
        "dense": "auto",
        "pinned": 0,
        "reference": False,
        "threads": None,
        "direct_io": True,
        "verify_reads": False,
        "max_tokens": 3,
        "trace": None,
    }


def test_options_reach_the_engine(tmp_path: Path) -> None:
    options = (
        "--memory 1.5GiB --group 4 --banks 3 --lanes 2 --prefetch on-demand --resident all --dense paged --pinned 3"
    )
    rest = [
        "--threads",
        "1",
        "--reference",
        "--no-direct-io",
        "--verify-reads",
        "--trace",
        str(tmp_path / "trace.json"),
    ]
    assert main(["prefill", "x.estream", "--ids", "1", *options.split(), *rest]) == 0
    opened = FakeEngine.opened
    trace = opened.pop("trace")
    assert opened == {
        "path": Path("x.estream"),
        "backend": "cpu",
        "soc": None,
        "memory": 3 << 29,
        "group": 4,
        "banks": 3,
        "lanes": 2,
        "prefetch": "on-demand",
        "resident": "all",
        "strategy": "estream",
        "npumoe": None,
        "dense": "paged",
        "pinned": 3,
        "reference": True,
        "threads": 1,
        "direct_io": False,
        "verify_reads": True,
        "max_tokens": 1,
    }
    assert type(trace).__name__ == "Trace"
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


def test_four_ways_to_give_a_prompt(words: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, ids = tmp_path / "prompt.txt", tmp_path / "ids.txt"
    text.write_text("AB\n", encoding="utf-8")
    ids.write_text("1, 2,3\n\t4\n")
    for option, expected in (
        (["--prompt", "AB"], [33, 34]),
        (["--ids", " 5,6 7 "], [5, 6, 7]),
        (["--ids-file", str(ids)], [1, 2, 3, 4]),
    ):
        assert main(["prefill", "x.estream", *option]) == 0
        assert FakeEngine.ids == expected
    text.write_text("AB", encoding="utf-8")
    assert main(["prefill", "x.estream", "--prompt-file", str(text)]) == 0
    assert FakeEngine.ids == [33, 34]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"BA")))
    assert main(["prefill", "x.estream", "--prompt-file", "-"]) == 0
    assert FakeEngine.ids == [34, 33]


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--ids", "1 x"], 2, "'x' is not a token id"),
        (["--ids", "1 -2"], 2, "'-2' is not a token id"),
        (["--ids", " "], 2, "no token ids"),
        (["--ids", "1 100"], 1, "100"),
        (["--ids", " ".join(["1"] * 65)], 1, "too long"),
        (["--prompt", "AB"], 1, "has no tokenizer"),
        (["--prompt-file", "absent.txt"], 1, "absent.txt: No such file"),
        (["--ids", "1", "--all-logits", "absent/x.npy"], 2, "no folder absent"),
        (["--ids", "1", "--trace", "."], 2, "is a folder"),
    ],
)
def test_mistakes_are_told_before_the_engine_opens(
    options: list[str],
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FakeEngine, "__init__", lambda *args, **options: pytest.fail("opened"))
    assert main(["prefill", "x.estream", *options]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("estream: error: ") and words in err
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"A\xff")
    assert main(["prefill", "x.estream", "--prompt-file", str(path)]) == 2
    assert "not UTF-8 text (had byte 1: " in capsys.readouterr().err


def test_human_output(words: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", "x.estream", "--ids", "1 2", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "  model     olmoe, 2 layers, 8 experts (2 per token), experts f32, dense f32",
        "  prompt    2 tokens",
        "  target    cpu (cpu graphs, 2 threads)",
        "  resident  166 KiB of dense weights",
        "  arena     384 KiB for 512 KiB of experts",
        "  paging    G=4 B=3 Q=2, prefetch before-routing",
        "  flash     direct I/O",
        "    id      logit  probability  text",
        "    99     1.0000       2.31 %  '\\x83'",
        "    98     0.9798       2.26 %  '\\x82'",
        "  time    2.00 s to the logits (attention 250 ms, router 50 ms, experts 1.50 s, wait for flash 100 ms; "
        "bubble 5.0 %); load 500 ms",
        "  flash   1.00 GiB of experts at 2.15 GB/s, 14 records read, 13 needed, 1 groups skipped, "
        "buffered reads (tmpfs has no O_DIRECT)",
        "  memory  peak 1.00 GiB (arena 48.0 MiB, resident weights 16.0 MiB)",
    ]


def test_quiet_prints_the_answer_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", "x.estream", "--ids", "1 2", "--top", "1", "-q"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == ["    99     1.0000       2.31 %"]
    assert err == ""


def test_unmeasured_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(globals(), "STATS", PrefillStats(ttft_s=1.0, direct_io=True))
    assert main(["prefill", "x.estream", "--ids", "1", "-v"]) == 0
    out = capsys.readouterr().out
    assert "wait for flash not measured" in out
    assert "  memory  peak not measured" in out
    assert "load_s" in out and "configuration.arena_bytes" in out


def test_json(words: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", "x.estream", "--ids", "1 2", "--top", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["tokens", "next", "stats", "configuration"]
    assert answer["tokens"] == 2
    assert [token["id"] for token in answer["next"]] == [99, 98, 97]
    assert answer["next"][0]["logit"] == 1.0
    wide = FakeEngine.last.astype(np.float64)
    assert answer["next"][0]["probability"] == pytest.approx(np.exp(wide[99]) / np.exp(wide).sum(), rel=1e-12)
    assert answer["stats"]["bubble_rate"] == pytest.approx(0.05)
    assert answer["stats"]["bytes_copied"] is None
    assert answer["stats"]["memory"]["arena_bytes"] == 48 << 20
    assert answer["configuration"] == CONFIGURATION


def test_json_without_a_tokenizer_has_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", "x.estream", "--ids", "1", "--top", "200", "--json"]) == 0
    following = json.loads(capsys.readouterr().out)["next"]
    assert len(following) == 100
    assert {token["text"] for token in following} == {None}
    assert sum(token["probability"] for token in following) == pytest.approx(1)


def test_a_space_that_begins_a_token_is_kept(
    words: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeEngine, "last", -np.arange(100, dtype=np.float32))
    assert main(["prefill", "x.estream", "--ids", "40", "--top", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next"][0]["text"] == " "


def test_equal_logits_come_in_the_order_of_their_ids(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeEngine, "last", np.zeros(100, np.float32))
    assert main(["prefill", "x.estream", "--ids", "40", "--top", "3", "--json"]) == 0
    assert [token["id"] for token in json.loads(capsys.readouterr().out)["next"]] == [0, 1, 2]


def test_all_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logits.npy"
    assert main(["prefill", "x.estream", "--ids", "1 2 3", "--all-logits", str(path), "--json"]) == 0
    every = np.load(path)
    assert every.dtype == np.float32
    assert np.array_equal(every, FakeEngine.last - np.array([[2], [1], [0]], np.float32))
    assert json.loads(capsys.readouterr().out)["next"][0]["id"] == 99


def test_a_failure_leaves_no_logits_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeEngine, "error", FlashError("short read of layers.0.experts.3", asked=16384, had=0))
    assert main(["prefill", "x.estream", "--ids", "1", "--all-logits", str(tmp_path / "x.npy")]) == 1
    assert "short read of layers.0.experts.3" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_a_strategy_drops_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of strategies that are not exact only."""
    told = {"strategy": "npumoe", "tier_rows": [3, 8], "tier_window": 64, "tier_experts": [9, 2], "cold_experts": 5}
    monkeypatch.setitem(globals(), "CONFIGURATION", CONFIGURATION | told)
    monkeypatch.setitem(globals(), "STATS", replace(STATS, dropped_rate=0.0234, rows_computed=57, rows_useful=50))
    call = ["prefill", "x.estream", "--ids", "1"]
    assert main([*call, "--strategy", "npumoe", "--calibration", "f"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "  dropped  2.34 % of (token, expert) pairs; tiers 3, 8 (rows of 64 tokens); 5 of 16 experts cold; "
        "rows computed/useful 1.14"
    )
    monkeypatch.setitem(globals(), "CONFIGURATION", CONFIGURATION | told | {"tier_rows": [], "tier_experts": []})
    monkeypatch.setitem(globals(), "STATS", replace(STATS, dropped_rate=None, rows_useful=None))
    assert main([*call, "--strategy", "npumoe", "--calibration", "f"]) == 0
    assert "dropped  not measured of (token, expert) pairs; tiers none" in capsys.readouterr().out
