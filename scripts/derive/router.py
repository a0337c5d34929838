"""The router of a layer that was cut: a ridge regression, scaled so that all gates are equal and only order counts."""

from __future__ import annotations

import math

import numpy as np

from .split import Split

# Largest distance of a calibration token's logits from their mean. A gate is then 1/E within about this part, which
# keeps top-k = E near the dense model; smaller, and experts tie in float16 logits or in the float32 softmax.
SPREAD = 2.0**-9


def targets(active: np.ndarray, down: np.ndarray, hidden: np.ndarray, split: Split) -> np.ndarray:
    """What the router predicts, [N, E]: the length of each expert's output over that of the hidden state, less the mean
    over the token's experts (only the order counts).

    `active` [N, I] activations, `down` [H, I], `hidden` [N, H] what the output is added to.
    """
    norms = [np.linalg.norm(active[:, expert] @ down[:, expert].T, axis=1) for expert in split.experts]
    lengths = np.stack(norms, axis=1) / np.linalg.norm(hidden, axis=1, keepdims=True)
    return lengths - lengths.mean(axis=1, keepdims=True)


def ridge(x: np.ndarray, wanted: np.ndarray, penalty: float = 0.1) -> np.ndarray:
    """Weights [E, H] with x [N, H] times their transpose near `wanted` [N, E].

    `penalty` is relative to the mean diagonal of x's Gram matrix. Computed in float64.
    """
    x = x.astype(np.float64)
    gram = x.T @ x
    gram[np.diag_indices_from(gram)] += penalty * np.trace(gram) / len(gram)
    return np.linalg.solve(gram, x.T @ wanted.astype(np.float64)).T


def scaled(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """`weight` [E, H] times the power of two that brings the logits of x [N, H] within SPREAD of their mean; float32.

    A power of two keeps the order of the logits exactly.
    """
    centred = weight - weight.mean(axis=0)  # the same softmax
    largest = float(np.abs(x @ centred.T).max())
    factor = 2.0 ** math.floor(math.log2(SPREAD / largest)) if largest > 0 else 1.0
    return (centred * factor).astype(np.float32)
