"""Float32 building blocks of a family's choice of experts.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import numpy as np

_NEAR = 2.0**-9  # of a row's logits: some twenty times what float16 rows leave uncertain


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis in float32, whatever the input's dtype."""
    shifted = logits.astype(np.float32, copy=False)
    shifted = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Logistic function in float32, without overflow at either end."""
    small = np.exp(-np.abs(logits.astype(np.float32, copy=False)))
    return np.where(logits >= 0, np.float32(1.0), small) / (np.float32(1.0) + small)


def top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest scores of each row, largest first; equal scores in the order of their index, on every machine.

    `scores`: [N, E]. Returns (indices int32 [N, k], values [N, k] in the dtype of `scores`). Raises ValueError
    unless 1 <= k <= E.
    """
    if not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"top {k} of {scores.shape[-1]} scores")
    indices = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return indices.astype(np.int32), np.take_along_axis(scores, indices, axis=-1)


def near_ties(logits: np.ndarray, top_k: int) -> np.ndarray:
    """Rows in which the last chosen expert and the first one left out are so close that rounding may swap them.

    logits: float32 [N, E], chosen by size. Returns ascending row numbers, int64.
    """
    if top_k >= logits.shape[1]:
        return np.arange(0)
    ordered = np.sort(logits, axis=1)
    gap = ordered[:, -top_k] - ordered[:, -top_k - 1]
    return np.flatnonzero(gap <= uncertainty(logits)[:, 0])


def near_ties_of_scores(scores: np.ndarray, slack: np.ndarray, top_k: int) -> np.ndarray:
    """As `near_ties`, of scores that may move by their own `slack` either way; float32 [N, E] both."""
    if top_k >= scores.shape[1]:
        return np.arange(0)
    order = np.argsort(-scores, axis=1, kind="stable")
    chosen, left = order[:, :top_k], order[:, top_k:]
    least = np.take_along_axis(scores - slack, chosen, axis=1).min(axis=1)
    return np.flatnonzero(least <= np.take_along_axis(scores + slack, left, axis=1).max(axis=1))


def uncertainty(logits: np.ndarray) -> np.ndarray:
    """float32 [N, 1]: how far apart two logits of a row must be for float16 rows to leave their order certain."""
    size = np.ptp(logits, axis=1, keepdims=True) + np.abs(logits).max(axis=1, keepdims=True)
    return np.float32(_NEAR) * size
