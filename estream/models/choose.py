"""Float32 building blocks of a family's choice of experts.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import numpy as np


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
