"""Rotary position embedding tables, computed on the host and bound per block of rows."""

from __future__ import annotations

import numpy as np

from estream.models.base import Rope


def rope_tables(rope: Rope, head_dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [len(positions), head_dim // 2].

    In float32, as transformers computes them: at large positions float64 would differ from every published logit.
    Only the power is rounded from float64: numpy's float32 power is up to 2 ulp from torch's, this one at most 1.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = np.float32(1.0) / (np.float64(rope.theta) ** exponent).astype(np.float32)
    angles = positions.astype(np.float32)[:, None] * inverse[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
