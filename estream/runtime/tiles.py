"""The integer tile format of the htp target: uint16 rows over [-1, 1] with each row's magnitude beside them.

    value[r, c] = (integer[r, c] - 32768) / 32768 · magnitude[r]

Constants are powers of two, so that float16 holds them exactly. Run-time part: numpy only.
"""

from __future__ import annotations

import numpy as np

ZERO = 32768  # the integer that stands for 0
UNIT = 2.0**-15  # value of one step of a tile whose magnitude is 1
PRODUCT_RANGE = 64.0  # products of normalised rows and normalised weights lie within ± this
PRODUCT_UNIT = PRODUCT_RANGE * UNIT

_LEAST = np.float16(2.0**-14)  # the least magnitude with all of float16's digits
_LARGEST_INTEGER = 65535


def quantise_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [rows, K] → integers uint16 [rows, K], magnitudes float16 [rows, 1].

    The magnitude is rounded first and divided by after, so its rounding costs nothing. A row whose magnitude exceeds
    float16 gets an infinite one: callers check.
    """
    largest = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        magnitude = np.maximum((largest * (1 + 2.0**-10)).astype(np.float16), _LEAST)
    scaled = x * (np.float32(ZERO) / magnitude.astype(np.float32))
    scaled += np.float32(ZERO)
    np.clip(np.rint(scaled, out=scaled), 0, _LARGEST_INTEGER, out=scaled)
    return scaled.astype(np.uint16), magnitude


def dequantise_rows(integers: np.ndarray, magnitude: np.ndarray, unit: float = UNIT) -> np.ndarray:
    """uint16 [rows, K], [rows, 1] → float32 [rows, K]. `unit`: PRODUCT_UNIT for what an expert graph returns."""
    values = integers.astype(np.float32)
    values -= np.float32(ZERO)
    values *= magnitude.astype(np.float32) * np.float32(unit)
    return values


def half_rows(hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the residual stream, float32 [rows, H] → float16 [rows, H], factor float16 [rows, 1].

    The factor is a power of two, 1 for ordinary rows: a row whose largest magnitude exceeds 16 is brought below it, so
    that squares stay far from float16's end. The norm's epsilon is not scaled with the row: such a row's mean square
    is at least 64 / H, beside which it does not count.
    """
    largest = np.abs(hidden).max(axis=1, keepdims=True)
    _, exponent = np.frexp(largest)  # largest < 2 ** exponent
    factor = np.ldexp(np.float32(1), -np.maximum(exponent - 4, 0))
    return (hidden * factor).astype(np.float16), factor.astype(np.float16)
