"""The attention core in blocks: one graph for any prompt length."""

from __future__ import annotations

import numpy as np
import onnx

from estream.package.chunks import HeadGroups
from qnn_graphs.builder import Builder
from qnn_graphs.htp.quantised import half

MASKED = -30000.0  # added to a score that does not count; also the running maximum before the first block

_SCORES = 1 << 18  # scores at a time: twice as many spill


def build_attention(groups: HeadGroups, rows: int, keys: int, steps: int = 2) -> onnx.ModelProto:
    """A block of queries against `steps` blocks of keys and values, joined to what earlier calls gave. One head group.

    q (`HeadGroups.q_shape`), per step s k.{s}, v.{s}, mask.{s} [T, K] (0, or MASKED), and the running state max, sum
    [kv_heads, R · T, 1], attn (q's shape) → max_out, sum_out, attn_out. All float16, R = heads / kv_heads.
    Before the first call: max = MASKED, sum = attn = 0. attn is always divided by the sum so far, so it stays within
    the range of v. Blocks share one maximum and one division as long as their scores fit on chip together: each costs
    operations, and rounds. A row that a block masks altogether is forgotten by the first block that does not.
    """
    b, (kv, folded, dim) = Builder("attention"), groups.q_shape(rows)
    q = b.input("q", (kv, folded, dim), np.float16)
    largest, total = (b.input(name, (kv, folded, 1), np.float16) for name in ("max", "sum"))
    attn = b.input("attn", (kv, folded, dim), np.float16)
    scaled = b.node("Mul", q, half(b, dim**-0.5))  # before the product: it keeps scores of loud heads in range
    together = max(1, _SCORES // (kv * folded * keys))
    for first in range(0, steps, together):
        peak, blocks = largest, []
        for step in range(first, min(first + together, steps)):
            k = b.input(f"k.{step}", groups.k_shape(keys), np.float16)
            v = b.input(f"v.{step}", groups.v_shape(keys), np.float16)
            mask = b.input(f"mask.{step}", (rows, keys), np.float16)
            scores = _masked(b, b.node("MatMul", scaled, k), mask, (kv, folded, rows, keys))
            peak = b.node("Max", peak, b.node("ReduceMax", scores, b.integers(-1), keepdims=1))
            blocks.append((scores, v))
        weights = [_exponential(b, b.node("Sub", scores, peak)) for scores, _ in blocks]
        kept = b.node("Mul", total, _exponential(b, b.node("Sub", largest, peak)))
        total = kept
        for one in weights:
            total = b.node("Add", total, b.node("ReduceSum", one, b.integers(-1), keepdims=1))
        share = _reciprocal(b, total)
        attn = b.node("Mul", attn, b.node("Mul", kept, share))
        for one, (_, v) in zip(weights, blocks, strict=True):
            attn = b.node("Add", attn, b.node("MatMul", b.node("Mul", one, share), v))
        largest = peak
    b.node("Identity", attn, out=b.output("attn_out", (kv, folded, dim), np.float16))
    b.node("Identity", largest, out=b.output("max_out", (kv, folded, 1), np.float16))
    b.node("Identity", total, out=b.output("sum_out", (kv, folded, 1), np.float16))
    return b.model()


def _reciprocal(b: Builder, x: str) -> str:
    """1 / x. The HTP's own is 3e-4 too small, always: one step of Newton's method makes it three times better."""
    rough = b.node("Div", half(b, 1.0), x)
    return b.node("Add", rough, b.node("Mul", rough, b.node("Sub", half(b, 1.0), b.node("Mul", x, rough))))


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
