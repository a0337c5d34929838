"""Rotary position embedding, the Hugging Face pairing: element i of a head turns with element i + R/2.

R: the first components of a head that turn, all of them unless the architecture says otherwise.
"""

from __future__ import annotations

from typing import Any

from qnn_graphs.builder import ROWS, Builder


class Rope:
    """The graph's cos and sin inputs, [rows, R/2] float32: one row per token row, whatever its position."""

    def __init__(self, b: Builder, rotated: int) -> None:
        self._b, self._rotated = b, rotated
        batch = b.integers(0)
        self._cos = b.node("Unsqueeze", b.input("cos", (ROWS, rotated // 2)), batch)
        self._sin = b.node("Unsqueeze", b.input("sin", (ROWS, rotated // 2)), batch)

    def __call__(self, x: str, heads: int, out: str | None = None, *, partial: bool = False) -> str:
        """x [rows, heads · D] → [1, rows, heads · D]. partial: D is more than R."""
        batched = self._b.node("Unsqueeze", x, self._b.integers(0))
        extra: dict[str, Any] = {"rotary_embedding_dim": self._rotated} if partial else {}
        return self._b.node(
            "RotaryEmbedding", batched, self._cos, self._sin, num_heads=heads, interleaved=0, out=out, **extra
        )
