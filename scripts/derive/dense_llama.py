"""The dense model in plain numpy: the oracle of the derived model, and what the calibration observes.

It shares no code with estream's graphs: a mistake in one cannot hide in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .llama_gguf import Llama, LlamaConfig, LlamaLayer

# Called per layer with the hidden state that the feed-forward result is added to [N, H], its normed form [N, H],
# and the activations silu(gate) * up [N, I].
Observer = Callable[[int, np.ndarray, np.ndarray, np.ndarray], None]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [N, H] over its root mean square, times `weight` [H]; in x's dtype."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of x [N, heads, D] at positions 0..N-1 over the pairs (i, i + D/2)."""
    count, _, dim = x.shape
    half = dim // 2
    angle = np.arange(count)[:, None] * theta ** (-np.arange(half, dtype=np.float64) * 2 / dim)
    cos, sin = (f(angle).astype(x.dtype)[:, None, :] for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(x: np.ndarray, layer: LlamaLayer, config: LlamaConfig, spans: Sequence[slice]) -> np.ndarray:
    """Causal grouped-query attention: normed x [N, H] to [N, H], output projection included.

    `spans`: the rows of each sequence; a row sees its own sequence only.
    """
    dtype, dim = x.dtype, config.head_dim
    q = (x @ _cast(layer.q, dtype).T).reshape(len(x), config.heads, dim)
    k = (x @ _cast(layer.k, dtype).T).reshape(len(x), config.kv_heads, dim)
    v = (x @ _cast(layer.v, dtype).T).reshape(len(x), config.kv_heads, dim)
    out = np.empty_like(q)
    for span in spans:
        queries, keys = rotate(q[span], config.rope_theta), rotate(k[span], config.rope_theta)
        later = np.triu(np.ones((len(queries), len(queries)), dtype=bool), 1)
        for head in range(config.heads):
            kv = head // (config.heads // config.kv_heads)
            scores = queries[:, head] @ keys[:, kv].T / dtype.type(np.sqrt(dim))
            scores[later] = -np.inf
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[span, head] = scores @ v[span, kv] / scores.sum(axis=-1, keepdims=True)
    return out.reshape(len(x), -1) @ _cast(layer.o, dtype).T


def activations(x: np.ndarray, layer: LlamaLayer) -> np.ndarray:
    """silu(x gate) * (x up): [N, H] to [N, I], what the down projection takes."""
    gate = x @ _cast(layer.gate, x.dtype).T
    return gate / (1 + np.exp(-gate)) * (x @ _cast(layer.up, x.dtype).T)


def hidden_states(
    model: Llama,
    sequences: Sequence[Sequence[int]],
    dtype: np.typing.DTypeLike = np.float64,
    observe: Observer | None = None,
) -> np.ndarray:
    """The final normed hidden states [N, H] of all sequences, one after the other, computed in `dtype`."""
    config, dtype = model.config, np.dtype(dtype)
    ends = np.cumsum([len(sequence) for sequence in sequences])
    spans = [slice(int(end) - len(sequence), int(end)) for end, sequence in zip(ends, sequences, strict=True)]
    hidden = model.embed[np.concatenate([np.asarray(sequence) for sequence in sequences])].astype(dtype)
    for index, layer in enumerate(model.layers):
        normed = rms_norm(hidden, _cast(layer.attn_norm, dtype), config.norm_eps)
        hidden = hidden + attention(normed, layer, config, spans)
        normed = rms_norm(hidden, _cast(layer.ffn_norm, dtype), config.norm_eps)
        active = activations(normed, layer)
        if observe is not None:
            observe(index, hidden, normed, active)
        hidden = hidden + active @ _cast(layer.down, dtype).T
    return rms_norm(hidden, _cast(model.final_norm, dtype), config.norm_eps)


def logits(model: Llama, ids: Sequence[int], dtype: np.typing.DTypeLike = np.float64) -> np.ndarray:
    """Logits [N, V] of all positions, computed in `dtype`."""
    return hidden_states(model, [ids], dtype) @ _cast(model.embed, np.dtype(dtype)).T


def _cast(weight: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return weight.astype(dtype, copy=False)
