"""Perplexity and agreement of a real engine: against torch's cross-entropy and against whole matrices in float64."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from estream.cli.main import main
from estream.engine import Engine
from estream.quality import agreement, perplexity, split_windows
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt


def test_equals_the_cross_entropy_of_transformers(tmp_path: Path) -> None:
    import torch

    package, tiny = packed(tmp_path, "olmoe")
    ids = prompt(150, tiny.model.config.vocab_size)
    windows = split_windows(ids, 64)
    assert [len(window) for window in windows] == [64, 64, 22]
    total = 0.0
    with torch.no_grad():
        for window in windows:
            batch = torch.tensor(window[None])
            mean = tiny.model(batch, labels=batch, use_cache=False).loss  # of all tokens but the first
            total += float(mean) * (len(window) - 1)
    with Engine(package, threads=1, max_tokens=64) as engine:
        found = perplexity(engine, windows)
    assert found.predicted == 147
    assert found.loss == pytest.approx(total / 147, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / 147), rel=1e-4)


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two head slices at least would need a large vocabulary: blocks are of rows here, unit tests cut columns."""
    return packed(tmp_path_factory.mktemp("perplexity"), "olmoe", experts="int8", hidden_size=64)[0]


def test_agreement_equals_whole_matrices(int8: Path) -> None:
    with Engine(int8, threads=1) as engine, Engine(int8, threads=1, reference=True) as reference:
        ids = prompt(600, engine.package.architecture.vocab)
        windows = split_windows(ids, 500)
        mine, theirs = (
            np.concatenate([one.prefill(window, logits="all").logits for window in windows])
            for one in (engine, reference)
        )
    open_engine = partial(Engine, int8, threads=1, max_tokens=500)
    quality, near = agreement(open_engine, partial(open_engine, reference=True), windows)
    p, q = (
        wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        for wide in (logits.astype(np.float64) for logits in (theirs, mine))
    )
    rows = np.r_[0:499, 500:599]
    following = np.array(ids)[rows + 1]
    assert quality.loss == pytest.approx(-q[rows, following].mean(), rel=1e-12)
    assert near.reference.loss == pytest.approx(-p[rows, following].mean(), rel=1e-12)
    assert near.same == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert 0 < near.divergence == pytest.approx((np.exp(p) * (p - q)).sum(axis=1).mean(), rel=1e-9)
    assert quality.configuration["graphs"] != near.reference.configuration["graphs"] == "reference"


def test_command_line(int8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = prompt(70, 90)
    (tmp_path / "ids.txt").write_text(json.dumps(ids))
    command = ["perplexity", str(int8), "--ids-file", str(tmp_path / "ids.txt"), "--tokens", "32", "--threads", "1"]
    assert main([*command, "--agreement", "--memory", "1GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["windows"], answer["tokens"], answer["predicted"], answer["tokens_left_out"]) == (3, 70, 67, 0)
    assert main([*command, "--reference", "--json"]) == 0
    reference = json.loads(capsys.readouterr().out)
    assert reference["perplexity"] == answer["agreement"]["reference"]["perplexity"] != answer["perplexity"]
    assert answer["agreement"]["change"] == pytest.approx(answer["perplexity"] / reference["perplexity"] - 1)
    assert answer["configuration"]["memory"] == 1 << 30
