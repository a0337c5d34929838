"""Tiny checkpoints for the packer, written from what the families say they expect, with known weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from estream.models import family
from estream.models.base import Family, Source

OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 72,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 100,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}


def sources_of(model: Family) -> list[Source]:
    """Every checkpoint tensor that the family reads."""
    arch = model.architecture()
    found = [source for sources in model.model_sources(()).values() for source in sources]
    for plan in arch.layers:
        found += [source for sources in model.layer_sources(plan.index).values() for source in sources]
        extra = [model.shared_sources(plan.index) if plan.ffn == "moe" else model.ffn_sources(plan.index)]
        if plan.ffn == "moe":
            extra += [model.expert_sources(plan.index, expert) for expert in range(arch.experts)]
        for expert in extra:
            found += [expert.gate, expert.up, expert.down] if expert else []
    return found


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Writes config.json, model.safetensors and a tokenizer.json; returns the weights, float32, by name."""
    draw = np.random.default_rng(seed)
    model = family(config["model_type"]).from_config(config)
    weights = {source.name: draw.standard_normal(source.shape, dtype=np.float32) / 8 for source in sources_of(model)}
    folder.mkdir(parents=True)
    save_weights(folder, weights)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return weights


def save_weights(folder: Path, weights: dict[str, np.ndarray]) -> None:
    save_file(weights, folder / "model.safetensors")
