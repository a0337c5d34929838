"""The attention core: a block of queries against the cached keys and values, in one fused operator."""

from __future__ import annotations

import numpy as np
import onnx

from estream.models.base import Attention
from qnn_graphs.builder import KV_ROWS, MICROSOFT, ROWS, Builder


def attention_name(window: int | None) -> str:
    """Name of the attention graph of layers with this window."""
    return "attention" if window is None else f"attention.w{window}"


def build_attention(attention: Attention, window: int | None) -> onnx.ModelProto:
    """q_in [1, rows, QW], k_in [1, rows, KW], v_in [1, rows, VW], caches [1, KV, kv_rows, Dp] → attn [1, rows, OW],
    caches.

    present_key and present_value must be bound at the addresses of past_key and past_value. `last` int32 [1] is the
    position of the block's last row, `total` int32 [1] = last + 1. Dp: `Attention.cache_head_dim`; the operator takes
    no other head sizes, and the zeros that pad a head change neither its products nor its sums. `sinks` [heads] where
    the architecture has them.
    """
    b = Builder(attention_name(window))
    heads, kv_heads = attention.heads, attention.kv_heads
    head_dim, v_dim, padded = attention.head_dim, attention.v_dim, attention.cache_head_dim
    block = [
        _padded(b, b.input(name, (1, ROWS, count * dim)), count, dim, padded)
        for name, count, dim in (("q_in", heads, head_dim), ("k_in", kv_heads, head_dim), ("v_in", kv_heads, v_dim))
    ]
    cache = (1, kv_heads, KV_ROWS, padded)
    past = [b.input(name, cache) for name in ("past_key", "past_value")]
    counts = [b.input(name, (1,), np.int32) for name in ("last", "total")]
    sinks = ["", "", "", "", b.input("sinks", (heads,))] if attention.sinks else []
    attn, present_key, present_value = b.nodes(
        "GroupQueryAttention",
        *(*block, *past, *counts, *sinks),
        outs=("attn" if padded == v_dim else None, "present_key", "present_value"),
        domain=MICROSOFT,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=attention.score_scale,
        local_window_size=-1 if window is None else window,  # counts the query's own position
        do_rotary=0,
    )
    if padded != v_dim:
        split = b.node("Reshape", attn, b.integers(1, -1, heads, padded))
        kept = b.node("Slice", split, b.integers(0), b.integers(v_dim), b.integers(3))
        b.node("Reshape", kept, b.integers(1, -1, attention.out_width), out="attn")
    b.output("attn", (1, ROWS, attention.out_width))
    b.output(present_key, cache)
    b.output(present_value, cache)
    return b.model()


def _padded(b: Builder, x: str, heads: int, head_dim: int, padded: int) -> str:
    """x [1, rows, heads · head_dim] with every head filled up with zeros."""
    if padded == head_dim:
        return x
    split = b.node("Reshape", x, b.integers(1, -1, heads, head_dim))
    filled = b.node("Pad", split, b.integers(0, 0, 0, 0, 0, 0, 0, padded - head_dim))
    return b.node("Reshape", filled, b.integers(1, -1, heads * padded))
