"""Tensors with static encodings: the integers between DequantizeLinear and QuantizeLinear that the NPU computes with.

The provider fuses DequantizeLinear → operator → QuantizeLinear into one integer operator. All scales are powers of
two, which float16 holds exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estream.runtime import tiles
from qnn_graphs.builder import Builder


@dataclass(frozen=True)
class Encoding:
    """value = (integer - zero) · scale, integers of `dtype`."""

    dtype: type[np.generic]
    scale: float
    zero: int

    def read(self, b: Builder, integers: str) -> str:
        """Integers → float16 values (on the NPU: the same integers with this encoding)."""
        return b.node("DequantizeLinear", integers, *self._constants(b))

    def write(self, b: Builder, values: str, out: str | None = None) -> str:
        """Float16 values → integers, saturating."""
        return b.node("QuantizeLinear", values, *self._constants(b), out=out)

    def through(self, b: Builder, values: str) -> str:
        """Values after a round trip: what follows an operator that shall run on integers."""
        return self.read(b, self.write(b, values))

    def _constants(self, b: Builder) -> tuple[str, str]:
        return half(b, self.scale), b.constant(self.dtype(self.zero))


TILE = Encoding(np.uint16, tiles.UNIT, tiles.ZERO)  # rows over [-1, 1]
PRODUCT = Encoding(np.uint16, tiles.PRODUCT_UNIT, tiles.ZERO)  # what an integer MatMul returns
WEIGHT_U8 = Encoding(np.uint8, 2.0**-7, 128)  # weights over [-1, 1]; their channel's magnitude multiplies elsewhere
WEIGHT_I8 = Encoding(np.int8, 2.0**-7, 0)

_LEAST_MAGNITUDE = 2.0**-20  # stands in for the magnitude of a row of zeros


def half(b: Builder, value: float) -> str:
    """A float16 scalar."""
    return b.constant(np.float16(value))


def integer_product(b: Builder, rows: str, weight: str, out: str | None = None) -> str:
    """rows (values of a TILE) · weight (values of 8-bit integers) → integers of PRODUCT."""
    return PRODUCT.write(b, b.node("MatMul", rows, weight), out=out)


def row_magnitude(b: Builder, *pieces: str, out: str | None = None) -> str:
    """Largest magnitude of each row over all pieces, [rows, 1] float16, never 0."""
    result = half(b, _LEAST_MAGNITUDE)
    for position, piece in enumerate(pieces):
        largest = b.node("ReduceMax", b.node("Abs", piece), b.integers(-1), keepdims=1)
        result = b.node("Max", largest, result, out=out if position == len(pieces) - 1 else None)
    return result


def quantise_rows(b: Builder, *pieces: str) -> tuple[list[str], str]:
    """Pieces of the same float16 rows → their integers (TILE) and the rows' common magnitude [rows, 1]."""
    magnitude = row_magnitude(b, *pieces)
    return [TILE.write(b, b.node("Div", piece, magnitude)) for piece in pieces], magnitude


def join_columns(b: Builder, encoding: Encoding, pieces: list[str]) -> str:
    """Integers side by side → values [rows, all columns]."""
    values = [encoding.read(b, piece) for piece in pieces]
    return values[0] if len(values) == 1 else encoding.through(b, b.node("Concat", *values, axis=1))
