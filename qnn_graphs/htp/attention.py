"""The attention core in blocks: one graph for any prompt length."""

from __future__ import annotations

import numpy as np
import onnx

from estream.package.chunks import HeadGroups
from qnn_graphs.builder import Builder
from qnn_graphs.htp.quantised import half

MASKED = -30000.0  # added to a score that does not count; also the running maximum before the first block


def build_attention(groups: HeadGroups, rows: int, keys: int, steps: int = 2) -> onnx.ModelProto:
    """A block of queries against `steps` blocks of keys and values, joined to what earlier calls gave. One head group.

    q (`HeadGroups.q_shape`), per step s k.{s}, v.{s}, mask.{s} [T, K] (0, or MASKED), and the running state max, sum
    [kv_heads, R · T, 1], attn (q's shape) → max_out, sum_out, attn_out. All float16, R = heads / kv_heads.
    Before the first call: max = MASKED, sum = attn = 0. attn is divided by the sum at every step, so it stays within
    the range of v. A row that a block masks altogether is forgotten by the first block that does not.
    """
    b, (kv, folded, dim) = Builder("attention"), groups.q_shape(rows)
    q = b.input("q", (kv, folded, dim), np.float16)
    largest, total = (b.input(name, (kv, folded, 1), np.float16) for name in ("max", "sum"))
    attn = b.input("attn", (kv, folded, dim), np.float16)
    scaled = b.node("Mul", q, half(b, dim**-0.5))  # before the product: it keeps scores of loud heads in range
    for step in range(steps):
        k = b.input(f"k.{step}", groups.k_shape(keys), np.float16)
        v = b.input(f"v.{step}", groups.v_shape(keys), np.float16)
        mask = b.input(f"mask.{step}", (rows, keys), np.float16)
        scores = _masked(b, b.node("MatMul", scaled, k), mask, (kv, folded, rows, keys))
        peak = b.node("Max", largest, b.node("ReduceMax", scores, b.integers(-1), keepdims=1))
        weights = _exponential(b, b.node("Sub", scores, peak))
        kept = b.node("Mul", total, _exponential(b, b.node("Sub", largest, peak)))
        total = b.node("Add", kept, b.node("ReduceSum", weights, b.integers(-1), keepdims=1))
        remaining = b.node("Mul", attn, b.node("Div", kept, total))
        attn = b.node("Add", remaining, b.node("MatMul", b.node("Div", weights, total), v))
        largest = peak
    b.node("Identity", attn, out=b.output("attn_out", (kv, folded, dim), np.float16))
    b.node("Identity", largest, out=b.output("max_out", (kv, folded, 1), np.float16))
    b.node("Identity", total, out=b.output("sum_out", (kv, folded, 1), np.float16))
    return b.model()


def _exponential(b: Builder, x: str) -> str:
    """exp(x) for x <= 0. The HTP's own gives NaN below -88; at -80 it is 0 in float16 as it should be."""
    return b.node("Exp", b.node("Max", x, half(b, -80.0)))


def _masked(b: Builder, scores: str, mask: str, sizes: tuple[int, int, int, int]) -> str:
    """The mask of a token row goes to all query heads folded into rows."""
    kv, folded, rows, keys = sizes
    if folded == rows:
        return b.node("Add", scores, mask)
    split = b.node("Reshape", scores, b.integers(kv, folded // rows, rows, keys))
    return b.node("Reshape", b.node("Add", split, mask), b.integers(kv, folded, keys))
