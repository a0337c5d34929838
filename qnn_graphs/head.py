"""The output head, one column slice at a time, and the norm before it."""

from __future__ import annotations

import onnx

from estream.models.base import Architecture
from estream.package.chunks import linear_chunks
from qnn_graphs.builder import ROWS, Builder
from qnn_graphs.linear import declare_weight, linear
from qnn_graphs.norm import residual_norm


def build_final_norm(arch: Architecture) -> onnx.ModelProto:
    """hidden [rows, H], final_norm [H] → normed [rows, H]: once per row, however many slices the head has."""
    b = Builder("final_norm")
    x = b.input("hidden", (ROWS, arch.hidden))
    residual_norm(b, x, "final_norm", arch, out=b.output("normed", (ROWS, arch.hidden)))
    return b.model()


def build_head(arch: Architecture, width: int, scheme: str, target: str) -> onnx.ModelProto:
    """normed [rows, H], head [H, Vs] in column chunks → logits [rows, Vs]."""
    b, chunks = Builder("head"), linear_chunks(arch, "head", width, scheme)
    x = b.input("normed", (ROWS, arch.hidden))
    weight = declare_weight(b, "head", (arch.hidden, width), scheme, target, chunks, scale="head.scale")
    out = b.output("logits", (ROWS, width))
    logits = linear(b, x, weight, scheme, target, out=None if arch.head_bias else out)
    if arch.head_bias:
        b.node("Add", logits, b.input("head.bias", (width,)), out=out)
    return b.model()
