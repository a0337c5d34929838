"""Norms along the last axis, in float32.

RMS norm: x / sqrt(mean(x²) + eps) · w. Layer norm: (x − mean) / sqrt(variance + eps) · w + b.
"""

from __future__ import annotations

import numpy as np

from estream.models.base import Architecture
from qnn_graphs.builder import Builder


def residual_norm(
    b: Builder, x: str, name: str, arch: Architecture, dtype: type[np.generic] = np.float32, out: str | None = None
) -> str:
    """The architecture's norm of the residual stream x [rows, H]. Declares its weight `name` [H] and, for a layer norm,
    `{name}.bias` [H]."""
    weight = b.input(name, (arch.hidden,), dtype)
    if arch.norm == "rms":
        return rms_norm(b, x, weight, arch.norm_eps, out=out)
    bias = b.input(f"{name}.bias", (arch.hidden,), dtype)
    return b.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=arch.norm_eps, out=out)


def rms_norm(b: Builder, x: str, weight: str, eps: float, out: str | None = None) -> str:
    """One fused operator. Squaring by hand would overflow in fp16 on massive activations."""
    return b.node("RMSNormalization", x, weight, axis=-1, epsilon=eps, out=out)


def head_norm(b: Builder, x: str, weight: str, eps: float, head_dim: int, width: int, out: str | None = None) -> str:
    """x [rows, width] normed head by head; weight [head_dim]."""
    heads = b.node("Reshape", x, b.integers(-1, width // head_dim, head_dim))
    return b.node("Reshape", rms_norm(b, heads, weight, eps), b.integers(-1, width), out=out)
