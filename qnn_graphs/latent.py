"""The opening of a layer with multi-head latent attention: k and v come from one low-rank vector per token.

They are expanded here: in a prefill every key meets many queries, so that the expanded product is the cheaper one.
"""

from __future__ import annotations

import onnx

from estream.models.base import Architecture
from estream.package.chunks import linear_chunks
from estream.package.dense import biased, linears
from qnn_graphs.builder import ROWS, Builder
from qnn_graphs.linear import declare_weight, linear
from qnn_graphs.norm import residual_norm, rms_norm
from qnn_graphs.rope import Rope


def build_latent_qkv(arch: Architecture, scheme: str, target: str) -> onnx.ModelProto:
    """hidden [rows, H] → q_out [1, rows, QW], k_out [1, rows, KW], v_out [rows, VW]: as `build_qkv`, heads as [R what
    turns | the rest]."""
    b, a = Builder("qkv"), arch.attention
    latent, shapes, biases = a.latent, linears(a, arch.hidden), biased(a)
    assert latent is not None
    normed = residual_norm(b, b.input("hidden", (ROWS, arch.hidden)), "attn_norm", arch)
    rope = Rope(b, a.rotated)

    def project(x: str, name: str, out: str | None = None) -> str:
        depth, width = shapes[name]
        chunks = linear_chunks(arch, name, width, scheme)
        weight = declare_weight(b, name, (depth, width), scheme, target, chunks, scale=f"{name}.scale")
        if name not in biases:
            return linear(b, x, weight, scheme, target, out=out)
        return b.node("Add", linear(b, x, weight, scheme, target), b.input(f"{name}.bias", (width,)), out=out)

    def reduced(name: str) -> str:
        """A low-rank vector per token, normed."""
        return rms_norm(b, project(normed, name), b.input(f"{name}_norm", (shapes[name][1],)), latent.eps)

    source = normed if latent.query_rank is None else reduced("q_a")
    rope(project(source, "q"), a.heads, b.output("q_out", (1, ROWS, a.q_width)), partial=True)
    compressed = reduced("kv_a")
    turning = b.node("Unsqueeze", rope(project(normed, "k_rope"), 1), b.integers(2))  # [1, rows, 1, R]
    still = b.node("Reshape", project(compressed, "k"), b.integers(1, -1, a.kv_heads, a.head_dim - a.rotated))
    repeated = b.node("Tile", turning, b.integers(1, 1, a.kv_heads, 1))
    keys = b.node("Concat", repeated, still, axis=3)
    b.node("Reshape", keys, b.integers(1, -1, a.k_width), out=b.output("k_out", (1, ROWS, a.k_width)))
    project(compressed, "v", b.output("v_out", (ROWS, a.v_width)))
    return b.model()
