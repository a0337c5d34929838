"""Moving rows between a table and a tile. No arithmetic but the sum."""

from __future__ import annotations

import numpy as np
import onnx

from qnn_graphs.builder import ROWS, TABLE_ROWS, Builder


def build_gather(hidden: int) -> onnx.ModelProto:
    """table [table_rows, H], index int64 [rows] → x [rows, H]."""
    b = Builder("gather")
    table, index = b.input("table", (TABLE_ROWS, hidden)), b.input("index", (ROWS,), np.int64)
    b.node("Gather", table, index, axis=0, out=b.output("x", (ROWS, hidden)))
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
