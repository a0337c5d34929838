"""Families against transformers: names, transposes, config fields, routing, windows, by a prefill in plain numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream.checkpoint import Checkpoint
from tests.support import tiny_checkpoints
from tests.support.families import found
from tests.support.numpy_reference import prefill


@pytest.mark.parametrize(
    ("family", "options", "length"), [(name, *case) for name, cases in found().items() for case in cases.prefills]
)
def test_logits_equal_transformers(tmp_path: Path, family: str, options: dict[str, Any], length: int) -> None:
    tiny = tiny_checkpoints.write(family, tmp_path, **options)
    ids = tiny_checkpoints.prompt(length)
    expected = tiny.logits(ids)
    with Checkpoint.open(tmp_path) as checkpoint:
        model = checkpoint.family()
        checkpoint.check(model)
        actual = prefill(checkpoint, model, ids)
    assert np.abs(actual - expected).max() <= 2e-5 * np.ptp(expected)
    # The comparison means something: positions differ from each other and the logits are not flat.
    assert expected.std() > 0.3
    assert np.abs(expected[1:] - expected[:-1]).max() > 0.3


@pytest.mark.parametrize("family", found())
def test_every_expert_of_a_tiny_checkpoint_is_used(tmp_path: Path, family: str) -> None:
    tiny = tiny_checkpoints.write(family, tmp_path)
    biases = tiny.expert_biases()
    with Checkpoint.open(tmp_path) as checkpoint:
        model = checkpoint.family()
    for at, logits in enumerate(tiny.router_logits(tiny_checkpoints.prompt(200))):
        bias = biases[at] if biases else None
        if model.architecture().shared_gate:
            logits = np.concatenate([logits, np.zeros_like(logits[:, :1])], axis=1)
        counts = np.bincount(model.route(logits, bias).experts.reshape(-1), minlength=8)
        assert counts.min() > 0
        assert counts.max() < 200
