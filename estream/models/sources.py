"""Checkpoint names that most decoder families share (the Llama layout of Hugging Face checkpoints).

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Collection

from estream.models.base import Architecture, ExpertSources, Source, Sources

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def linear(name: str, inputs: int, outputs: int) -> Source:
    """The weight of a linear layer: stored [outputs, inputs], packed [inputs, outputs]."""
    return Source(f"{name}.weight", (outputs, inputs), transpose=True)


def swiglu(
    prefix: str, hidden: int, intermediate: int, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> ExpertSources:
    """An expert or a feed-forward network; `parts` are its names for gate, up and down."""
    gate, up, down = (f"{prefix}.{part}" for part in parts)
    return ExpertSources(
        gate=linear(gate, hidden, intermediate),
        up=linear(up, hidden, intermediate),
        down=linear(down, intermediate, hidden),
    )


def model_sources(architecture: Architecture, names: Collection[str], tied: bool) -> dict[str, Sources]:
    """`embed`, `final_norm`, `head`, and their biases. A stored head wins over `tied`, as in transformers 5."""
    vocab, hidden = architecture.vocab, architecture.hidden
    head = EMBED if tied and HEAD not in names else HEAD
    found = {
        "embed": Source(EMBED, (vocab, hidden)),
        "final_norm": Source("model.norm.weight", (hidden,)),
        "head": Source(head, (vocab, hidden), transpose=True),
    }
    if architecture.norm == "layer":
        found["final_norm.bias"] = Source("model.norm.bias", (hidden,))
    if architecture.head_bias:
        found["head.bias"] = Source("lm_head.bias", (vocab,))
    return {name: (source,) for name, source in found.items()}


def attention_sources(architecture: Architecture, layer: int) -> dict[str, Sources]:
    """Norms, projections and biases of a layer, all that the architecture has, without the router."""
    attention, hidden = architecture.attention, architecture.hidden
    prefix = f"model.layers.{layer}"
    q, kv = attention.q_width, attention.k_width
    found: dict[str, Source] = {
        "attn_norm": Source(f"{prefix}.input_layernorm.weight", (hidden,)),
        "ffn_norm": Source(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        "q": linear(f"{prefix}.self_attn.q_proj", hidden, q),
        "k": linear(f"{prefix}.self_attn.k_proj", hidden, kv),
        "v": linear(f"{prefix}.self_attn.v_proj", hidden, kv),
        "o": linear(f"{prefix}.self_attn.o_proj", q, hidden),
    }
    if architecture.norm == "layer":
        found["attn_norm.bias"] = Source(f"{prefix}.input_layernorm.bias", (hidden,))
        found["ffn_norm.bias"] = Source(f"{prefix}.post_attention_layernorm.bias", (hidden,))
    if attention.qkv_bias:
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            found[f"{name}.bias"] = Source(f"{prefix}.self_attn.{name}_proj.bias", (width,))
    if attention.o_bias:
        found["o.bias"] = Source(f"{prefix}.self_attn.o_proj.bias", (hidden,))
    if attention.qk_norm != "none":
        for name, width in (("q", q), ("k", kv)):
            width = width if attention.qk_norm == "projection" else attention.head_dim
            found[f"{name}_norm"] = Source(f"{prefix}.self_attn.{name}_norm.weight", (width,))
    return {name: (source,) for name, source in found.items()}


def block_sparse_router(architecture: Architecture, layer: int) -> Source:
    """Mixtral's name of the router, which others took over."""
    return linear(f"model.layers.{layer}.block_sparse_moe.gate", architecture.hidden, architecture.experts)


def block_sparse_expert(architecture: Architecture, layer: int, expert: int) -> ExpertSources:
    """Mixtral's names of an expert's matrices."""
    prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
    return swiglu(prefix, architecture.hidden, architecture.expert_intermediate, ("w1", "w3", "w2"))
