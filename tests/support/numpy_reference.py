"""A prefill in plain numpy, straight from a checkpoint through a family: no graph, no package, no run time.

Float64 throughout except for the choice of experts, which is the family's own.
"""

from __future__ import annotations

import numpy as np

from estream.checkpoint import Checkpoint
from estream.models.base import Attention, Clamped, ExpertSources, Family, LayerPlan
from estream.models.rope import rope_tables


def prefill(checkpoint: Checkpoint, family: Family, ids: list[int]) -> np.ndarray:
    """Logits [len(ids), vocab]."""
    architecture = family.architecture()
    model = {name: checkpoint.gather(s) for name, s in family.model_sources(checkpoint.names).items()}

    def norm(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
        if architecture.norm == "rms":
            return _norm(x, w[name], architecture.norm_eps)
        return _norm(x - x.mean(axis=-1, keepdims=True), w[name], architecture.norm_eps) + w[f"{name}.bias"]

    hidden = model["embed"][ids].astype(np.float64)
    for plan in architecture.layers:
        sources = {name: found for name, found in family.layer_sources(plan.index).items() if found}
        w = {name: checkpoint.gather(found).astype(np.float64) for name, found in sources.items()}
        normed = norm(hidden, w, "attn_norm")
        hidden = hidden + (_conv(normed, w) if plan.mixer == "conv" else _attention(family, plan, normed, w))
        normed = norm(hidden, w, "ffn_norm")
        if plan.ffn == "dense":
            ffn = family.ffn_sources(plan.index)
            assert ffn is not None
            hidden = hidden + _swiglu(checkpoint, ffn, normed)
            continue
        bias = w["expert_bias"].astype(np.float32) if "expert_bias" in w else None
        choice = family.route((normed @ w["router"]).astype(np.float32), bias)
        total = np.zeros_like(hidden)
        for expert in range(architecture.experts):
            rows, slots = np.nonzero(choice.experts == expert)
            y = _swiglu(checkpoint, family.expert_sources(plan.index, expert), normed[rows], architecture.clamped)
            total[rows] += y * choice.gates[rows, slots, None]
        shared = family.shared_sources(plan.index)
        if shared is not None:
            gates = 1.0 if choice.shared is None else choice.shared[:, None]
            total += _swiglu(checkpoint, shared, normed) * gates
        hidden = hidden + total
    return norm(hidden, model, "final_norm") @ model["head"] + model.get("head.bias", 0.0)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _swiglu(checkpoint: Checkpoint, sources: ExpertSources, x: np.ndarray, form: Clamped | None = None) -> np.ndarray:
    gate, up, down = (checkpoint.read(s).astype(np.float64) for s in (sources.gate, sources.up, sources.down))
    if form is not None and sources.biases is not None:
        of_gate, of_up, of_down = (checkpoint.read(source).astype(np.float64) for source in sources.biases)
        g, u = np.minimum(x @ gate + of_gate, form.limit), np.clip(x @ up + of_up, -form.limit, form.limit)
        return ((u + 1) * g / (1 + np.exp(-form.alpha * g))) @ down + of_down
    g = x @ gate
    return (g / (1 + np.exp(-g)) * (x @ up)) @ down


def _conv(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    b, c, value = (x @ w[name] + w.get(f"{name}.bias", 0.0) for name in ("conv_b", "conv_c", "conv_x"))
    kernel = w["conv"]
    z = np.concatenate([np.zeros((len(kernel) - 1, x.shape[1])), b * value])
    mixed = sum(tap * z[at : at + len(x)] for at, tap in enumerate(kernel)) + w.get("conv.bias", 0.0)
    return (c * mixed) @ w["o"] + w.get("o.bias", 0.0)


def _attention(family: Family, plan: LayerPlan, x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    a, eps = family.architecture().attention, family.architecture().norm_eps
    if a.latent is not None:
        return _latent_attention(a, plan, x, w)
    q, k, v = (x @ w[name] + w.get(f"{name}.bias", 0.0) for name in "qkv")
    if a.qk_norm == "projection":
        q, k = _norm(q, w["q_norm"], eps), _norm(k, w["k_norm"], eps)
    if a.clip is not None:
        q, k, v = (np.clip(value, -a.clip, a.clip) for value in (q, k, v))
    n = len(x)
    q, k, v = (value.reshape(n, -1, a.head_dim).swapaxes(0, 1) for value in (q, k, v))
    if a.qk_norm == "head":
        q, k = _norm(q, w["q_norm"], eps), _norm(k, w["k_norm"], eps)
    cos, sin = rope_tables(a.rope, a.head_dim, np.arange(n))
    q, k = (_rotate(value, cos, sin) for value in (q, k))
    k, v = (np.repeat(value, a.heads // a.kv_heads, axis=0) for value in (k, v))
    return _core(a, plan, q, k, v, w.get("sinks")) @ w["o"] + w.get("o.bias", 0.0)


def _latent_attention(a: Attention, plan: LayerPlan, x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    assert a.latent is not None
    n, eps = len(x), a.latent.eps
    cos, sin = rope_tables(a.rope, a.rotated, np.arange(n))

    def project(source: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(source @ w[name] + w.get(f"{name}.bias", 0.0))

    compressed = _norm(project(x, "kv_a"), w["kv_a_norm"], eps)
    queries = x if a.latent.query_rank is None else _norm(project(x, "q_a"), w["q_a_norm"], eps)
    sources = (("q", queries), ("k", compressed), ("v", compressed))
    q, k, v = (project(source, name).reshape(n, a.heads, -1).swapaxes(0, 1) for name, source in sources)
    q = np.concatenate([_rotate(q[..., : a.rotated], cos, sin), q[..., a.rotated :]], axis=-1)
    turning = _rotate(project(x, "k_rope"), cos, sin)
    k = np.concatenate([np.broadcast_to(turning, (a.heads, *turning.shape)), k], axis=-1)
    return _core(a, plan, q, k, v) @ w["o"] + w.get("o.bias", 0.0)


def _core(
    a: Attention, plan: LayerPlan, q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None = None
) -> np.ndarray:
    """q, k, v [heads, N, D] → [N, heads · D of v]."""
    n = q.shape[1]
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    seen = (distance >= 0) & (distance < (plan.window or n))
    scores = np.where(seen, q @ k.swapaxes(1, 2) * a.score_scale, -np.inf)
    peak, extra = scores.max(axis=-1, keepdims=True), np.zeros((len(q), 1, 1))
    if sinks is not None:
        extra = np.exp(sinks[:, None, None] - peak)
    scores = np.exp(scores - peak)
    mixed = (scores / (scores.sum(axis=-1, keepdims=True) + extra)) @ v
    return mixed.swapaxes(0, 1).reshape(n, -1)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
