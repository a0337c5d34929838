"""Perplexity and agreement from blocks of logits: golden values, any blocks, and what is refused."""

from __future__ import annotations

import math
import tracemalloc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream.errors import EStreamError, NumericError, PromptError, UsageError
from estream.quality import agreement, perplexity, perplexity_of, split_windows
from estream.quality.scores import ROWS, Scores, WindowScores
from estream.quality.spill import Spill

LN = math.log


class FakeEngine:
    """Logits by a table: row t follows token t. Given to the sink in slices of two columns, and pieces of rows."""

    def __init__(self, table: np.ndarray, dropped: list[float] | None = None) -> None:
        self.table, self.dropped, self.closed = table.astype(np.float32), dropped, False
        self.package: Any = SimpleNamespace(architecture=SimpleNamespace(vocab=table.shape[1]))
        self.prompts: list[list[int]] = []

    def prefill(self, ids: np.ndarray, logits: str, logits_sink: Any) -> Any:
        assert logits == "all"
        every = self.table[ids]
        for column in range(0, self.table.shape[1], 2):
            for row in range(0, len(ids), 3):
                logits_sink(row, column, every[row : row + 3, column : column + 2])
        stats = {} if self.dropped is None else {"dropped_rate": self.dropped[len(self.prompts)]}
        self.prompts.append(ids.tolist())
        return SimpleNamespace(
            stats=SimpleNamespace(to_dict=lambda: stats), configuration={"number": len(self.prompts)}
        )

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


def test_windows_do_not_overlap_and_a_single_last_token_is_left_out() -> None:
    assert [piece.tolist() for piece in split_windows(range(7), 3)] == [[0, 1, 2], [3, 4, 5]]
    assert [piece.tolist() for piece in split_windows(range(8), 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [piece.tolist() for piece in split_windows(range(8), 3, limit=1)] == [[0, 1, 2]]
    assert [piece.tolist() for piece in split_windows([4, 5], 100)] == [[4, 5]]


@pytest.mark.parametrize(
    ("ids", "length", "limit", "error", "words"),
    [
        ([], 4, None, PromptError, "too short"),
        ([1], 4, None, PromptError, r"asked 2 tokens at least, had 1"),
        ([1, 2], 1, None, UsageError, "2 tokens at least"),
        ([1, 2], 2, 0, UsageError, "--limit"),
    ],
)
def test_texts_that_cannot_be_measured(
    ids: list[int], length: int, limit: int | None, error: type[EStreamError], words: str
) -> None:
    with pytest.raises(error, match=words):
        split_windows(ids, length, limit)


def test_perplexity_of_known_distributions() -> None:
    assert perplexity_of(np.zeros((5, 40)), [1, 2, 3, 4, 5]) == pytest.approx(40, rel=1e-14)
    certain = np.full((3, 4), -1e4)
    certain[[0, 1], [2, 3]] = 1e4
    assert perplexity_of(certain, [0, 2, 3]) == pytest.approx(1)
    # token 1 with 3/4, then with 1/2: the root of 4/3 × 2
    logits = np.array([[0, LN(3)], [7, 7], [5, -5]])
    assert perplexity_of(logits, [0, 1, 1]) == pytest.approx(1.6329931618554521, rel=1e-14)


def test_predicted_is_every_token_but_the_first_of_its_window() -> None:
    engine: Any = FakeEngine(np.array([[0, LN(3)], [LN(7), 0]]))  # after 0: 1/4, 3/4; after 1: 7/8, 1/8
    found = perplexity(engine, split_windows([0, 1, 0, 0, 0], 3))
    assert engine.prompts == [[0, 1, 0], [0, 0]]
    assert (found.windows, found.tokens, found.predicted) == (2, 5, 3)
    assert found.loss == pytest.approx((LN(4 / 3) + LN(8 / 7) + LN(4)) / 3, rel=1e-7)
    assert found.perplexity == pytest.approx(math.exp(found.loss), rel=1e-15)
    assert found.dropped_rate is None and found.configuration == {"number": 2}


def test_the_dropped_rate_is_that_of_all_tokens() -> None:
    engine: Any = FakeEngine(np.zeros((2, 2)), dropped=[0.1, 0.4])
    assert perplexity(engine, split_windows([0, 1, 0, 0], 3)).dropped_rate == pytest.approx(0.1)
    engine = FakeEngine(np.zeros((2, 2)), dropped=[0.1, 0.4])
    assert perplexity(engine, split_windows([0, 1, 0, 0, 0], 3)).dropped_rate == pytest.approx((0.3 + 0.8) / 5)


def test_agreement_of_known_distributions() -> None:
    reference: Any = FakeEngine(np.array([[0, LN(3)], [LN(3), 0]]))  # (1/4, 3/4), (3/4, 1/4)
    engine: Any = FakeEngine(np.array([[1, 1 + LN(2)], [0, 0]]))  # (1/3, 2/3), (1/2, 1/2)

    def open_reference() -> Any:
        assert engine.closed, "one after the other: each has the whole memory budget"
        return reference

    quality, near = agreement(lambda: engine, open_reference, split_windows([0, 1, 1, 0, 1], 3))
    after_0 = 0.25 * LN(3 / 4) + 0.75 * LN(9 / 8)
    after_1 = 0.75 * LN(3 / 2) + 0.25 * LN(1 / 2)
    assert (after_0, after_1) == pytest.approx((0.016416759, 0.130812036), abs=1e-9)
    assert near.divergence == pytest.approx((2 * after_0 + 3 * after_1) / 5, rel=1e-6)
    assert near.same == 1.0  # equal logits: the lowest id, which is the reference's
    losses = [LN(4 / 3), LN(4), LN(4 / 3)]
    assert near.reference.loss == pytest.approx(sum(losses) / 3, rel=1e-7)
    assert quality.loss == pytest.approx((LN(3 / 2) + LN(2) + LN(3 / 2)) / 3, rel=1e-7)
    assert near.change == pytest.approx(quality.perplexity / near.reference.perplexity - 1, rel=1e-12)


def test_an_engine_agrees_with_itself() -> None:
    table = np.random.default_rng(0).normal(size=(9, 9)) * 20
    engines: list[Any] = [FakeEngine(table), FakeEngine(table)]
    quality, near = agreement(lambda: engines[0], lambda: engines[1], split_windows(np.arange(90) % 9, 40))
    assert (near.same, near.change) == (1.0, 0.0) and 0 <= near.divergence < 1e-12
    assert near.reference.perplexity == quality.perplexity


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@st.composite
def cut(draw: st.DrawFn, length: int) -> list[slice]:
    stops = sorted({*draw(st.lists(st.integers(1, length), max_size=4)), length})
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


@st.composite
def blocks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[tuple[slice, slice]]]:
    """A window's ids, two matrices of logits with ties in them, and an order of the blocks of a partition."""
    rows, columns = draw(st.integers(2, 2 * ROWS + 3)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.5, 3.0, 400.0, 1e6]))
    logits = np.round(rng.normal(size=(2, rows, columns)) * scale).astype(np.float32)
    found = [(row, column) for row in draw(cut(rows)) for column in draw(cut(columns))]
    return rng.integers(0, columns, rows), logits, draw(st.permutations(found))


@settings(max_examples=60, deadline=None)
@given(blocks())
def test_any_blocks_in_any_order_give_the_same(
    drawn: tuple[np.ndarray, np.ndarray, list[tuple[slice, slice]]],
) -> None:
    ids, (theirs, mine), order = drawn
    vocab = mine.shape[1]

    def read(row: int, column: int, rows: int, width: int) -> np.ndarray:
        return theirs[row : row + rows, column : column + width]

    other = WindowScores(ids, vocab)
    other(0, 0, theirs)
    sink = WindowScores(ids, vocab, other=other.finish(), read=read)
    for rows, columns in order:
        sink(rows.start, columns.start, mine[rows, columns])
    scores = sink.finish()
    p, q = log_softmax(mine), log_softmax(theirs)
    size = 1 + np.abs([theirs, mine]).max()
    assert np.array_equal(scores.best, mine.argmax(axis=1))
    assert scores.divergence is not None
    np.testing.assert_allclose(scores.loss, -p[np.arange(len(ids) - 1), ids[1:]], rtol=1e-13, atol=1e-14 * size)
    np.testing.assert_allclose(scores.divergence, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-12, atol=1e-13 * size)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    sink = WindowScores(np.zeros(40, np.int64), 8)
    block = np.zeros((39, 4), np.float32)
    block[37, 3] = value
    with pytest.raises(NumericError, match=r"token 38: not finite \(had -?(nan|inf) for vocabulary id 7\)"):
        sink(1, 4, block)


def test_what_is_left_out_or_outside_is_refused() -> None:
    sink = WindowScores(np.zeros(3, np.int64), 4)
    for row, column in ((-1, 0), (0, -1), (2, 0), (0, 3)):
        with pytest.raises(EStreamError, match="outside the window"):
            sink(row, column, np.zeros((2, 2), np.float32))
    sink(0, 0, np.zeros((3, 2), np.float32))
    sink(0, 2, np.zeros((1, 2), np.float32))
    with pytest.raises(EStreamError, match=r"logits of position 1 \(asked 4 columns, had 2\)"):
        sink.finish()


def test_a_perplexity_beyond_float64_is_refused() -> None:
    with pytest.raises(NumericError, match=r"had 2000 nats per token"):
        perplexity_of(np.array([[2000.0, 0.0], [0.0, 0.0]]), [0, 1])


def test_the_spill_gives_back_what_was_written() -> None:
    every = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    with Spill(5, 7) as spill:
        for row, column, rows, columns in ((2, 3, 3, 4), (0, 0, 2, 7), (2, 0, 3, 3)):
            spill.write(row, column, every[row : row + rows, column : column + columns])
        assert np.array_equal(spill.read(1, 2, 4, 5), every[1:5, 2:7])
    with pytest.raises(ValueError, match="closed"):
        spill.read(0, 0, 1, 1)


def test_no_room_for_the_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    engine: Any = FakeEngine(np.zeros((3, 1024)))
    with pytest.raises(EStreamError, match=r"no room .*asked 12.0 KiB, had .* free\). Give a smaller --limit"):
        agreement(lambda: engine, lambda: nullcontext(engine), split_windows([0, 1, 2], 3))
    assert engine.closed


def test_a_failure_gives_the_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Spill] = []
    close = Spill.close
    monkeypatch.setattr(Spill, "close", lambda self: (closed.append(self), close(self)))
    table = np.zeros((3, 4))
    table[1, 2] = np.nan
    engine: Any = FakeEngine(table)
    with pytest.raises(NumericError, match="token 1: not finite"):
        agreement(lambda: engine, lambda: pytest.fail("opened"), split_windows([0, 1, 2], 3))
    assert len(closed) == 1


def test_memory_is_that_of_a_few_rows_of_a_block() -> None:
    block, ids = np.zeros((512, 8192), np.float32), np.zeros(512, np.int64)
    sink = WindowScores(ids, 8192)
    tracemalloc.start()
    try:
        sink(0, 0, block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 8 * ROWS * 8192 < peak < block.nbytes / 2


def test_scores_of_one_block() -> None:
    sink = WindowScores(np.array([0, 1]), 2)
    sink(0, 0, np.array([[0, LN(3)], [2, 2]], np.float64))
    scores = sink.finish()
    assert isinstance(scores, Scores) and scores.divergence is None
    np.testing.assert_allclose(scores.log_sum, [LN(4), 2 + LN(2)], rtol=1e-15)
    assert scores.best.tolist() == [1, 0]
