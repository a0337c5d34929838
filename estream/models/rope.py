"""Rotary position embedding tables, computed on the host and bound per block of rows.

In float32, as transformers computes them: at large positions float64 would differ from every published logit.
Only powers are rounded from float64: numpy's float32 power is up to 2 ulp from torch's, this one at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from estream.models.base import Rope
from estream.models.rope_config import RopeScaling

Tables = tuple[np.ndarray, np.ndarray]  # cos, sin: float32 [positions, width / 2]
_ONE = np.float32(1.0)


def rope_tables(rope: Rope, width: int, positions: np.ndarray, *, tokens: int | None = None) -> Tables:
    """cos and sin, float32 [len(positions), width // 2], of a prompt of `tokens` tokens.

    width: rotated components of a head. tokens: the last position + 1 unless given; LongRoPE has one set of
    frequencies for prompts within the original context and another beyond.
    """
    tokens = int(positions.max()) + 1 if tokens is None else tokens
    angles = positions.astype(np.float32)[:, None] * _frequencies(rope, width, tokens)[None, :]
    factor = np.float32(_magnitude(rope.scaling, tokens))
    return np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor


def prompt_tables(rope: Rope, width: int, lengths: Sequence[int]) -> list[Tables]:
    """For each prompt tables of positions from 0, at least as long as it; prompts of one kind share theirs."""
    kinds = [_is_long(rope.scaling, length) for length in lengths]
    shared: dict[bool, Tables] = {}
    for kind in sorted(set(kinds)):
        longest = max(length for length, own in zip(lengths, kinds, strict=True) if own == kind)
        shared[kind] = rope_tables(rope, width, np.arange(longest))
    return [shared[kind] for kind in kinds]


def _is_long(scaling: RopeScaling | None, tokens: int) -> bool:
    is_longrope = scaling is not None and scaling.rope_type == "longrope"
    return is_longrope and tokens > scaling.original_max_position_embeddings  # type: ignore[union-attr]


def _frequencies(rope: Rope, width: int, tokens: int) -> np.ndarray:
    """float32 [width / 2]."""
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    powers = (np.float64(rope.theta) ** exponent).astype(np.float32)
    scaling = rope.scaling
    if scaling is None:
        return _ONE / powers
    factor = np.float32(scaling.factor)
    if scaling.rope_type == "linear":
        return _ONE / powers / factor
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if _is_long(scaling, tokens) else scaling.short_factor
        return _ONE / (np.array(factors, np.float32) * powers)
    if scaling.rope_type == "llama3":
        return _llama3(scaling, _ONE / powers)
    kept = _ONE - _yarn_ramp(scaling, rope.theta, width)
    return _ONE / (factor * powers) * (_ONE - kept) + _ONE / powers * kept


def _yarn_ramp(scaling: RopeScaling, theta: float, width: int) -> np.ndarray:
    """0 for pairs that turn often within the original context (kept), 1 for those that hardly do (interpolated)."""

    def pair(turns: float) -> float:
        original = scaling.original_max_position_embeddings
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast or 32.0), pair(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, np.float32(0.0), _ONE)


def _llama3(scaling: RopeScaling, inverse: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original, factor = scaling.original_max_position_embeddings, np.float32(scaling.factor)
    wavelength = np.float32(2 * math.pi) / inverse
    long, short = wavelength > np.float32(original / low), wavelength < np.float32(original / high)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (_ONE - smooth) * inverse / factor + smooth * inverse
    return np.where(long, inverse / factor, np.where(short, inverse, between)).astype(np.float32)


def _magnitude(scaling: RopeScaling | None, tokens: int) -> float:
    """What cos and sin are multiplied with: it sharpens attention over a longer context."""
    if scaling is None or scaling.rope_type in ("linear", "llama3"):
        return 1.0
    if scaling.short_mscale is not None and scaling.long_mscale is not None:
        return scaling.long_mscale if _is_long(scaling, tokens) else scaling.short_mscale
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        if scaling.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
