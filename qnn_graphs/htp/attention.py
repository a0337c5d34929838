"""The attention core in blocks: one graph for any prompt length."""

from __future__ import annotations

import numpy as np
import onnx

from estream.package.chunks import HeadGroups
from qnn_graphs.builder import Builder
from qnn_graphs.htp.quantised import half

MASKED = -30000.0  # added to a score that does not count; also the running maximum before the first block

_EXTRA = 32  # rows added to k, of which the first counts: whole tiles of the NPU


def build_attention(
    groups: HeadGroups, rows: int, keys: int, steps: int = 2, scale: float | None = None
) -> onnx.ModelProto:
    """A block of queries against `steps` blocks of keys and values, joined to what earlier calls gave. One head group.
    scale: of the scores, D ** -0.5 unless given.

    q (`HeadGroups.q_shape`), per step s k.{s}, v.{s}, mask.{s} [T, K] (0, or MASKED), and the running state max, sum
    [kv_heads, R · T, 1], attn (`HeadGroups.attn_shape`) → max_out, sum_out, attn_out. All float16,
    R = heads / kv_heads.
    Before the first call: max = MASKED, sum = attn = 0. attn is always divided by the sum so far, so it stays within
    the range of v. A row that a block masks altogether is forgotten by the first block that does not.

    Scores are computed twice: a float16 score of 30 is off by up to 0.008, and so is its exponential. With the maximum
    as one more component of q, against -1 in k, the second product is rounded after the subtraction: near 0, where it
    counts. All steps share one maximum and one division: each costs operations, and rounds.
    """
    b, (kv, folded, dim) = Builder("attention"), groups.q_shape(rows)
    q = b.input("q", (kv, folded, dim), np.float16)
    largest, total = (b.input(name, (kv, folded, 1), np.float16) for name in ("max", "sum"))
    attn = b.input("attn", groups.attn_shape(rows), np.float16)
    # Before the product: it keeps scores of loud heads in range.
    scaled = b.node("Mul", q, half(b, dim**-0.5 if scale is None else scale))
    minus_one = np.zeros((kv, _EXTRA, keys), np.float16)
    minus_one[:, 0] = -1
    ks, vs, masks = [], [], []
    for step in range(steps):
        k = b.input(f"k.{step}", groups.k_shape(keys), np.float16)
        ks.append(b.node("Concat", k, b.constant(minus_one), axis=1))
        vs.append(b.input(f"v.{step}", groups.v_shape(keys), np.float16))
        masks.append(b.input(f"mask.{step}", (rows, keys), np.float16))

    def scores(column: str) -> list[str]:
        """q · k - column, rounded once, and the masks."""
        wide = b.node("Concat", scaled, column, axis=2)
        return [
            _masked(b, b.node("MatMul", wide, k), mask, (kv, folded, rows, keys))
            for k, mask in zip(ks, masks, strict=True)
        ]

    peak = largest
    for rough in scores(b.constant(np.zeros((kv, folded, _EXTRA), np.float16))):
        peak = b.node("Max", peak, b.node("ReduceMax", rough, b.integers(-1), keepdims=1))
    weights = [_exponential(b, exact) for exact in scores(b.node("Expand", peak, b.integers(kv, folded, _EXTRA)))]
    kept = b.node("Mul", total, _exponential(b, b.node("Sub", largest, peak)))
    total = kept
    for one in weights:
        total = b.node("Add", total, b.node("ReduceSum", one, b.integers(-1), keepdims=1))
    share = _reciprocal(b, total)
    attn = b.node("Mul", attn, b.node("Mul", kept, share))
    for one, v in zip(weights, vs, strict=True):
        attn = b.node("Add", attn, b.node("MatMul", b.node("Mul", one, share), v))
    largest = peak
    b.node("Identity", attn, out=b.output("attn_out", groups.attn_shape(rows), np.float16))
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
