"""Scores of one window from its logits, block by block, in float64: [N, V] is never built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from estream.errors import EStreamError, NumericError

ROWS = 32  # rows that are widened to float64 at once: 2 MiB of a head slice of 8192 columns

# (first row, first column, rows, columns) → another run's logits there, float32 [rows, columns].
ReadLogits = Callable[[int, int, int, int], np.ndarray]


@dataclass(frozen=True)
class Scores:
    """Of a window of N tokens.

    log_sum: float64 [N], log of the sum of exponentials of a position's logits. best: int64 [N], the most probable next
    token, of equal ones the lowest id. loss: float64 [N - 1], negative log likelihood of tokens 1 to N - 1 in nats.
    divergence: float64 [N], KL(this‖other) in nats, where another run was given.
    """

    log_sum: np.ndarray
    best: np.ndarray
    loss: np.ndarray
    divergence: np.ndarray | None = None


class WindowScores:
    """A logits sink: called as `sink(row, column, block)`, blocks of any shape in any order, each cell once.

    Raises NumericError for a logit that is not finite, EStreamError for a block outside [N, V] or cells left out.
    """

    def __init__(
        self, ids: np.ndarray, vocab: int, *, other: Scores | None = None, read: ReadLogits | None = None
    ) -> None:
        """ids: int64 [N], the window. other, read: another run's scores of this window, and its logits."""
        rows = len(ids)
        self._ids, self._vocab = ids, vocab
        self._peak, self._total = np.full(rows, -np.inf), np.zeros(rows)
        self._best, self._seen = np.full(rows, vocab), np.zeros(rows, np.int64)
        self._following = np.zeros(max(rows - 1, 0))
        self._other, self._read = other, read
        self._apart = np.zeros(rows)  # sum of exp(logit - peak) · (logit - the other's)

    def __call__(self, row: int, column: int, block: np.ndarray) -> None:
        rows, columns = block.shape
        if min(row, column) < 0 or row + rows > len(self._ids) or column + columns > self._vocab:
            raise EStreamError(
                "a block of logits outside the window",
                asked=f"rows {row}+{rows}, columns {column}+{columns}",
                had=f"[{len(self._ids)}, {self._vocab}]",
            )
        for first in range(0, rows if columns else 0, ROWS):
            piece = block[first : first + ROWS].astype(np.float64)
            _check_finite(piece, row + first, column)
            self._add(row + first, column, piece)

    def _add(self, row: int, column: int, piece: np.ndarray) -> None:
        rows, width = slice(row, row + len(piece)), piece.shape[1]
        self._seen[rows] += width
        at, peak = column + piece.argmax(axis=1), piece.max(axis=1)
        before = self._peak[rows].copy()
        better = (peak > before) | ((peak == before) & (at < self._best[rows]))
        self._best[rows] = np.where(better, at, self._best[rows])
        self._peak[rows] = np.maximum(before, peak)
        shrunk, weights = np.exp(before - self._peak[rows]), np.exp(piece - self._peak[rows, None])
        self._total[rows] = self._total[rows] * shrunk + weights.sum(axis=1)
        if self._read is not None:
            apart = piece - self._read(row, column, len(piece), width)
            self._apart[rows] = self._apart[rows] * shrunk + (weights * apart).sum(axis=1)
        predicting = np.arange(row, min(rows.stop, len(self._ids) - 1))
        following = self._ids[predicting + 1] - column
        inside = (following >= 0) & (following < width)
        self._following[predicting[inside]] = piece[predicting[inside] - row, following[inside]]

    def finish(self) -> Scores:
        """The window's scores, when every logit was given."""
        if np.any(self._seen != self._vocab):
            row = int(np.flatnonzero(self._seen != self._vocab)[0])
            raise EStreamError(f"logits of position {row}", asked=f"{self._vocab} columns", had=int(self._seen[row]))
        log_sum = self._peak + np.log(self._total)
        divergence = None
        if self._other is not None:
            # sum p (log p - log q); what rounding leaves below zero is none
            divergence = np.maximum(self._apart / self._total - log_sum + self._other.log_sum, 0.0)
        return Scores(log_sum, self._best, log_sum[:-1] - self._following, divergence)


def _check_finite(piece: np.ndarray, row: int, column: int) -> None:
    if np.isfinite(piece).all():
        return
    at, token = np.argwhere(~np.isfinite(piece))[0]
    raise NumericError(
        f"output logits, token {row + at}: not finite",
        had=f"{piece[at, token]} for vocabulary id {column + token}",
        next_step="Run estream selftest: it names the graph that leaves the finite range",
    )
