"""perplexity: the text, the options on their way to the engines, what is printed. The engines are stand-ins."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from estream.cli.main import main
from estream.errors import PackageError

VOCAB = 100
ARCHITECTURE = SimpleNamespace(vocab=VOCAB, context=64)


class FakeEngine:
    """Uniform logits; the reference's are twice as likely for token 7."""

    opened: list[dict[str, Any]]

    def __init__(self, path: Path, backend: str = "cpu", **options: Any) -> None:
        self.progress = options.pop("progress")
        FakeEngine.opened.append({"path": path, "backend": backend, **options, "windows": []})
        self.own, self.package = FakeEngine.opened[-1], SimpleNamespace(architecture=ARCHITECTURE)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def prefill(self, ids: np.ndarray, logits: str, logits_sink: Any) -> Any:
        self.own["windows"].append(ids.tolist())
        for layer in range(2):
            self.progress("prefill", layer, 2)
        block = np.zeros((len(ids), VOCAB), np.float32)
        block[:, 7] = np.log(2) * self.own["reference"]
        logits_sink(0, 0, block)
        configuration = {"backend": self.own["backend"], "simulated": self.own["backend"] == "htp", "soc": "sm8650"}
        return SimpleNamespace(stats=SimpleNamespace(to_dict=dict), configuration=configuration)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    files = {"graphs/reference/head.onnx": ""}
    package = SimpleNamespace(
        architecture=ARCHITECTURE, check_unchanged=lambda: None, manifest=SimpleNamespace(files=files)
    )
    monkeypatch.setattr("estream.package.reader.Package", SimpleNamespace(open=lambda path: package))
    monkeypatch.setattr("estream.engine.Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "opened", [], raising=False)
    return package


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = SimpleNamespace(encode=lambda text: [ord(letter) - 32 for letter in text])
    monkeypatch.setattr("estream.cli.prompt.load_tokenizer", lambda package: letters)


def ids_file(folder: Path, *ids: int) -> str:
    path = folder / "ids.txt"
    path.write_text(" ".join(map(str, ids)))
    return str(path)


def test_json(words: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefg", encoding="utf-8")
    assert main(["perplexity", "x.estream", "--text", str(text), "--tokens", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer.pop("perplexity") == pytest.approx(100, rel=1e-12)
    assert answer.pop("loss") == pytest.approx(np.log(100), rel=1e-12)
    assert answer == {
        "package": "x.estream",
        "window": 3,
        "windows": 2,
        "tokens": 6,
        "predicted": 4,
        "dropped_rate": None,
        "tokens_left_out": 1,
        "agreement": None,
        "configuration": {"backend": "cpu", "simulated": False, "soc": "sm8650"},
    }
    (opened,) = FakeEngine.opened
    assert opened == {
        "path": Path("x.estream"),
        "backend": "cpu",
        "memory": None,
        "soc": None,
        "reference": False,
        "threads": None,
        "strategy": "estream",
        "group": None,
        "banks": None,
        "lanes": None,
        "prefetch": "auto",
        "resident": None,
        "pinned": 0,
        "dense": "auto",
        "direct_io": True,
        "verify_reads": False,
        "npumoe": None,
        "max_tokens": 3,
        "windows": [[65, 66, 67], [68, 69, 70]],
    }
    assert err == ""


def test_agreement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ids_file(tmp_path, 1, 7, 3, 4, 5)
    target = ("--backend", "htp", "--soc", "sm8750", "--threads", "1")
    configuration = ("--memory", "1GiB", "--strategy", "padded", "--banks", "3")
    windows = ("--tokens", "4", "--limit", "1", "--agreement")
    assert main(["perplexity", "x.estream", "--ids-file", ids, *windows, *target, *configuration, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    own, reference = FakeEngine.opened
    assert (reference["backend"], reference["reference"], reference["memory"]) == ("cpu", True, 1 << 30)
    assert (own["backend"], own["reference"], own["memory"], own["soc"]) == ("htp", False, 1 << 30, "sm8750")
    assert (own["strategy"], own["banks"]) == ("padded", 3)
    assert "strategy" not in reference and "banks" not in reference, "the reference is always the same"
    assert reference["windows"] == own["windows"] == [[1, 7, 3, 4]]
    near = answer["agreement"]
    assert near["reference"]["perplexity"] == pytest.approx(101 / 2 ** (1 / 3), rel=1e-6)
    assert near["change"] == pytest.approx(100 / near["reference"]["perplexity"] - 1, rel=1e-9)
    assert near["same"] == 0.0
    assert near["divergence"] == pytest.approx(2 / 101 * np.log(2) + np.log(100 / 101), rel=1e-6)
    assert answer["tokens_left_out"] == 1


def test_human_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ids_file(tmp_path, 1, 7, 3, 4, 5)
    assert main(["perplexity", "x.estream", "--ids-file", ids, "--backend", "htp", "--agreement"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "  perplexity  100.0000 over 4 predicted tokens (1 window of up to 64 tokens; 4.6052 nats per token)",
        "  reference   84.9305: this is +17.743%",
        "  agreement   same first token at 0.00% of 5 positions",
        "  divergence  KL(reference‖this) 0.00378 nats per position",
        "simulated: numbers are those of the HTP of sm8650",
    ]
    assert err == ""


def test_progress_counts_the_layers_of_all_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr("estream.cli.progress.Progress.__call__", lambda self, *what: told.append(what))
    assert main(["perplexity", "x.estream", "--ids-file", ids_file(tmp_path, 1, 2, 3, 4), "--tokens", "2"]) == 0
    assert told == [("perplexity", done, 4) for done in range(4)]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--text", "empty.txt"], 2, "--text empty.txt: the text is empty"),
        (["--text", "latin.txt"], 2, "--text latin.txt: not UTF-8 text (had byte 1: "),
        (["--text", "short.txt"], 1, "too short: its first token is not predicted (asked 2 tokens at least, had 1)"),
        (["--text", "absent.txt"], 1, "absent.txt: No such file"),
        (["--text", "long.txt", "--tokens", "1"], 2, "a window needs 2 tokens at least"),
        (["--text", "long.txt", "--tokens", "65"], 2, "context (asked 65, had 1 to 64)"),
        (["--text", "foreign.txt"], 1, "outside the vocabulary"),
        (["--text", "long.txt", "--agreement", "--reference"], 2, "--agreement compares with --reference"),
    ],
)
def test_mistakes_are_told_before_an_engine_opens(
    options: list[str],
    status: int,
    said: str,
    words: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "empty": b"",
        "latin": b"a\xff",
        "short": b"a",
        "long": b"abcd",
        "foreign": "aé".encode(),
    }.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    assert main(["perplexity", "x.estream", *options]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("estream: error: ") and said in err
    assert FakeEngine.opened == []


def test_text_needs_a_tokenizer_and_agreement_the_reference(
    tmp_path: Path, package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc")))
    assert main(["perplexity", str(tmp_path), "--text", "-"]) == 1
    assert "has no tokenizer. Give token ids with --ids-file" in capsys.readouterr().err
    package.manifest.files = {}
    assert main(["perplexity", str(tmp_path), "--ids-file", ids_file(tmp_path, 1, 2), "--agreement"]) == 2
    assert "has no reference graphs" in capsys.readouterr().err


def test_a_package_that_changed_meanwhile_is_refused(
    tmp_path: Path, package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed() -> None:
        raise PackageError("x.estream was replaced")

    closed: list[FakeEngine] = []
    monkeypatch.setattr(FakeEngine, "close", lambda self: closed.append(self), raising=False)
    package.check_unchanged = changed
    for options in ([], ["--agreement"]):
        assert main(["perplexity", "x.estream", "--ids-file", ids_file(tmp_path, 1, 2), *options]) == 1
        assert "x.estream was replaced" in capsys.readouterr().err
    assert len(closed) == 2


def test_what_was_dropped_is_said_where_a_strategy_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = FakeEngine.prefill

    def dropping(self: FakeEngine, ids: np.ndarray, logits: str, logits_sink: Any) -> Any:
        result = prefill(self, ids, logits, logits_sink)
        result.stats.to_dict = lambda: {"dropped_rate": 0.0234}
        return result

    monkeypatch.setattr(FakeEngine, "prefill", dropping)
    call = ["perplexity", "x.estream", "--ids-file", ids_file(tmp_path, 1, 7, 3)]
    assert main(call) == 0
    assert "dropped" not in capsys.readouterr().out
    assert main([*call, "--strategy", "npumoe", "--calibration", "f"]) == 0
    assert "  dropped     2.34% of (token, expert) pairs" in capsys.readouterr().out.splitlines()
