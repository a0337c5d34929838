"""Perplexity of a text in fixed windows, and agreement with the reference lowering on the same windows.

A text's tokens are cut into windows of N, one after the other, without overlap; the last may be shorter. Each window is
a prompt of its own. Predicted is every token but the first of its window; a single token left at the end is left out.
Agreement is over every position of every window, the last one's next token included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import numpy as np

from estream.engine import Engine
from estream.errors import NumericError, PromptError, UsageError
from estream.layers.head import LogitsSink
from estream.quality.scores import ReadLogits, Scores, WindowScores
from estream.quality.spill import Spill

Open = Callable[[], AbstractContextManager[Engine]]


@dataclass(frozen=True)
class Quality:
    """loss: mean negative log likelihood of the predicted tokens, in nats; perplexity: its exponential.

    dropped_rate: share of (token, expert) pairs that the strategy dropped, over all windows; None: not measured.
    configuration: the engine's.
    """

    windows: int
    tokens: int
    predicted: int
    loss: float
    perplexity: float
    dropped_rate: float | None = None
    configuration: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreement:
    """reference: the reference lowering's own quality. change: perplexity over the reference's, less 1. same: share of
    positions whose most probable token is the reference's. divergence: mean KL(reference‖this), nats per position."""

    reference: Quality
    change: float
    same: float
    divergence: float


def split_windows(ids: Sequence[int] | np.ndarray, length: int, limit: int | None = None) -> list[np.ndarray]:
    """Windows of `length` tokens, int64; at most `limit` of them. Raises UsageError: a length below 2 or a limit below
    1; PromptError: fewer than 2 tokens."""
    if length < 2:
        raise UsageError("a window needs 2 tokens at least", asked=length, next_step="Give --tokens of 2 or more")
    if limit is not None and limit < 1:
        raise UsageError("--limit must be at least 1", asked=limit)
    array = np.asarray(ids, np.int64)
    if len(array) < 2:
        raise PromptError(
            "the text is too short: its first token is not predicted",
            asked="2 tokens at least",
            had=len(array),
            next_step="Give a longer text",
        )
    pieces = [array[start : start + length] for start in range(0, len(array) - 1, length)]
    return pieces[:limit]


def perplexity(engine: Engine, windows: Sequence[np.ndarray]) -> Quality:
    """Runs every window through `engine`. Raises what Engine.prefill raises; NumericError where the perplexity is no
    float64."""
    return _run(engine, windows)[0]


def agreement(open_engine: Open, open_reference: Open, windows: Sequence[np.ndarray]) -> tuple[Quality, Agreement]:
    """The quality of one engine and its agreement with another. They are open one after the other, so that each keeps
    its memory budget; the first one's logits wait in a temporary file of tokens × V × 4 bytes.

    Raises as `perplexity`, and EStreamError where that file has no room.
    """
    with ExitStack() as stack:
        with open_engine() as engine:
            spill = stack.enter_context(Spill(sum(map(len, windows)), engine.package.architecture.vocab))
            quality, scores = _run(engine, windows, spill)
        with open_reference() as engine:
            reference, expected = _run(engine, windows, spill, scores)
    same = np.concatenate([mine.best == theirs.best for mine, theirs in zip(scores, expected, strict=True)])
    divergence = np.concatenate([one.divergence for one in expected if one.divergence is not None])
    change = math.exp(quality.loss - reference.loss) - 1
    return quality, Agreement(reference, change, float(same.mean()), float(divergence.mean()))


def perplexity_of(logits: np.ndarray, ids: Sequence[int] | np.ndarray) -> float:
    """Perplexity of one window whose logits, float [N, V], are there already. Raises as `perplexity`."""
    window = np.asarray(ids, np.int64)
    scores = WindowScores(window, logits.shape[1])
    scores(0, 0, logits)
    return _quality([window], [scores.finish()]).perplexity


def _run(
    engine: Engine, windows: Sequence[np.ndarray], spill: Spill | None = None, others: list[Scores] | None = None
) -> tuple[Quality, list[Scores]]:
    """All windows. spill: is written to; or read from, where another run's scores come with it."""
    vocab, scores, dropped = engine.package.architecture.vocab, list[Scores](), list[float | None]()
    first, configuration = 0, dict[str, object]()
    for index, window in enumerate(windows):
        sink: LogitsSink
        if spill is not None and others is not None:
            sink = scorer = WindowScores(window, vocab, other=others[index], read=_reader(spill, first))
        else:
            sink = scorer = WindowScores(window, vocab)
            if spill is not None:
                sink = _writer(spill, first, scorer)
        result = engine.prefill(window, logits="all", logits_sink=sink)
        scores.append(scorer.finish())
        rate = result.stats.to_dict().get("dropped_rate")
        dropped.append(rate if isinstance(rate, float) else None)
        first, configuration = first + len(window), result.configuration
    return _quality(windows, scores, dropped, configuration), scores


def _reader(spill: Spill, first: int) -> ReadLogits:
    return lambda row, column, rows, width: spill.read(first + row, column, rows, width)


def _writer(spill: Spill, first: int, sink: WindowScores) -> LogitsSink:
    def both(row: int, column: int, block: np.ndarray) -> None:
        spill.write(first + row, column, block)
        sink(row, column, block)

    return both


def _quality(
    windows: Sequence[np.ndarray],
    scores: Sequence[Scores],
    dropped: Sequence[float | None] = (),
    configuration: dict[str, object] | None = None,
) -> Quality:
    losses = np.concatenate([one.loss for one in scores])
    loss, sizes = float(losses.mean()), [len(window) for window in windows]
    rates = [rate for rate in dropped if rate is not None]
    try:
        found = math.exp(loss)
    except OverflowError:
        raise NumericError(
            "the perplexity is no float64", had=f"{loss:.6g} nats per token", next_step="Run estream selftest"
        ) from None
    return Quality(
        windows=len(sizes),
        tokens=sum(sizes),
        predicted=len(losses),
        loss=loss,
        perplexity=found,
        dropped_rate=float(np.average(rates, weights=sizes)) if rates and len(rates) == len(sizes) else None,
        configuration=configuration or {},
    )
