"""Products with call-time weights: the only place that knows how a weight scheme is lowered on a target.

| scheme | target cpu | target reference |
| f32 | MatMul | the same |
| f16 | weight cast to float32, MatMul | the same |
| int8 | rows quantised to uint8 (zero point 128, symmetric, one scale per row), integer product | weight cast, MatMul |
| int4 | nibbles unpacked to int8, exactly, then as int8 | nibbles unpacked to float32, MatMul |

int4 unpacks once per call: 1 ms for a 2048 × 1024 matrix, as much as the integer product of 200 rows.

A symmetric int8 activation would be the natural choice; the CPU provider is an order of magnitude slower at it than
at uint8 × int8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estream.package.layout import INT4_GROUP, INTEGER_SCHEMES
from qnn_graphs.builder import FLOAT, INT8, MICROSOFT, Builder

WEIGHT_DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "int8": np.int8, "int4": np.uint8}

_LARGEST = 127  # quantised magnitudes; 128 is left unused on the negative side
_NIBBLE_ZERO = 8  # the nibble that stands for 0
_LEAST_MAGNITUDE = 1e-30  # stands in for the largest magnitude of a row of zeros


@dataclass(frozen=True)
class Weight:
    """A weight [K, N]: names of its input, of its scales [N] (None: no scale per output channel) and, for int4, of its
    multipliers."""

    name: str
    shape: tuple[int, int]
    scale: str | None = None
    multiplier: str = ""


@dataclass(frozen=True)
class Product:
    """x · weight, still to be multiplied by `row_scales` ([rows, 1] each): whoever multiplies next may fold them in."""

    value: str
    row_scales: tuple[str, ...] = ()


def declare_weight(b: Builder, name: str, shape: tuple[int, int], scheme: str, scale: str | None = None) -> Weight:
    """Declares the graph inputs of a weight [K, N]; `scale` names its scales, which only a quantised scheme has.

    int4: `name` is U8 [K/2, N], and `{name}_multiplier` U8 [K/32, N] (`PanelLayout`).
    """
    rows, columns = shape
    multiplier = ""
    if scheme == "int4":
        multiplier = b.input(f"{name}_multiplier", (rows // INT4_GROUP, columns), np.uint8)
        rows //= 2
    b.input(name, (rows, columns), WEIGHT_DTYPES[scheme])
    if scheme in INTEGER_SCHEMES and scale is not None:
        b.input(scale, (columns,))
    else:
        scale = None
    return Weight(name, shape, scale, multiplier)


def linear(b: Builder, x: str, weight: Weight, scheme: str, target: str, out: str | None = None) -> str:
    """x [rows, K] · weight [K, N] → float32 [rows, N]."""
    if scheme in INTEGER_SCHEMES and target == "cpu":
        return scale_rows(b, product(b, x, weight, scheme, target), out=out)
    return product(b, x, weight, scheme, target, out=out).value


def product(b: Builder, x: str, weight: Weight, scheme: str, target: str, out: str | None = None) -> Product:
    """As `linear`, but leaves factors per row to the caller."""
    if scheme in INTEGER_SCHEMES and target == "cpu":
        integers = _integers(b, weight) if scheme == "int4" else weight.name
        quantised, scale = _quantise_rows(b, x)
        columns = weight.scale if weight.scale is not None else b.scalar(1.0)
        operands = (quantised, integers, b.scalar(1.0), columns, b.constant(np.uint8(_LARGEST + 1)))
        return Product(b.node("MatMulIntegerToFloat", *operands, domain=MICROSOFT, out=out), (scale,))
    matrix = _floats(b, weight, scheme)
    if weight.scale is None:
        return Product(b.node("MatMul", x, matrix, out=out))
    return Product(b.node("Mul", b.node("MatMul", x, matrix), weight.scale, out=out))


def _floats(b: Builder, weight: Weight, scheme: str) -> str:
    """float32 [K, N] of the stored numbers: what remains to be multiplied are scales."""
    if scheme == "f32":
        return weight.name
    if scheme != "int4":
        return b.node("Cast", weight.name, to=FLOAT)
    high = b.node("BitShift", weight.name, b.constant(np.uint8(4)), direction="RIGHT")
    values = b.node("Sub", b.node("Cast", _nibbles(b, weight, high), to=FLOAT), b.scalar(_NIBBLE_ZERO))
    grouped, multiplier = _by_group(b, weight, values, b.node("Cast", weight.multiplier, to=FLOAT))
    return b.node("Reshape", b.node("Mul", grouped, multiplier), b.integers(*weight.shape))


def _integers(b: Builder, weight: Weight) -> str:
    """int8 [K, N] = (nibble - 8) · multiplier: a quantised product with scales of 1, which rounds nothing.

    High nibbles by rounding (byte - 8) / 15.97, right for all 256 bytes by 1/1000 and more: the provider shifts bytes
    at less than half the speed.
    """
    one, none = b.scalar(1.0), b.constant(np.uint8(0))
    division = (weight.name, one, b.constant(np.uint8(8)), b.constant(np.uint8(1)), one, none, b.scalar(15.97), none)
    nibbles = _nibbles(b, weight, b.node("QLinearMul", *division, domain=MICROSOFT))
    grouped, multiplier = _by_group(
        b, weight, b.node("Cast", nibbles, to=INT8), b.node("Cast", weight.multiplier, to=INT8)
    )
    zero = b.constant(np.int8(0))
    operands = (grouped, one, b.constant(np.int8(_NIBBLE_ZERO)), multiplier, one, zero, one, zero)
    return b.node("Reshape", b.node("QLinearMul", *operands, domain=MICROSOFT), b.integers(*weight.shape))


def _nibbles(b: Builder, weight: Weight, high: str) -> str:
    """uint8 [K, N] of 0 … 15, `high` being those of the high nibbles."""
    return b.node("Concat", b.node("BitwiseAnd", weight.name, b.constant(np.uint8(15))), high, axis=0)


def _by_group(b: Builder, weight: Weight, values: str, multiplier: str) -> tuple[str, str]:
    """[K/32, 32, N] and [K/32, 1, N]."""
    rows, columns = weight.shape
    groups = rows // INT4_GROUP
    grouped = b.node("Reshape", values, b.integers(groups, INT4_GROUP, columns))
    return grouped, b.node("Reshape", multiplier, b.integers(groups, 1, columns))


def scale_rows(b: Builder, result: Product, *more: str, out: str | None = None) -> str:
    """The product times its row scales and `more` factors [rows, 1], in one pass over the product."""
    first, *rest = (*more, *result.row_scales)
    factor = first
    for scale in rest:
        factor = b.node("Mul", factor, scale)
    return b.node("Mul", result.value, factor, out=out)


def _quantise_rows(b: Builder, x: str) -> tuple[str, str]:
    """uint8 [rows, K] around 128, and the rows' scales [rows, 1]; once per graph for each x.

    Scales are passed per axis, which makes quantising one pass over x instead of a division and a rounding pass.
    """
    if x not in b.quantised:
        last = b.integers(-1)
        largest = b.node("ReduceMax", x, last, keepdims=1)
        smallest = b.node("ReduceMin", x, last, keepdims=1)
        magnitude = b.node("Max", largest, b.node("Neg", smallest), b.scalar(_LEAST_MAGNITUDE))
        scale = b.node("Mul", magnitude, b.scalar(1.0 / _LARGEST))
        scales = b.node("Reshape", scale, b.integers(-1))
        zero_points = b.node("Expand", b.constant(np.uint8(_LARGEST + 1)), b.node("Shape", scales))
        b.quantised[x] = (b.node("QuantizeLinear", x, scales, zero_points, axis=0), scale)
    return b.quantised[x]
