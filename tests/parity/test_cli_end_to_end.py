"""The command line on a real package: pack, inspect, verify, prefill, and what it says of damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from estream.cli.main import main
from estream.engine import Engine
from estream.package.reader import Package
from tests.support.tiny_packages import QWEN2_MOE, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
TEXT = " ".join(f"w{token}" for token in IDS)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model with a tokenizer of 50 words, w0 to w49."""
    folder = tmp_path_factory.mktemp("cli")
    write_checkpoint(folder / "checkpoint", QWEN2_MOE)
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "checkpoint" / "tokenizer.json"))
    assert main(["pack", str(folder / "checkpoint"), str(folder / "q.estream"), "--experts", "int8", "-q"]) == 0
    return folder / "q.estream"


def prefill(capsys: pytest.CaptureFixture[str], package: Path, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["prefill", str(package), *options, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_answer_is_the_engines(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(package) as engine:
        logits = engine.prefill(IDS).logits
    assert logits is not None
    answer = prefill(capsys, package, "--prompt", TEXT, "--top", "3")
    assert answer["tokens"] == len(IDS)
    best = [int(token) for token in np.argsort(-logits, kind="stable")[:3]]
    assert [token["id"] for token in answer["next"]] == best
    assert [token["logit"] for token in answer["next"]] == [float(logits[token]) for token in best]
    assert [token["text"].strip() for token in answer["next"]] == [f"w{token}" for token in best]


def test_statistics_have_every_figure(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = prefill(capsys, package, "--ids", " ".join(map(str, IDS)), "--group", "3", "--banks", "2", "--lanes", "1")
    stats = answer["stats"]
    times = ("ttft_s", "load_s", "attention_s", "router_s", "dispatch_s", "flash_wait_s", "bubble_rate")
    for key in (*times, "bytes_read", "dense_bytes_read", "groups_skipped", "bytes_copied"):
        assert stats[key] is not None and stats[key] >= 0
    pool = Package.open(package).pool
    assert 0 < stats["records_needed"] <= stats["records_read"] <= len(pool.moe_layers) * pool.experts
    assert stats["bytes_read"] <= pool.pool_bytes
    assert 0 < stats["rows_useful"] <= stats["rows_computed"]
    assert isinstance(stats["direct_io"], bool) and stats["direct_io"] != bool(stats["direct_io_reason"])
    memory = stats["memory"]
    assert memory["arena_bytes"] == 2 * 3 * pool.panel.panel_bytes
    assert memory["peak_bytes"] >= memory["vm_hwm_bytes"] >= memory["resident_weight_bytes"] > 0
    configuration = answer["configuration"]
    assert (configuration["group"], configuration["banks"], configuration["lanes"]) == (3, 2, 1)


def test_all_logits_streamed_equal_resident(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ("--ids", " ".join(map(str, IDS)))
    last = prefill(capsys, package, *ids)["next"][0]
    variants = {
        "streamed.npy": ("--group", "1", "--banks", "1", "--lanes", "1", "--prefetch", "on-demand"),
        "verified.npy": ("--verify-reads", "--no-direct-io"),
        "resident.npy": ("--resident", "all"),
    }
    for name, options in variants.items():
        answer = prefill(capsys, package, *ids, "--all-logits", str(tmp_path / name), *options)
        assert answer["next"][0]["id"] == last["id"]
    streamed = (tmp_path / "streamed.npy").read_bytes()
    assert all((tmp_path / name).read_bytes() == streamed for name in variants)
    assert np.load(tmp_path / "streamed.npy").shape == (len(IDS), 50)


def test_trace_opens_as_json(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    prefill(capsys, package, "--ids", "1 2 3", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert {"M", "X"} == {event["ph"] for event in events}


def test_damage_is_named(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "damaged.estream"
    subprocess.run(["cp", "-r", str(package), str(damaged)], check=True)
    assert main(["verify", str(damaged), "-q"]) == 0
    with open(damaged / "experts.safetensors", "r+b") as file:
        file.seek(Package.open(package).pool.panel_offset(2, 3) + 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    capsys.readouterr()
    assert main(["verify", str(damaged)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "damaged: layers.2.experts.3 panel 0"
    assert main(["prefill", str(damaged), "--ids", " ".join(map(str, range(50))), "--verify-reads"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("estream: error: ")
    assert "layer" in err and "3" in err


def test_tokenizer_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "checkpoint", QWEN2_MOE)  # its tokenizer.json is an empty object
    damaged = tmp_path / "damaged.estream"
    assert main(["pack", str(tmp_path / "checkpoint"), str(damaged), "-q"]) == 0
    assert main(["prefill", str(damaged), "--prompt", TEXT]) == 1
    assert "tokenizer.json: cannot be used" in capsys.readouterr().err
    assert main(["prefill", str(damaged), "--ids", "1 2 3", "--top", "1"]) == 0
    out, err = capsys.readouterr()
    assert "estream: warning: " in err and "tokens are shown by id only" in err
    assert out.splitlines()[-4].strip().endswith("%")  # one line of id, logit and probability; no text


def test_impossible_budget_names_the_smallest(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", str(package), "--ids", "1", "--memory", "1MiB"]) == 1
    assert "smallest budget" in capsys.readouterr().err


def test_as_a_program(package: Path) -> None:
    command = [sys.executable, "-m", "estream", "prefill", str(package), "--prompt-file", "-", "--top", "1", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=TEXT, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
