"""Moving rows between a table and a tile, and quantising the table that integer products gather from."""

from __future__ import annotations

import numpy as np
import onnx

from qnn_graphs.builder import ROWS, TABLE_ROWS, Builder
from qnn_graphs.linear import quantise_rows


def build_gather(hidden: int, *, quantised: bool) -> onnx.ModelProto:
    """table [table_rows, H], index int64 [rows] → x [rows, H]. quantised: both uint8, and table_scale → x_scale, one
    float32 per row."""
    b, dtype = Builder("gather"), np.uint8 if quantised else np.float32
    table, index = b.input("table", (TABLE_ROWS, hidden), dtype), b.input("index", (ROWS,), np.int64)
    b.node("Gather", table, index, axis=0, out=b.output("x", (ROWS, hidden), dtype))
    if quantised:
        scales = b.input("table_scale", (TABLE_ROWS, 1))
        b.node("Gather", scales, index, axis=0, out=b.output("x_scale", (ROWS, 1)))
    return b.model()


def build_quantise(hidden: int) -> onnx.ModelProto:
    """normed [table_rows, H] → table uint8 [table_rows, H], table_scale [table_rows, 1].

    Once per layer: each token is gathered top-k times, and gathering bytes moves a quarter.
    """
    b = Builder("quantise")
    rows, scale = quantise_rows(b, b.input("normed", (TABLE_ROWS, hidden)))
    b.node("Identity", rows, out=b.output("table", (TABLE_ROWS, hidden), np.uint8))
    b.node("Identity", scale, out=b.output("table_scale", (TABLE_ROWS, 1)))
    return b.model()


def build_scatter_add(hidden: int) -> onnx.ModelProto:
    """table_out[index] = table[index] + y; index int64 [rows, 1], without repeats.

    Bound at one address, table and table_out are one: only the indexed rows are touched. int64 is the only type that
    ScatterND takes, and `gather` takes the same numbers.
    """
    b = Builder("scatter_add")
    table, index = b.input("table", (TABLE_ROWS, hidden)), b.input("index", (ROWS, 1), np.int64)
    out = b.output("table_out", (TABLE_ROWS, hidden))
    b.node("ScatterND", table, index, b.input("y", (ROWS, hidden)), reduction="add", out=out)
    return b.model()
