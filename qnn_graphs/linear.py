"""Products with call-time weights: the only place that knows how a weight scheme is lowered on a target.

| scheme | targets cpu and cpu-u8 | target reference |
| f32 | MatMul | the same |
| f16 | weight cast to float32, MatMul | the same |
| int8 | rows quantised to uint8 (zero point 128, symmetric, one scale per row), integer product | weight cast, MatMul |
| int4 | nibbles unpacked to int8, exactly, then as int8 | nibbles unpacked to float32, MatMul |

A weight comes in column chunks: one product for each, side by side afterwards. Packages hold integers + 128, which is
what target cpu-u8 takes. Targets cpu and reference take two's complement (the engine flips the top bits in memory):
where there are dot-product instructions, uint8 × uint8 is four times slower than uint8 × int8. x86 processors without
them need cpu-u8: their uint8 × int8 product adds pairs in 16 bits, which saturates.

int4 unpacks once per call: 1 ms for a 2048 × 1024 matrix, as much as the integer product of 200 rows.

A symmetric int8 activation would be the natural choice; the CPU provider is an order of magnitude slower at it than
at uint8 × int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estream.package.chunks import chunk_names
from estream.package.layout import INT4_GROUP, INTEGER_GRAPHS, INTEGER_SCHEMES, STEP, ZERO_POINT
from qnn_graphs.builder import FLOAT, INT8, MICROSOFT, Builder

UNSIGNED = "cpu-u8"  # the target whose 8-bit products take uint8 weights
WEIGHT_DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "int8": np.int8, "int4": np.uint8}

_LARGEST = 127  # quantised magnitudes; 128 is left unused on the negative side
_NIBBLE_ZERO = 8  # the nibble that stands for 0
_LEAST_MAGNITUDE = 1e-30  # stands in for the largest magnitude of a row of zeros


@dataclass(frozen=True)
class Chunk:
    """A column chunk [K, N/C] of a weight: names of its input, of its scales float32 [N/C] (None: no scale per output
    channel) and, for int4, of its multipliers."""

    name: str
    shape: tuple[int, int]
    scale: str | None = None
    multiplier: str = ""


Weight = tuple[Chunk, ...]


@dataclass(frozen=True)
class Product:
    """x · weight by column chunks, still to be multiplied by `row_scales` ([rows, 1] each): whoever multiplies next may
    fold them in."""

    values: tuple[str, ...]
    row_scales: tuple[str, ...] = ()


def declare_weight(
    b: Builder,
    name: str,
    shape: tuple[int, int],
    scheme: str,
    target: str,
    chunks: int = 1,
    *,
    scale: str | None = None,
    factors: int = 1,
) -> Weight:
    """Declares the graph inputs of a weight [K, N] in `chunks` column chunks (`chunk_names`).

    `scale` names its magnitudes, float16 [N], which only a quantised scheme has: the products of `factors` weights'.
    int4: chunks are U8 [K/2, N/C], and `{name}_multiplier` U8 [K/32, N/C] (`PanelLayout`).
    """
    rows, columns = shape[0], shape[1] // chunks
    names, multipliers = chunk_names(name, chunks), [""] * chunks
    if scheme == "int4":
        multipliers = [
            b.input(key, (rows // INT4_GROUP, columns), np.uint8) for key in chunk_names(f"{name}_multiplier", chunks)
        ]
    for key in names:
        dtype = np.uint8 if target == UNSIGNED and scheme == "int8" else WEIGHT_DTYPES[scheme]
        b.input(key, (rows // 2 if scheme == "int4" else rows, columns), dtype)
    scales: list[str | None] = [None] * chunks
    if scheme in INTEGER_SCHEMES and scale is not None:
        magnitudes = b.node("Cast", b.input(scale, (shape[1],), np.float16), to=FLOAT)
        whole = b.node("Mul", magnitudes, b.scalar(STEP**factors))
        scales = [whole]
        if chunks > 1:
            scales = [*b.nodes("Split", whole, outs=(None,) * chunks, axis=0, num_outputs=chunks)]
    return tuple(
        Chunk(key, (rows, columns), own, multiplier)
        for key, own, multiplier in zip(names, scales, multipliers, strict=True)
    )


def linear(b: Builder, x: str, weight: Weight, scheme: str, target: str, out: str | None = None) -> str:
    """x [rows, K] · weight [K, N] → float32 [rows, N]."""
    result = product(b, x, weight, scheme, target, out=None if integer_path(scheme, target) else out)
    if result.row_scales:
        return scale_rows(b, result, out=out)
    return join(b, result.values, out=out)


def product(b: Builder, x: str, weight: Weight, scheme: str, target: str, out: str | None = None) -> Product:
    """As `linear`, but leaves factors per row, and putting chunks side by side, to the caller.

    `out` names the result of a weight in one chunk."""
    if len(weight) > 1:
        out = None
    if integer_path(scheme, target):
        quantised, row_scale = quantise_rows(b, x)
        values = tuple(_integer_product(b, quantised, chunk, scheme, target, out) for chunk in weight)
        return Product(values, (row_scale,))
    return Product(tuple(_float_product(b, x, chunk, scheme, out) for chunk in weight))


def integer_path(scheme: str, target: str) -> bool:
    """Whether products with weights of the scheme are integer products of quantised rows."""
    return scheme in INTEGER_SCHEMES and target in INTEGER_GRAPHS


def _integer_product(b: Builder, quantised: str, chunk: Chunk, scheme: str, target: str, out: str | None) -> str:
    integers = _integers(b, chunk, target) if scheme == "int4" else chunk.name
    columns = chunk.scale if chunk.scale is not None else b.scalar(1.0)
    operands = [quantised, integers, b.scalar(1.0), columns, b.constant(np.uint8(ZERO_POINT))]
    if target == UNSIGNED:
        operands.append(b.constant(np.uint8(ZERO_POINT)))
    return b.node("MatMulIntegerToFloat", *operands, domain=MICROSOFT, out=out)


def _float_product(b: Builder, x: str, chunk: Chunk, scheme: str, out: str | None) -> str:
    matrix = _floats(b, chunk, scheme)
    if chunk.scale is None:
        return b.node("MatMul", x, matrix, out=out)
    return b.node("Mul", b.node("MatMul", x, matrix), chunk.scale, out=out)


def join(b: Builder, values: Sequence[str], out: str | None = None) -> str:
    """Column chunks [rows, N/C] side by side; one that is alone already has its name."""
    return values[0] if len(values) == 1 else b.node("Concat", *values, axis=1, out=out)


def _floats(b: Builder, weight: Chunk, scheme: str) -> str:
    """float32 [K, N] of the stored numbers: what remains to be multiplied are scales."""
    if scheme == "f32":
        return weight.name
    if scheme != "int4":
        return b.node("Cast", weight.name, to=FLOAT)
    high = b.node("BitShift", weight.name, b.constant(np.uint8(4)), direction="RIGHT")
    values = b.node("Sub", b.node("Cast", _nibbles(b, weight, high), to=FLOAT), b.scalar(_NIBBLE_ZERO))
    grouped, multiplier = _by_group(b, weight, values, b.node("Cast", weight.multiplier, to=FLOAT))
    return b.node("Reshape", b.node("Mul", grouped, multiplier), b.integers(*weight.shape))


def _integers(b: Builder, weight: Chunk, target: str) -> str:
    """int8 [K, N] = (nibble - 8) · multiplier, on cpu-u8 that + 128: a quantised product with scales of 1, which
    rounds nothing.

    High nibbles by rounding (byte - 8) / 15.97, right for all 256 bytes by 1/1000 and more: the provider shifts bytes
    at less than half the speed.
    """
    one, none = b.scalar(1.0), b.constant(np.uint8(0))
    division = (weight.name, one, b.constant(np.uint8(8)), b.constant(np.uint8(1)), one, none, b.scalar(15.97), none)
    nibbles = _nibbles(b, weight, b.node("QLinearMul", *division, domain=MICROSOFT))
    multipliers = weight.multiplier
    if target != UNSIGNED:
        nibbles, multipliers = b.node("Cast", nibbles, to=INT8), b.node("Cast", multipliers, to=INT8)
    grouped, multiplier = _by_group(b, weight, nibbles, multipliers)
    kind, zero_point = (np.uint8, ZERO_POINT) if target == UNSIGNED else (np.int8, 0)
    zeros = [b.constant(kind(zero)) for zero in (_NIBBLE_ZERO, 0, zero_point)]
    operands = (grouped, one, zeros[0], multiplier, one, zeros[1], one, zeros[2])
    return b.node("Reshape", b.node("QLinearMul", *operands, domain=MICROSOFT), b.integers(*weight.shape))


def _nibbles(b: Builder, weight: Chunk, high: str) -> str:
    """uint8 [K, N] of 0 … 15, `high` being those of the high nibbles."""
    return b.node("Concat", b.node("BitwiseAnd", weight.name, b.constant(np.uint8(15))), high, axis=0)


def _by_group(b: Builder, weight: Chunk, values: str, multiplier: str) -> tuple[str, str]:
    """[K/32, 32, N] and [K/32, 1, N]."""
    rows, columns = weight.shape
    groups = rows // INT4_GROUP
    grouped = b.node("Reshape", values, b.integers(groups, INT4_GROUP, columns))
    return grouped, b.node("Reshape", multiplier, b.integers(groups, 1, columns))


def scale_rows(b: Builder, result: Product, *more: str, out: str | None = None) -> str:
    """The whole product times its row scales and `more` factors [rows, 1], in one pass over it."""
    first, *rest = (*more, *result.row_scales)
    factor = first
    for scale in rest:
        factor = b.node("Mul", factor, scale)
    return b.node("Mul", join(b, result.values), factor, out=out)


def quantised_input(b: Builder, name: str, shape: tuple[str, int]) -> str:
    """Declares an input that comes as `quantise_rows` gives it: `name` uint8 [rows, K], `{name}_scale` [rows, 1]."""
    x = b.input(name, shape, np.uint8)
    b.quantised[x] = (x, b.input(f"{name}_scale", (shape[0], 1)))
    return x


def quantise_rows(b: Builder, x: str) -> tuple[str, str]:
    """uint8 [rows, K] around 128, and the rows' scales [rows, 1]; once per graph for each x, and not at all where the
    graph gets x so (`quantised_input`).

    Scales are passed per axis, which makes quantising one pass over x instead of a division and a rounding pass.
    """
    if x not in b.quantised:
        last = b.integers(-1)
        largest = b.node("ReduceMax", x, last, keepdims=1)
        smallest = b.node("ReduceMin", x, last, keepdims=1)
        magnitude = b.node("Max", largest, b.node("Neg", smallest), b.scalar(_LEAST_MAGNITUDE))
        scale = b.node("Mul", magnitude, b.scalar(1.0 / _LARGEST))
        scales = b.node("Reshape", scale, b.integers(-1))
        zero_points = b.node("Expand", b.constant(np.uint8(ZERO_POINT)), b.node("Shape", scales))
        b.quantised[x] = (b.node("QuantizeLinear", x, scales, zero_points, axis=0), scale)
    return b.quantised[x]
