"""How many tokens each expert gets, where nobody knows yet: drawn at random, the same on every call."""

from __future__ import annotations

import numpy as np

_DISTINCT = 4  # layers that are drawn; the others repeat them


def draw_counts(
    experts: int, top_k: int, tokens: int, layers: int, *, skew: float = 0.0, seed: int = 0
) -> list[np.ndarray]:
    """Rows per expert, int64 [E] for each MoE layer. Every token takes top_k distinct experts, with weights
    rank^-skew (0: uniform, 1: Zipf), ranks shuffled per layer."""
    random = np.random.default_rng([seed, experts, top_k, tokens])
    drawn = []
    for _ in range(min(layers, _DISTINCT)):
        weights = random.permutation(np.arange(1, experts + 1, dtype=np.float64) ** -skew)
        scores = np.log(weights) + random.gumbel(size=(tokens, experts))
        chosen = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        drawn.append(np.bincount(chosen.reshape(-1), minlength=experts))
    return [drawn[layer % len(drawn)] for layer in range(layers)]


def expected_coverage(experts: int, top_k: int, tokens: int) -> float:
    """The share of a layer's experts that a prompt needs, with uniform routing."""
    return 1.0 - (1.0 - top_k / experts) ** tokens
