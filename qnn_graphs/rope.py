"""Rotary position embedding, the Hugging Face pairing: element i of a head turns with element i + D/2."""

from __future__ import annotations

from qnn_graphs.builder import ROWS, Builder


class Rope:
    """The graph's cos and sin inputs, [rows, D/2] float32: one row per token row, whatever its position."""

    def __init__(self, b: Builder, head_dim: int) -> None:
        self._b = b
        batch = b.integers(0)
        self._cos = b.node("Unsqueeze", b.input("cos", (ROWS, head_dim // 2)), batch)
        self._sin = b.node("Unsqueeze", b.input("sin", (ROWS, head_dim // 2)), batch)

    def __call__(self, x: str, heads: int, out: str | None) -> str:
        """x [rows, heads · D] → [1, rows, heads · D]."""
        batched = self._b.node("Unsqueeze", x, self._b.integers(0))
        return self._b.node("RotaryEmbedding", batched, self._cos, self._sin, num_heads=heads, interleaved=0, out=out)
