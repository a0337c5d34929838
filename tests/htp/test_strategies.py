"""Strategies in the simulator: the same bytes, or the same within float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream import Engine
from tests.support.htp_packages import compiled
from tests.support.tiny_checkpoints import prompt

LENGTHS = (3, 70)
TOLERANCE = 2e-3  # of the logits' range: float16 rounds what is added in another order


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 4 experts, each of two panels."""
    options: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    options["intermediate_size"] = 48
    made, _ = compiled(tmp_path_factory.mktemp("strategies"), "olmoe", experts="int8", panel=32, **options)
    return made


def answers(package: Path, name: str) -> list[Any]:
    with Engine(package, "htp", strategy=name, max_tokens=70) as engine:
        return [engine.prefill(prompt(length, seed=length), logits="all") for length in LENGTHS]


def test_strategies(package: Path) -> None:
    expected = answers(package, "estream")
    for name in ("resident", "on-demand", "layer-streaming"):
        for one, own in zip(answers(package, name), expected, strict=True):
            assert np.array_equal(one.logits, own.logits), name
            assert one.configuration["strategy"] == name and one.stats.dropped_rate == 0.0
    for name in ("padded", "per-expert-graph"):
        for length, one, own in zip(LENGTHS, answers(package, name), expected, strict=True):
            distance = np.abs(one.logits - own.logits).max() / np.ptp(own.logits)
            print(f"{name}, {length} tokens: {distance:.2g} of the range")
            assert distance <= TOLERANCE
            assert one.stats.rows_useful == own.stats.rows_useful and one.stats.dropped_rate == 0.0
            if name == "padded":  # 8 panels, each in tiles of 64 rows
                assert one.stats.rows_computed == 8 * -(-length // 64) * 64
            else:
                assert one.configuration["expert_graphs"] == 4 and one.configuration["expert_rows"] == 64
