"""Checkpoints whose matrices are FP8 (E4M3) with one scale per block, as DeepSeek and Qwen publish them: dequantised.

`X.weight` [R, C] F8_E4M3 goes with `X.weight_scale_inv` [⌈R/a⌉, ⌈C/b⌉]: the value is the product of the two; the last
blocks may be smaller. config.json's quantization_config gives [a, b].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from estream.errors import CheckpointError, UnsupportedModelError, brief

DTYPE = "F8_E4M3"
_SUFFIX = "_scale_inv"


@cache
def float_of_byte() -> np.ndarray:
    """float32 [256]: what each E4M3 byte stands for (sign, 4 bits of exponent with bias 7, 3 of mantissa)."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[byte & 127 == 127] = np.nan  # there are no infinities
    return np.where(byte & 128, -size, size).astype(np.float32)


def scale_name(tensor: str) -> str:
    """Name of the scales that an FP8 tensor goes with."""
    return tensor + _SUFFIX


def block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """[a, b] of config.json. Raises CheckpointError: there is none, for a tensor that needs it."""
    quantised = config.get("quantization_config")
    size = quantised.get("weight_block_size") if isinstance(quantised, Mapping) else None
    pair = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if size is None or not pair:
        raise CheckpointError(
            "config.json: quantization_config.weight_block_size, which FP8 weights need",
            asked="two block sizes",
            had=brief(size),
            next_step="Take config.json from the same checkpoint as the weights",
        )
    return size[0], size[1]


def scale_shape(tensor: str, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of a tensor's scales. Raises UnsupportedModelError unless it is a matrix."""
    if len(shape) != 2:
        raise UnsupportedModelError(
            f"tensor {tensor!r} is FP8", asked="a matrix, with scales by blocks", had=list(shape)
        )
    return tuple(-(-size // step) for size, step in zip(shape, block, strict=True))


def scaled(values: np.ndarray, first_row: int, scales: np.ndarray, block: tuple[int, int]) -> None:
    """Multiplies rows first_row, … of a matrix, float32 [n, C], by the scales of their blocks, in place."""
    rows, columns = values.shape
    across = np.repeat(scales, block[1], axis=1)[:, :columns]
    for row in range(rows):
        values[row] *= across[(first_row + row) // block[0]]
