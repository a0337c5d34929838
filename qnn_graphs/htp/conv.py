"""The gated short convolution on the HTP: it begins after the norm and ends where attention does. Blocks of T rows."""

from __future__ import annotations

import numpy as np
import onnx

from estream.models.base import Architecture
from estream.package.chunks import CONV_LINEARS, chunk_names, head_groups, linear_chunks
from qnn_graphs.builder import Builder
from qnn_graphs.htp.dense import group_columns, products
from qnn_graphs.htp.weights import column_vectors


def build_conv(arch: Architecture, scheme: str, rows: int) -> onnx.ModelProto:
    """normed float16 [T, H], weights, past.{g} [L - 1, W] → attn.{g} (`HeadGroups.attn_shape`), past_out.{g}; W: of a
    head group.

    The arithmetic is `qnn_graphs.conv`'s. Weights conv_b, conv_c, conv_x as q in column chunks; taps conv.{n} [1, W],
    the pieces of conv [L, H] row by row: n = tap · groups + g. A group's columns are convolved by themselves, so that
    all between projections and output stays on chip.
    """
    b, groups, taps = Builder("conv"), head_groups(arch.attention), arch.conv_kernel
    if taps > rows:
        raise ValueError(f"a convolution of {taps} taps in blocks of {rows} rows")
    normed = b.input("normed", (rows, arch.hidden), np.float16)
    square = arch.hidden, arch.hidden
    projected = [
        products(b, normed, name, square, scheme, linear_chunks(arch, name, arch.hidden, scheme), bias=arch.conv_bias)
        for name in CONV_LINEARS
    ]
    count, width = groups.groups, arch.hidden // groups.groups
    weights = [b.input(name, (1, width), np.float16) for name in chunk_names("conv", taps * count)]
    biases = column_vectors(b, "conv.bias", arch.hidden, count) if arch.conv_bias else []
    for group in range(count):
        gate, out, x = (group_columns(b, pieces, group, count) for pieces in projected)
        past = b.input(f"past.{group}", (taps - 1, width), np.float16)
        z = b.node("Mul", gate, x)
        whole = b.node("Concat", past, z, axis=0)
        total = b.node("Mul", z, weights[(taps - 1) * count + group])
        for tap in range(taps - 1):
            moved = _rows(b, whole, tap, rows)
            total = b.node("Add", total, b.node("Mul", moved, weights[tap * count + group]))
        if biases:
            total = b.node("Add", total, biases[group])
        heads = b.node("Reshape", b.node("Mul", out, total), b.integers(rows, groups.heads, groups.v_dim))
        folded, shape = b.node("Transpose", heads, perm=(1, 0, 2)), groups.attn_shape(rows)
        b.node("Reshape", folded, b.integers(*shape), out=b.output(f"attn.{group}", shape, np.float16))
        last = b.output(f"past_out.{group}", (taps - 1, width), np.float16)
        _rows(b, whole, rows, taps - 1, out=last)
    return b.model()


def _rows(b: Builder, x: str, start: int, count: int, out: str | None = None) -> str:
    return b.node("Slice", x, b.integers(start), b.integers(start + count), b.integers(0), out=out)
