"""One expert panel over a tile: SwiGLU times the rows' gates. Routed, shared and dense FFNs alike."""

from __future__ import annotations

import onnx

from estream.package.layout import PanelLayout
from qnn_graphs.builder import MICROSOFT, ROWS, Builder
from qnn_graphs.linear import Product, declare_weight, integer_path, join, product, quantised_input, scale_rows


def build_expert(panel: PanelLayout, target: str) -> onnx.ModelProto:
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
    up = declare_weight(b, "up", (hidden, width), scheme, target, chunks, scale="mid_scale", factors=2)
    down = declare_weight(b, "down", (width, hidden), scheme, target, chunks)
    gated, raised = product(b, x, gate, scheme, target), product(b, x, up, scheme, target)
    middle = []
    for g, u in zip(gated.values, raised.values, strict=True):
        scaled = scale_rows(b, Product((g,), gated.row_scales)) if gated.row_scales else g
        middle.append(b.node("Mul", silu(b, scaled), u))
    lowered = product(b, join(b, middle), down, scheme, target)
    scale_rows(b, lowered, gates, *raised.row_scales, out=b.output("y", (ROWS, hidden)))
    return b.model()


def silu(b: Builder, x: str) -> str:
    """x · sigmoid(x) in one pass: QuickGelu with a slope of 1."""
    return b.node("QuickGelu", x, domain=MICROSOFT, alpha=1.0)
