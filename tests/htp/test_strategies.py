"""Strategies in the simulator: the same bytes, or the same within float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream import Engine
from estream.calibrate.experts import measure_loads, text_windows
from estream.errors import UsageError
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


def npumoe_answers(package: Path, file: Path, paging: dict[str, Any], **options: Any) -> list[Any]:
    npumoe = {"calibration": str(file), **options}
    with Engine(package, "htp", strategy="npumoe", npumoe=npumoe, max_tokens=70, **paging) as engine:
        return [engine.prefill(prompt(length, seed=length), logits="all") for length in LENGTHS]


def test_npumoe(package: Path, tmp_path: Path) -> None:
    """Cold experts on the processor have 8-bit activations there: the tolerance of the whole int8 model on cpu."""
    file, expected = tmp_path / "loads.json", answers(package, "estream")
    with Engine(package, threads=1, max_tokens=64) as engine:
        measure_loads(engine, text_windows(np.array(prompt(640)), None, 64, 0), 0).write(file)
    some: dict[str, Any] = {"unlimited": True, "cold_below": 0.5}
    for options, tolerance in (({"unlimited": True}, TOLERANCE), (some, 0.02), (some | {"cold_below": 1.0}, 0.02)):
        found = npumoe_answers(package, file, {"resident": "all"}, **options)
        # A group of one panel and one bank: every hold is flushed.
        paged = npumoe_answers(package, file, {"group": 1, "banks": 1}, **options)
        for length, one, same, own in zip(LENGTHS, found, paged, expected, strict=True):
            distance = np.abs(one.logits - own.logits).max() / np.ptp(own.logits)
            print(f"npumoe {options}, {length} tokens: {distance:.2g} of the range")
            assert distance <= tolerance and np.array_equal(one.logits, same.logits)
            assert one.stats.rows_useful == own.stats.rows_useful and one.stats.dropped_rate == 0.0
            assert (one.configuration["cold_experts"] > 0) == ("cold_below" in options)
    long = npumoe_answers(package, file, {}, capacity_quantile=0.0)[1]
    assert long.configuration["capacities"][0] == 32 and long.stats.dropped_rate > 0.01
    assert long.stats.rows_useful == round((1 - long.stats.dropped_rate) * expected[1].stats.rows_useful)
    with pytest.raises(UsageError, match="--group-experts: on htp the compiled graphs"):
        npumoe_answers(package, file, {}, group_experts=2)
