"""RMS norm: x / sqrt(mean(x²) + eps) · w along the last axis, in float32."""

from __future__ import annotations

from qnn_graphs.builder import Builder


def rms_norm(b: Builder, x: str, weight: str, eps: float, out: str | None = None) -> str:
    """One fused operator. Squaring by hand would overflow in fp16 on massive activations."""
    return b.node("RMSNormalization", x, weight, axis=-1, epsilon=eps, out=out)


def head_norm(b: Builder, x: str, weight: str, eps: float, head_dim: int, width: int, out: str | None = None) -> str:
    """x [rows, width] normed head by head; weight [head_dim]."""
    heads = b.node("Reshape", x, b.integers(-1, width // head_dim, head_dim))
    return b.node("Reshape", rms_norm(b, heads, weight, eps), b.integers(-1, width), out=out)
