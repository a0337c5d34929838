"""One expert panel over a tile: SwiGLU times the rows' gates. Routed, shared and dense FFNs alike."""

from __future__ import annotations

import numpy as np
import onnx

from estream.models.base import Clamped
from estream.package.layout import INTEGER_SCHEMES, STEP, PanelLayout
from qnn_graphs.builder import FLOAT, MICROSOFT, ROWS, Builder
from qnn_graphs.linear import Product, Weight, declare_weight, integer_path, join, product, quantised_input, scale_rows


def build_expert(panel: PanelLayout, target: str, clamped: Clamped | None = None) -> onnx.ModelProto:
    """x [rows, H] (on the integer path uint8, with x_scale), gates [rows, 1], the panel's parts (`PanelLayout`) →
    y [rows, H].

    A factor per row commutes with the down product and with its quantisation, so the gates and every row scale but
    the gate projection's meet in one [rows, 1] vector that is applied once, to y.
    """
    b, hidden, width, scheme, chunks = Builder("expert"), panel.hidden, panel.width, panel.scheme, panel.chunks
    integers = integer_path(scheme, target)
    x = quantised_input(b, "x", (ROWS, hidden)) if integers else b.input("x", (ROWS, hidden))
    gates = b.input("gates", (ROWS, 1))
    gate = declare_weight(b, "gate", (hidden, width), scheme, target, chunks, scale="gate_scale")
    of_up = ("mid_scale", 2) if clamped is None else ("up_scale", 1)
    up = declare_weight(b, "up", (hidden, width), scheme, target, chunks, scale=of_up[0], factors=of_up[1])
    down = declare_weight(b, "down", (width, hidden), scheme, target, chunks)
    if clamped is not None:
        return _clamped(b, x, gates, (gate, up, down), panel, target, clamped)
    gated, raised = product(b, x, gate, scheme, target), product(b, x, up, scheme, target)
    middle = []
    for g, u in zip(gated.values, raised.values, strict=True):
        scaled = scale_rows(b, Product((g,), gated.row_scales)) if gated.row_scales else g
        middle.append(b.node("Mul", silu(b, scaled), u))
    lowered = product(b, join(b, middle), down, scheme, target)
    scale_rows(b, lowered, gates, *raised.row_scales, out=b.output("y", (ROWS, hidden)))
    return b.model()


def _clamped(
    b: Builder,
    x: str,
    gates: str,
    weights: tuple[Weight, Weight, Weight],
    panel: PanelLayout,
    target: str,
    form: Clamped,
) -> onnx.ModelProto:
    """`Clamped`: nothing commutes with the clamps and biases, so every scale is applied where it arises."""
    scheme, chunks, (gate, up, down) = panel.scheme, panel.chunks, weights

    def whole(name: str, size: int) -> str:
        """A vector in float32."""
        stored = b.input(name, (size,), np.float32 if scheme == "f32" else np.float16)
        return stored if scheme == "f32" else b.node("Cast", stored, to=FLOAT)

    def vector(name: str, size: int) -> list[str]:
        """Its column chunks."""
        one = whole(name, size)
        return [one] if chunks == 1 else b.nodes("Split", one, outs=(None,) * chunks, axis=0, num_outputs=chunks)

    def biased(weight: Weight, biases: list[str]) -> list[str]:
        result = product(b, x, weight, scheme, target)
        values = [scale_rows(b, Product((v,), result.row_scales)) if result.row_scales else v for v in result.values]
        return [b.node("Add", value, bias) for value, bias in zip(values, biases, strict=True)]

    limit, lowest = b.scalar(form.limit), b.scalar(-form.limit)
    middle = []
    for g, u in zip(
        biased(gate, vector("gate_bias", panel.width)), biased(up, vector("up_bias", panel.width)), strict=True
    ):
        gated = b.node("QuickGelu", b.node("Min", g, limit), domain=MICROSOFT, alpha=form.alpha)
        raised = b.node("Add", b.node("Clip", u, lowest, limit), b.scalar(1.0))
        middle.append(b.node("Mul", gated, raised))
    if scheme in INTEGER_SCHEMES:
        scales = vector("down_scale", panel.width)
        steps = [b.node("Mul", scale, b.scalar(STEP)) for scale in scales]
        middle = [b.node("Mul", one, step) for one, step in zip(middle, steps, strict=True)]
    lowered = product(b, join(b, middle), down, scheme, target)
    values = scale_rows(b, lowered) if lowered.row_scales else join(b, lowered.values)
    bias = whole("down_bias", panel.hidden)
    out = b.output("y", (ROWS, panel.hidden))
    b.node("Mul", b.node("Add", values, bias), gates, out=out)
    return b.model()


def silu(b: Builder, x: str) -> str:
    """x · sigmoid(x) in one pass: QuickGelu with a slope of 1."""
    return b.node("QuickGelu", x, domain=MICROSOFT, alpha=1.0)
