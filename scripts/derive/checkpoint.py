"""Writes the cut model as a Hugging Face Qwen2-MoE checkpoint that equals the dense model at top-k = E.

Qwen2-MoE multiplies the shared expert by sigmoid(gate) and, with norm_topk_prob false, a routed one by its softmax
probability. Here these are 1/2 and (within 0.2 %) 1/E, so down projections are multiplied by 2 and by E.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .cut import LayerCut
from .llama_gguf import Llama, LlamaLayer

_LAYERS_PER_SHARD = 10


def config(model: Llama, cuts: Sequence[LayerCut], top_k: int) -> dict[str, Any]:
    """config.json of the derived model."""
    c, vocabulary = model.config, model.vocabulary
    experts, width = cuts[0].split.experts.shape
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "qkv_bias": True,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": len(cuts[0].split.shared),
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        "pad_token_id": vocabulary.pad,
        "torch_dtype": "float32",
    }


def layer_tensors(index: int, layer: LlamaLayer, layer_cut: LayerCut) -> dict[str, np.ndarray]:
    """The Hugging Face tensors of one layer, float32, linear weights [out, in]."""
    split = layer_cut.split
    experts = len(split.experts)
    attention = {
        "input_layernorm.weight": layer.attn_norm,
        "post_attention_layernorm.weight": layer.ffn_norm,
        "self_attn.o_proj.weight": layer.o,
    }
    for name, weight in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
        attention[f"self_attn.{name}_proj.weight"] = weight
        attention[f"self_attn.{name}_proj.bias"] = np.zeros(len(weight), np.float32)  # Qwen2-MoE has them, Llama not
    feed_forward = {
        "mlp.gate.weight": layer_cut.router,
        "mlp.shared_expert_gate.weight": np.zeros((1, len(layer.ffn_norm)), np.float32),
        **_expert("mlp.shared_expert", layer, split.shared, 2.0),
    }
    for number, neurons in enumerate(split.experts):
        feed_forward |= _expert(f"mlp.experts.{number}", layer, neurons, float(experts))
    return {
        f"model.layers.{index}.{name}": np.ascontiguousarray(value, dtype=np.float32)
        for name, value in (attention | feed_forward).items()
    }


def _expert(prefix: str, layer: LlamaLayer, neurons: np.ndarray, factor: float) -> dict[str, np.ndarray]:
    return {
        f"{prefix}.gate_proj.weight": layer.gate[neurons],
        f"{prefix}.up_proj.weight": layer.up[neurons],
        f"{prefix}.down_proj.weight": layer.down[:, neurons] * np.float32(factor),
    }


def write_weights(
    model: Llama, cuts: Sequence[LayerCut], folder: Path, progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """Writes shards and index; returns the shards' file names. `progress`: called with (shards, of)."""
    starts = range(0, len(cuts), _LAYERS_PER_SHARD)
    names = [f"model-{number + 1:05}-of-{len(starts):05}.safetensors" for number in range(len(starts))]
    homes: dict[str, str] = {}
    total = 0
    for done, (start, name) in enumerate(zip(starts, names, strict=True)):
        tensors: dict[str, np.ndarray] = {}
        if start == 0:
            tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final_norm}
        for index in range(start, min(start + _LAYERS_PER_SHARD, len(cuts))):
            tensors |= layer_tensors(index, model.layers[index], cuts[index])
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors writes 0600
        homes |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        if progress is not None:
            progress(done + 1, len(names))
    index_file = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
    write_json(folder / "model.safetensors.index.json", index_file)
    return names


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
