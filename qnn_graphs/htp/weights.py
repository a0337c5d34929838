"""Call-time weights on the HTP: what each scheme binds, and how its bytes become an operand of a MatMul.

| scheme | bytes bound for a weight [K, N] | operand |
| f16 | F16 [K, N] | as it is |
| int8 | U8 [K, N], zero point 128 (or I8) over [-1, 1] | the 8-bit integers themselves |
| int4 | U8 [K/2, N] pairs, U8 [K/64, N] multipliers of the low half's groups, and of the high half's | 8-bit integers |

int8 and int4 weights are normalised: a channel's magnitude is a factor that the graph applies to activations.

int4: weight = q · multiplier / 128 with q in -7 … 7 and an integer multiplier in 1 … 18 per group of 32 along K. A byte
holds 136 + q[k] + 16 · q[k + K/2]: rounding (byte - 136) / 16 gives the high half, the remainder is the low half, and
no byte falls on a tie. Because multipliers are integers the unpacked weight is an exact 8-bit integer, and unpacking
never leaves 8 bits: far fewer vector operations than in float16, and half of its on-chip memory.
A QNN tensor has one encoding: the same integers cannot be read in two ways, which is what this arithmetic respects.
"""

from __future__ import annotations

import numpy as np

from estream.package.chunks import chunk_names
from qnn_graphs.builder import Builder
from qnn_graphs.htp.quantised import WEIGHT_I8, WEIGHT_U8, Encoding

SCHEMES = ("f16", "int8", "int4")
GROUP = 32

_PAIR = Encoding(np.uint8, 1.0, 136)
_LOW = Encoding(np.uint8, 1.0, 8)
_HIGH = Encoding(np.uint8, 16.0, 8)
_LOW_MULTIPLIER = Encoding(np.uint8, 2.0**-7, 0)
_HIGH_MULTIPLIER = Encoding(np.uint8, 2.0**-11, 0)


def weight_operand(b: Builder, name: str, shape: tuple[int, int], scheme: str, *, signed: bool = False) -> str:
    """Declares the inputs of a weight [K, N] and returns what MatMul takes.

    Inputs: `name`, and for int4 `{name}_low` and `{name}_high`, multipliers [K/64, N] each.
    `signed`: int8 bytes are I8 instead of U8, at twice the vector operations.

    Raises:
        ValueError: an unknown scheme, or K that int4 groups do not divide.
    """
    if scheme == "f16":
        return b.input(name, shape, np.float16)
    if scheme == "int8":
        encoding = WEIGHT_I8 if signed else WEIGHT_U8
        return encoding.read(b, b.input(name, shape, encoding.dtype))
    if scheme != "int4":
        raise ValueError(f"weight scheme {scheme!r} is none of {SCHEMES} on the HTP")
    rows, columns = shape
    if rows % (2 * GROUP):
        raise ValueError(f"weight {name}: {rows} rows do not divide into two halves of int4 groups of {GROUP}")
    pairs = _PAIR.read(b, b.input(name, (rows // 2, columns), np.uint8))
    high = _HIGH.through(b, pairs)
    low = _LOW.through(b, b.node("Sub", pairs, high))
    halves = (("low", low, _LOW, _LOW_MULTIPLIER), ("high", high, _HIGH, _HIGH_MULTIPLIER))
    scaled = []
    for half, integers, encoding, unit in halves:
        groups = rows // 2 // GROUP
        multiplier = unit.read(b, b.input(f"{name}_{half}", (groups, columns), np.uint8))
        factor = unit.through(b, b.node("Reshape", multiplier, b.integers(groups, 1, columns)))
        grouped = encoding.through(b, b.node("Reshape", integers, b.integers(groups, GROUP, columns)))
        product = WEIGHT_U8.through(b, b.node("Mul", grouped, factor))
        scaled.append(WEIGHT_U8.through(b, b.node("Reshape", product, b.integers(rows // 2, columns))))
    return WEIGHT_U8.through(b, b.node("Concat", *scaled, axis=0))


def column_vectors(b: Builder, name: str, width: int, chunks: int) -> list[str]:
    """Declares a float16 vector over a matrix's columns in the matrix's chunks: a row [1, width / chunks] each.

    Inputs of their own: a Split of one input costs a dozen vector operations per slot.
    """
    return [b.input(key, (1, width // chunks), np.float16) for key in chunk_names(name, chunks)]
