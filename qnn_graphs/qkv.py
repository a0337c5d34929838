"""The opening of a layer: norm, q/k/v projections, their biases and norms, clipping, rotary embedding."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from estream.models.base import Architecture
from estream.package.chunks import linear_chunks
from qnn_graphs.builder import ROWS, Builder
from qnn_graphs.linear import declare_weight, linear
from qnn_graphs.norm import head_norm, residual_norm, rms_norm
from qnn_graphs.rope import Rope

_Step = Callable[[str, str | None], str]  # (tensor, wanted name of the result) → name of the result


def build_qkv(arch: Architecture, scheme: str, target: str) -> onnx.ModelProto:
    """hidden [rows, H] → q_out [1, rows, QW], k_out [1, rows, KW], v_out [rows, VW].

    The leading 1 is what the rotary operator gives and the attention core takes: removing it would be a copy.
    """
    b, heads, kv_heads = Builder("qkv"), arch.attention.heads, arch.attention.kv_heads
    hidden = b.input("hidden", (ROWS, arch.hidden))
    normed = residual_norm(b, hidden, "attn_norm", arch)
    rope = Rope(b, arch.attention.rotated)
    _project(b, normed, "q", heads, arch, scheme, target, rope)
    _project(b, normed, "k", kv_heads, arch, scheme, target, rope)
    _project(b, normed, "v", kv_heads, arch, scheme, target, None)
    return b.model()


def _project(
    b: Builder, normed: str, name: str, heads: int, arch: Architecture, scheme: str, target: str, rope: Rope | None
) -> None:
    """One projection and what follows it; its last step writes the output itself."""
    width = heads * arch.attention.head_dim
    chunks = linear_chunks(arch, name, width, scheme)
    weight = declare_weight(b, name, (arch.hidden, width), scheme, target, chunks, scale=f"{name}.scale")
    steps: list[_Step] = [lambda x, out: linear(b, x, weight, scheme, target, out=out)]
    steps += _adjustments(b, name, width, arch)
    if rope is not None:
        steps.append(lambda x, out: rope(x, heads, out))
    tensor = normed
    for step in steps[:-1]:
        tensor = step(tensor, None)
    steps[-1](tensor, f"{name}_out")
    b.output(f"{name}_out", (1, ROWS, width) if rope is not None else (ROWS, width))


def _adjustments(b: Builder, name: str, width: int, arch: Architecture) -> list[_Step]:
    """Bias, q/k norm, clip. In this order: OLMoE clips what its norms have scaled."""
    attention, steps = arch.attention, list[_Step]()
    if attention.qkv_bias:
        bias = b.input(f"{name}.bias", (width,))
        steps.append(lambda x, out: b.node("Add", x, bias, out=out))
    if attention.qk_norm == "projection" and name != "v":
        whole = b.input(f"{name}_norm", (width,))
        steps.append(lambda x, out: rms_norm(b, x, whole, arch.norm_eps, out=out))
    if attention.qk_norm == "head" and name != "v":
        head_dim = attention.head_dim
        per_head = b.input(f"{name}_norm", (head_dim,))
        steps.append(lambda x, out: head_norm(b, x, per_head, arch.norm_eps, head_dim, width, out=out))
    if attention.clip is not None:
        low, high = b.scalar(-attention.clip), b.scalar(attention.clip)
        steps.append(lambda x, out: b.node("Clip", x, low, high, out=out))
    return steps
