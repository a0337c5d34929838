"""Experts in MXFP4, as gpt-oss publishes them: read as the plain tensors that they stand for.

`X` float [E, K, N] is stored as `X_blocks` U8 [E, N, K/32, 16] and `X_scales` U8 [E, N, K/32] (OCP Microscaling
Formats 1.0): a byte holds two E2M1 values, the low nibble first; a scale is a power of two, biased by 127.
"""

from __future__ import annotations

import numpy as np

GROUP = 32
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_OF_NIBBLE = np.concatenate([_VALUES, -_VALUES])


def part_names(tensor: str) -> tuple[str, str]:
    """(blocks, scales)."""
    return f"{tensor}_blocks", f"{tensor}_scales"


def part_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of blocks and scales, for a plain tensor [E, K, N]."""
    experts, depth, width = shape
    return (experts, width, depth // GROUP, GROUP // 2), (experts, width, depth // GROUP)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [K, N] of one expert's blocks U8 [N, K/32, 16] and scales U8 [N, K/32]. A scale of 255 is NaN."""
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, GROUP)
    exponents = np.where(scales == 255, 0, scales.astype(np.int32) - 127)
    factors = np.where(scales == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
    values = _OF_NIBBLE[nibbles] * factors[..., None]
    return np.ascontiguousarray(values.reshape(len(blocks), -1).T)
