"""Prompts that cannot be meant, memory that is refused, graphs that fail, numbers that overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream.engine import Engine
from estream.errors import ClosedError, MemoryBudgetError, NumericError, PromptError, TargetError, UsageError
from estream.package.embedding import Embedding
from estream.runtime.mock import Faults
from tests.support.faults import (
    IDS,
    last,
    logits_of,
    make_overflowing_package,
    make_package,
    mock,
    nothing_left,
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def expected(package: Path) -> np.ndarray:
    return logits_of(package)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"the prompt is empty.*Give at least one token"),
        ([1, 50, 2], r"token id at position 1 is outside the vocabulary .asked 50, had 0 to 49"),
        ([-1], r"position 0 is outside the vocabulary"),
        ([1 << 70], r"flat list of whole numbers"),
        ([1.5], r"flat list of whole numbers"),
        ([[1, 2]], r"flat list of whole numbers"),
        ([[1], [2, 3]], r"flat list of whole numbers"),
        (["1"], r"flat list of whole numbers"),
        ([1] * 21, r"too long .asked 21 tokens, had room for 20.*open the engine with max_tokens up to 64"),
    ],
)
def test_prompts_that_cannot_be_meant(package: Path, expected: np.ndarray, ids: Any, message: str) -> None:
    with Engine(package, threads=1, max_tokens=20) as engine:
        with pytest.raises(PromptError, match="(?i)" + message):
            engine.prefill(ids)
        assert np.array_equal(last(engine), expected)


def test_prompt_longer_than_the_context(package: Path) -> None:
    with pytest.raises(UsageError, match=r"max_tokens must lie within the model's context .asked 65, had 1 to 64"):
        Engine(package, max_tokens=65)
    with Engine(package, threads=1) as engine:
        assert engine.prefill([1] * 64).tokens == 64
        with pytest.raises(PromptError, match=r"asked 65 tokens, had room for 64.*Shorten it"):
            engine.prefill([1] * 65)


def test_each_allocation_refused_in_turn(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for resident in ("none", "all"):
        with mock() as target, Engine(package, target, resident=resident):
            total = len(target.allocations)
        assert total > 20
        for number in range(1, total + 1, 1 if resident == "none" else 7):
            with nothing_left(monkeypatch):
                target = mock(Faults(allocation=number))
                with pytest.raises(TargetError, match=r"memory for .* was refused"):
                    Engine(package, target, resident=resident)
                assert target.closed


def test_memory_that_the_system_refuses(package: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise MemoryError

    with nothing_left(monkeypatch), monkeypatch.context() as patch:
        patch.setattr("estream.layers.state.np.zeros", refuse)
        with pytest.raises(MemoryBudgetError, match="no memory left for opening the model"):
            Engine(package, threads=1)
    with Engine(package, threads=1) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Embedding, "rows", refuse)
            with pytest.raises(MemoryBudgetError, match="no memory left for a prefill of 12 tokens"):
                engine.prefill(IDS)
        assert np.array_equal(last(engine), expected)


def test_each_run_fails_in_turn(package: Path, expected: np.ndarray) -> None:
    faults = Faults()
    with mock(faults) as target, Engine(package, target, group=1, banks=2) as engine:
        last(engine)
        total = target.runs.total()
        assert total > 50
        for number in range(1, total + 1):
            faults.run = target.runs.total() + number
            with pytest.raises(TargetError, match=r"graph \S+: run \d+ failed"):
                engine.prefill(IDS)
            if number % 4 == 0:
                assert np.array_equal(last(engine), expected)


@pytest.mark.parametrize(
    ("tensor", "factor", "where"),
    [
        ("model.layers.0.self_attn.o_proj.weight", 3e38, "layer 0, hidden state after attention, token 0"),
        ("model.layers.0.mlp.gate.weight", 3e38, "layer 0, router logits, token 0"),
        ("model.layers.1.mlp.up_proj.weight", 3e38, "layer 2, hidden state before attention, token 0"),
        ("model.layers.2.mlp.shared_expert.up_proj.weight", 3e38, "hidden state after the last layer, token"),
        ("model.norm.weight", 3e38, "output logits, token 11"),
    ],
)
def test_overflow_names_layer_and_token(tmp_path: Path, tensor: str, factor: float, where: str) -> None:
    package = make_overflowing_package(tmp_path, tensor, factor)
    with Engine(package, threads=1) as engine:
        for _ in range(2):
            with pytest.raises(NumericError, match=rf"{where}.*: not finite"):
                engine.prefill(IDS)


def test_overflow_of_one_token(tmp_path: Path) -> None:
    """Only the token with the id 9, at position 5, has an embedding that overflows."""
    package = make_package(tmp_path)
    with open(package / "dense.safetensors", "r+b") as file:
        from estream.package.reader import Package

        tensor = Package.open(package).dense["embed"]
        file.seek(tensor.offset + 9 * tensor.nbytes // 50)
        file.write(np.float32(np.inf).tobytes())
    with Engine(package, threads=1) as engine:
        with pytest.raises(NumericError, match="layer 0, hidden state before attention, token 5: not finite"):
            engine.prefill(IDS)
        engine.prefill(IDS[:5])


def test_prefill_after_close(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left(monkeypatch):
        engine = Engine(package, threads=1)
        engine.prefill(IDS)
        for _ in range(2):
            engine.close()
        with pytest.raises(ClosedError, match=r"the engine is closed\. Open a new Engine"):
            engine.prefill(IDS)


def test_calls_from_within_a_prefill(package: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left(monkeypatch):
        engine = Engine(package, threads=1)
        with pytest.raises(UsageError, match="a prefill was called from within a prefill"):
            engine.prefill(IDS, logits="all", logits_sink=lambda row, column, block: last(engine))
        assert np.array_equal(last(engine), expected)
        blocks: list[np.ndarray] = []

        def sink(row: int, column: int, block: np.ndarray) -> None:
            engine.close()  # takes effect when the prefill ends
            blocks.append(block.copy())

        engine.prefill(IDS, logits="all", logits_sink=sink)
        assert np.array_equal(blocks[-1][-1], expected[-blocks[-1].shape[1] :])
        with pytest.raises(ClosedError):
            engine.prefill(IDS)


def test_sink_that_raises(package: Path, expected: np.ndarray) -> None:
    def sink(row: int, column: int, block: np.ndarray) -> None:
        raise KeyError("the caller's own")

    with Engine(package, threads=1) as engine:
        with pytest.raises(KeyError, match="the caller's own"):
            engine.prefill(IDS, logits="all", logits_sink=sink)
        assert np.array_equal(last(engine), expected)
