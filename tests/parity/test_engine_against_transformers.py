"""The whole prefill, package to logits, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream import Engine
from tests.support.families import found
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

LENGTHS = (1, 2, 31, 32, 33, 130, 600)


@pytest.mark.parametrize(
    ("family", "panel", "options"), [(name, *case) for name, cases in found().items() for case in cases.engines]
)
def test_logits_equal_transformers(tmp_path: Path, family: str, panel: int | None, options: dict[str, Any]) -> None:
    package, tiny = packed(tmp_path, family, panel=panel, **options)
    vocab = tiny.model.config.vocab_size
    with Engine(package, threads=1) as engine:
        if panel:
            assert engine.package.pool.panels_per_expert > 1
        for length in LENGTHS:
            ids = prompt(length, vocab, seed=length)
            expected = tiny.logits(ids)
            result = engine.prefill(ids, logits="all")
            assert result.logits is not None
            assert np.abs(result.logits - expected).max() <= 1e-4 * np.ptp(expected)
            assert np.array_equal(engine.prefill(ids).logits, result.logits[-1])


def test_hidden_states_are_those_of_transformers(tmp_path: Path) -> None:
    import torch

    package, tiny = packed(tmp_path, "olmoe")
    ids = prompt(20)
    with torch.no_grad():
        expected = tiny.model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    with Engine(package, threads=1) as engine:
        result = engine.prefill(ids, logits=None, hidden=True)
    assert result.logits is None and result.hidden is not None
    assert np.abs(result.hidden - expected).max() <= 1e-5 * np.ptp(expected)


@pytest.mark.parametrize(("experts", "limit"), [("f16", 2e-3), ("int8", 6e-2)])
def test_reduced_schemes_stay_near(tmp_path: Path, experts: str, limit: float) -> None:
    """Expert choices may flip where two router logits are close: all experts are chosen here, so that none can."""
    package, tiny = packed(tmp_path, "mixtral", experts=experts, num_experts_per_tok=8, hidden_size=64)
    ids = prompt(130)
    expected = tiny.logits(ids)
    with Engine(package, threads=1) as engine, Engine(package, threads=1, reference=True) as reference:
        actual, plain = engine.prefill(ids, logits="all").logits, reference.prefill(ids, logits="all").logits
    assert actual is not None and plain is not None
    for logits in (actual, plain):
        assert np.linalg.norm(logits - expected) <= limit * np.linalg.norm(expected)
    assert not np.array_equal(actual, plain) or experts == "f16"
