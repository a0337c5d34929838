"""A gated short convolution in the place of attention: norm, three projections, a causal depthwise convolution."""

from __future__ import annotations

import onnx

from estream.models.base import Architecture
from estream.package.chunks import CONV_LINEARS, linear_chunks
from qnn_graphs.builder import ROWS, Builder
from qnn_graphs.linear import declare_weight, linear
from qnn_graphs.norm import residual_norm


def build_conv(arch: Architecture, scheme: str, target: str) -> onnx.ModelProto:
    """hidden [rows, H], past [L - 1, H], conv_b, conv_c, conv_x [H, H], conv [L, H] → attn [rows, H], past_out as past.

    z = b · x, attn[t] = c[t] · (conv[0] · z[t - L + 1] + … + conv[L - 1] · z[t]). past: the last rows of z of the
    block before, zeros at a prompt's start; past_out may be bound at its address. Products and sums of the rows moved
    against each other: the provider's convolution would need channels before tokens.
    """
    b, width, taps = Builder("conv"), arch.hidden, arch.conv_kernel
    normed = residual_norm(b, b.input("hidden", (ROWS, width)), "attn_norm", arch)
    gate, out, x = (_project(b, normed, name, arch, scheme, target) for name in CONV_LINEARS)
    past = b.input("past", (taps - 1, width))
    z = b.node("Mul", gate, x)
    whole = b.node("Concat", past, z, axis=0)
    rows = b.nodes("Split", b.input("conv", (taps, width)), outs=(None,) * taps, axis=0, num_outputs=taps)
    total = b.node("Mul", z, rows[-1])
    for tap in range(taps - 1):
        moved = b.node("Slice", whole, b.integers(tap), b.integers(tap - taps + 1), b.integers(0))
        total = b.node("Add", total, b.node("Mul", moved, rows[tap]))
    if arch.conv_bias:
        total = b.node("Add", total, b.input("conv.bias", (width,)))
    b.node("Mul", out, total, out=b.output("attn", (ROWS, width)))
    end = b.integers(2**31 - 1)
    b.node("Slice", whole, b.integers(1 - taps), end, b.integers(0), out=b.output("past_out", (taps - 1, width)))
    return b.model()


def _project(b: Builder, normed: str, name: str, arch: Architecture, scheme: str, target: str) -> str:
    shape = (arch.hidden, arch.hidden)
    chunks = linear_chunks(arch, name, arch.hidden, scheme)
    weight = declare_weight(b, name, shape, scheme, target, chunks, scale=f"{name}.scale")
    projected = linear(b, normed, weight, scheme, target)
    if not arch.conv_bias:
        return projected
    return b.node("Add", projected, b.input(f"{name}.bias", (arch.hidden,)))
