"""The closing of a layer's dense half: output projection, residual, norm, router logits."""

from __future__ import annotations

import onnx

from estream.models.base import Architecture
from estream.package.chunks import linear_chunks
from qnn_graphs.builder import ROWS, Builder
from qnn_graphs.linear import declare_weight, linear
from qnn_graphs.norm import residual_norm


def build_closing(arch: Architecture, scheme: str, target: str, *, router: bool) -> onnx.ModelProto:
    """attn [rows, OW], hidden [rows, H] → hidden_out, normed [rows, H] and, with `router`, logits [rows, R].

    hidden_out may be bound at hidden's address. The router is float32 in every scheme: its choice is discrete.
    """
    b, width = Builder("o_router" if router else "o_norm"), arch.hidden
    attn, hidden = b.input("attn", (ROWS, arch.attention.out_width)), b.input("hidden", (ROWS, width))
    chunks = linear_chunks(arch, "o", width, scheme)
    weight = declare_weight(b, "o", (arch.attention.out_width, width), scheme, target, chunks, scale="o.scale")
    projected = linear(b, attn, weight, scheme, target)
    if arch.o_bias:
        projected = b.node("Add", projected, b.input("o.bias", (width,)))
    b.node("Add", projected, hidden, out=b.output("hidden_out", (ROWS, width)))
    residual_norm(b, "hidden_out", "ffn_norm", arch, out=b.output("normed", (ROWS, width)))
    if router:
        matrix = b.input("router", (width, arch.router_width))
        b.node("MatMul", "normed", matrix, out=b.output("logits", (ROWS, arch.router_width)))
    return b.model()
