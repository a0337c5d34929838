"""q, k and v of multi-head latent attention on the HTP, in the layouts of `build_qkv`."""

from __future__ import annotations

import numpy as np
import onnx

from estream.models.base import Architecture
from estream.package.chunks import head_groups, linear_chunks
from estream.package.dense import biased, linears
from qnn_graphs.builder import Builder
from qnn_graphs.htp.dense import heads_first, join, products, rotated, write_group
from qnn_graphs.norm import rms_norm


def build_latent_qkv(arch: Architecture, scheme: str, rows: int) -> onnx.ModelProto:
    """normed float16 [T, H], cos, sin float16 [T, R/2], weights (`linears`, in column chunks), norms of the low-rank
    vectors → per head group g: q_out.{g}, k_out.{g}, v_out.{g}. Heads are [R what turns | the rest]."""
    b, a, groups = Builder("qkv"), arch.attention, head_groups(arch.attention)
    latent, shapes, biases = a.latent, linears(a, arch.hidden), biased(a)
    assert latent is not None
    x = b.input("normed", (rows, arch.hidden), np.float16)
    cos, sin = (b.input(name, (rows, a.rotated // 2), np.float16) for name in ("cos", "sin"))

    def project(source: str, name: str) -> list[str]:
        chunks = linear_chunks(arch, name, shapes[name][1], scheme)
        return products(b, source, name, shapes[name], scheme, chunks, bias=name in biases)

    def reduced(name: str) -> str:
        """A low-rank vector per token, normed."""
        weight = b.input(f"{name}_norm", (shapes[name][1],), np.float16)
        return rms_norm(b, join(b, project(x, name)), weight, latent.eps)

    compressed = reduced("kv_a")
    turning = b.node("Reshape", join(b, project(x, "k_rope")), b.integers(1, rows, a.rotated))
    shared = b.node("Expand", rotated(b, turning, cos, sin), b.integers(groups.kv_heads, rows, a.rotated))
    queries = project(x if latent.query_rank is None else reduced("q_a"), "q")
    for group in range(groups.groups):
        folded = heads_first(b, queries, group, groups.groups, (rows, groups.heads, a.head_dim))
        ends = (b.integers(0), b.integers(a.rotated), b.integers(a.head_dim), b.integers(2))
        first, rest = b.node("Slice", folded, *ends[:2], ends[3]), b.node("Slice", folded, *ends[1:])
        write_group(b, b.node("Concat", rotated(b, first, cos, sin), rest, axis=2), "q", group, groups, rows)
    still, values = project(compressed, "k"), project(compressed, "v")
    for group in range(groups.kv_groups):
        rest = heads_first(b, still, group, groups.kv_groups, (rows, groups.kv_heads, a.head_dim - a.rotated))
        write_group(b, b.node("Concat", shared, rest, axis=2), "k", group, groups, rows)
        folded = heads_first(b, values, group, groups.kv_groups, (rows, groups.kv_heads, a.v_dim))
        write_group(b, folded, "v", group, groups, rows)
    return b.model()
