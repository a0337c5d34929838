"""A layer's dense half on the HTP: norm and router logits, qkv, output projection, head slice. Blocks of `rows` rows.

The residual stream is float32 on the host. The norm graph gets its rows in float16, loud ones divided by a power of two
(`estream.runtime.tiles.half_rows`), so that neither a massive activation nor its square leaves float16. Its output is
what qkv, experts and head take. The norm is a graph of its own because a projection that begins with one spills: the
compiler keeps weights on chip while it waits for the norm (8 to 15 times the ideal traffic, against 1.0).

Weights are stored in column chunks, as in the experts; chunks of q, k and v are the attention core's head groups.
"""

from __future__ import annotations

import numpy as np
import onnx

from estream.models.base import Architecture
from estream.package.chunks import HeadGroups, chunk_names, head_groups, linear_chunks, qkv_chunks
from qnn_graphs.builder import Builder
from qnn_graphs.htp.quantised import half
from qnn_graphs.htp.weights import column_vectors, weight_operand
from qnn_graphs.norm import residual_norm, rms_norm


def build_norm(arch: Architecture, rows: int) -> onnx.ModelProto:
    """hidden float16 [T, H], norm (and norm.bias) float16 [H], router float16 [2H, R] → normed float16
    [T, H], logits and rest float16 [T, R].

    router: the weights rounded, and below them what rounding took away. logits + rest is their product with normed far
    more exactly than float16 holds it: rest is computed with the logits subtracted inside the product, as near ties
    decide which experts a token gets. One graph for all norms of the residual stream: before qkv and head the logits
    are computed and ignored.
    """
    b, width = Builder("norm"), max(arch.router_width, 1)
    hidden = b.input("hidden", (rows, arch.hidden), np.float16)
    out = b.output("normed", (rows, arch.hidden), np.float16)
    normed = residual_norm(b, hidden, "norm", arch, np.float16, out=out)
    router = b.input("router", (2 * arch.hidden, width), np.float16)
    twice = b.node("Concat", normed, normed, axis=1)
    logits = b.node("MatMul", twice, router, out=b.output("logits", (rows, width), np.float16))
    minus = b.constant(-np.eye(width, dtype=np.float16))
    wide, tall = b.node("Concat", twice, logits, axis=1), b.node("Concat", router, minus, axis=0)
    b.node("MatMul", wide, tall, out=b.output("rest", (rows, width), np.float16))
    return b.model()


def build_qkv(arch: Architecture, scheme: str, rows: int) -> onnx.ModelProto:
    """normed float16 [T, H], cos, sin float16 [T, D/2], weights → per head group g: q_out.{g}, k_out.{g}, v_out.{g}.

    k_out and v_out per KV group. Weights q, k, v in `qkv_chunks` column chunks `q.{c}`; int8 also `q.scale.{c}`
    [1, N/C], magnitudes of the columns.
    """
    b, a, groups = Builder("qkv"), arch.attention, head_groups(arch.attention)
    x = b.input("normed", (rows, arch.hidden), np.float16)
    cos, sin = (b.input(name, (rows, a.head_dim // 2), np.float16) for name in ("cos", "sin"))
    for name, heads, count in (
        ("q", a.heads, groups.groups),
        ("k", a.kv_heads, groups.kv_groups),
        ("v", a.kv_heads, groups.kv_groups),
    ):
        width = heads * a.head_dim
        chunks = qkv_chunks(arch, name)
        pieces = products(b, x, name, (arch.hidden, width), scheme, chunks, bias=a.qkv_bias)
        pieces = _adjusted(b, pieces, name, width, rows, arch)
        for group in range(count):
            folded = heads_first(b, pieces, group, count, (rows, heads // count, a.head_dim))
            if name != "v":
                folded = rotated(b, folded, cos, sin)
            write_group(b, folded, name, group, groups, rows)
    return b.model()


def heads_first(b: Builder, pieces: list[str], group: int, groups: int, sizes: tuple[int, int, int]) -> str:
    """[heads, T, D] of a head group. sizes: (T, heads, D)."""
    own = group_columns(b, pieces, group, groups)
    return b.node("Transpose", b.node("Reshape", own, b.integers(*sizes)), perm=(1, 0, 2))


def group_columns(b: Builder, pieces: list[str], group: int, groups: int) -> str:
    """The columns of a head group, from column chunks of which each group has a whole number."""
    per = len(pieces) // groups
    return join(b, pieces[group * per : (group + 1) * per])


def join(b: Builder, pieces: list[str]) -> str:
    """Column chunks [T, N/C] side by side."""
    return pieces[0] if len(pieces) == 1 else b.node("Concat", *pieces, axis=1)


def products(
    b: Builder, x: str, name: str, shape: tuple[int, int], scheme: str, chunks: int, *, bias: bool = False
) -> list[str]:
    """x float16 [T, K] · weight [K, N] → float16 [T, N/C] per column chunk, channels' magnitudes applied, and with
    `bias` `{name}.bias` added."""
    depth, width = shape
    results = [
        b.node("MatMul", x, weight_operand(b, key, (depth, width // chunks), scheme))
        for key in chunk_names(name, chunks)
    ]
    if scheme != "f16":
        scales = column_vectors(b, f"{name}.scale", width, chunks)
        results = [b.node("Mul", result, scale) for result, scale in zip(results, scales, strict=True)]
    if bias:
        biases = column_vectors(b, f"{name}.bias", width, chunks)
        results = [b.node("Add", result, one) for result, one in zip(results, biases, strict=True)]
    return results


def _adjusted(b: Builder, pieces: list[str], name: str, width: int, rows: int, arch: Architecture) -> list[str]:
    """q/k norm, clip: in this order, as on the CPU target. Pieces are column chunks of [T, width]."""
    a, count = arch.attention, len(pieces)
    if a.qk_norm == "projection" and name != "v":
        whole = rms_norm(b, join(b, pieces), b.input(f"{name}_norm", (width,), np.float16), arch.norm_eps)
        pieces = [whole] if count == 1 else b.nodes("Split", whole, outs=(None,) * count, axis=1, num_outputs=count)
    if a.qk_norm == "head" and name != "v":
        weight = b.input(f"{name}_norm", (a.head_dim,), np.float16)
        flat, back = b.integers(rows * width // count // a.head_dim, a.head_dim), b.integers(rows, width // count)
        heads = (rms_norm(b, b.node("Reshape", piece, flat), weight, arch.norm_eps) for piece in pieces)
        pieces = [b.node("Reshape", piece, back) for piece in heads]
    if a.clip is not None:
        pieces = [b.node("Clip", piece, half(b, -a.clip), half(b, a.clip)) for piece in pieces]
    return list(pieces)


def rotated(b: Builder, x: str, cos: str, sin: str) -> str:
    """x [heads, T, D] turned: element i of a head with element i + D/2."""
    first, second = b.nodes("Split", x, outs=(None, None), axis=2, num_outputs=2)
    turned = (
        b.node("Sub", b.node("Mul", first, cos), b.node("Mul", second, sin)),
        b.node("Add", b.node("Mul", second, cos), b.node("Mul", first, sin)),
    )
    return b.node("Concat", *turned, axis=2)


def write_group(b: Builder, x: str, name: str, group: int, groups: HeadGroups, rows: int) -> None:
    """x [heads of the group, T, D] in the layout of the attention core."""
    out = f"{name}_out.{group}"
    if name == "q":
        shape = groups.q_shape(rows)
        b.node("Reshape", x, b.integers(*shape), out=b.output(out, shape, np.float16))
    elif name == "k":
        b.node("Transpose", x, perm=(0, 2, 1), out=b.output(out, groups.k_shape(rows), np.float16))
    else:
        b.node("Identity", x, out=b.output(out, groups.v_shape(rows), np.float16))


def build_o(arch: Architecture, scheme: str, rows: int) -> onnx.ModelProto:
    """Per head group attn.{g} (`HeadGroups.attn_shape`), o in column chunks → delta.{c} float16 [T, H/C].

    The host adds delta to the residual stream.
    """
    b, a, groups = Builder("o"), arch.attention, head_groups(arch.attention)
    chunks, pieces = linear_chunks(arch, "o", arch.hidden, scheme), []
    for group in range(groups.groups):
        attn = b.input(f"attn.{group}", groups.attn_shape(rows), np.float16)
        heads = b.node("Reshape", attn, b.integers(groups.heads, rows, a.v_dim))
        flat = b.integers(rows, groups.heads * a.v_dim)
        pieces.append(b.node("Reshape", b.node("Transpose", heads, perm=(1, 0, 2)), flat))
    results = products(b, join(b, pieces), "o", (a.out_width, arch.hidden), scheme, chunks, bias=arch.o_bias)
    _write_chunks(b, results, "delta", (rows, arch.hidden // chunks))
    return b.model()


def build_head(arch: Architecture, scheme: str, rows: int, width: int) -> onnx.ModelProto:
    """normed float16 [T, H], head [H, Vs] in column chunks (+ head.scale, head.bias) → logits.{c} float16 [T, Vs/C]."""
    b, chunks = Builder("head"), linear_chunks(arch, "head", width, scheme)
    x = b.input("normed", (rows, arch.hidden), np.float16)
    results = products(b, x, "head", (arch.hidden, width), scheme, chunks, bias=arch.head_bias)
    _write_chunks(b, results, "logits", (rows, width // chunks))
    return b.model()


def _write_chunks(b: Builder, pieces: list[str], name: str, shape: tuple[int, int]) -> None:
    for key, piece in zip(chunk_names(name, len(pieces)), pieces, strict=True):
        b.node("Identity", piece, out=b.output(key, shape, np.float16))
