"""Shapes of public models, as their own config.json gives them; the family code builds the architecture from these."""

from __future__ import annotations

import difflib
from typing import Any

from estream.errors import UsageError

PRESETS: dict[str, dict[str, Any]] = {
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "lfm2.5-8b-a1b": {
        "model_type": "lfm2_moe",
        "conv_L_cache": 3,
        "conv_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1792,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "use_expert_bias": True,
        "vocab_size": 65536,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
}


def preset_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of a preset, cut to its first `layers` layers if given.

    Raises:
        UsageError: unknown preset (the message names near ones), or `layers` not in 1 to the model's own number.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Presets: {', '.join(sorted(PRESETS))}."
        raise UsageError("unknown preset", asked=name, had=", ".join(sorted(PRESETS)), next_step=hint)
    config = dict(PRESETS[name])
    if layers is not None:
        if not 1 <= layers <= config["num_hidden_layers"]:
            raise UsageError(f"--layers of {name}", asked=layers, had=f"1 to {config['num_hidden_layers']}")
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config
