"""Products with call-time weights: the only place that knows how a weight scheme is lowered on a target.

| scheme | target cpu | target reference |
| f32 | MatMul | the same |
| f16 | weight cast to float32, MatMul | the same |
| int8 | rows quantised to uint8 (zero point 128, symmetric, one scale per row), integer product | weight cast, MatMul |

A symmetric int8 activation would be the natural choice; the CPU provider is an order of magnitude slower at it than
at uint8 × int8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qnn_graphs.builder import MICROSOFT, Builder

WEIGHT_DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "int8": np.int8}

_LARGEST = 127  # quantised magnitudes; 128 is left unused on the negative side
_LEAST_MAGNITUDE = 1e-30  # stands in for the largest magnitude of a row of zeros


@dataclass(frozen=True)
class Weight:
    """Input names of a weight [K, N] and of its scales [N] (None: no scale per output channel)."""

    name: str
    scale: str | None = None


@dataclass(frozen=True)
class Product:
    """x · weight, still to be multiplied by `row_scales` ([rows, 1] each): whoever multiplies next may fold them in."""

    value: str
    row_scales: tuple[str, ...] = ()


def declare_weight(b: Builder, name: str, shape: tuple[int, int], scheme: str, scale: str | None = None) -> Weight:
    """Declares the graph inputs of a weight [K, N]; `scale` names its scales, which only a quantised scheme has."""
    b.input(name, shape, WEIGHT_DTYPES[scheme])
    if scheme != "int8" or scale is None:
        return Weight(name)
    return Weight(name, b.input(scale, (shape[1],)))


def linear(b: Builder, x: str, weight: Weight, scheme: str, target: str, out: str | None = None) -> str:
    """x [rows, K] · weight [K, N] → float32 [rows, N]."""
    if scheme == "int8" and target == "cpu":
        return scale_rows(b, product(b, x, weight, scheme, target), out=out)
    return product(b, x, weight, scheme, target, out=out).value


def product(b: Builder, x: str, weight: Weight, scheme: str, target: str, out: str | None = None) -> Product:
    """As `linear`, but leaves factors per row to the caller."""
    if scheme == "int8" and target == "cpu":
        quantised, scale = _quantise_rows(b, x)
        columns = weight.scale if weight.scale is not None else b.scalar(1.0)
        operands = (quantised, weight.name, b.scalar(1.0), columns, b.constant(np.uint8(_LARGEST + 1)))
        return Product(b.node("MatMulIntegerToFloat", *operands, domain=MICROSOFT, out=out), (scale,))
    matrix = weight.name if scheme == "f32" else b.node("Cast", weight.name, to=1)
    if weight.scale is None:
        return Product(b.node("MatMul", x, matrix, out=out))
    return Product(b.node("Mul", b.node("MatMul", x, matrix), weight.scale, out=out))


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
