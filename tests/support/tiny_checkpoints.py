"""Tiny random Hugging Face checkpoints, written by transformers itself, and the logits it computes from them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TinyCheckpoint:
    """`model` was read back from `path` by transformers, in float32 with eager attention."""

    path: Path
    model: Any

    def logits(self, ids: list[int]) -> np.ndarray:
        """Reference logits of one prompt, float32 [len(ids), vocab]."""
        with torch.no_grad():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    def router_logits(self, ids: list[int]) -> list[np.ndarray]:
        """Router logits of one prompt per MoE layer, float32 [len(ids), experts], without a shared expert's gate."""
        with torch.no_grad():
            outputs = self.model(torch.tensor([ids]), use_cache=False, output_router_logits=True)
        return [logits.numpy() for logits in outputs.router_logits]

    def expert_biases(self) -> list[np.ndarray]:
        """What each MoE layer adds to the scores that choose experts, float32 [experts]; empty without biases."""
        return [buffer.numpy() for name, buffer in self.model.named_buffers() if name.endswith("expert_bias")]


def prompt(length: int, vocab: int = 96, seed: int = 0) -> list[int]:
    """`length` random token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, length)]


def olmoe(path: Path, **options: Any) -> TinyCheckpoint:
    """OLMoE with 4 heads on 2 kv heads, 8 experts of 24, top 3. `options`: see `_write`."""
    defaults = {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
    return _write(path, transformers.OlmoeConfig, transformers.OlmoeForCausalLM, defaults | options)


def mixtral(path: Path, **options: Any) -> TinyCheckpoint:
    """Mixtral with 4 heads on 2 kv heads, 8 experts of 24, top 2. `options`: see `_write`."""
    defaults = {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2}
    return _write(path, transformers.MixtralConfig, transformers.MixtralForCausalLM, defaults | options)


def qwen2_moe(path: Path, **options: Any) -> TinyCheckpoint:
    """Qwen2-MoE with 4 heads on 2 kv heads, 8 experts of 24, top 3, a shared expert of 40, dense layers of 56."""
    defaults = {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    }
    return _write(path, transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM, defaults | options)


def qwen3_moe(path: Path, **options: Any) -> TinyCheckpoint:
    """Qwen3-MoE with 4 heads on 2 kv heads, 8 experts of 24, top 3, dense layers of 56."""
    defaults = {"intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
    return _write(path, transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, defaults | options)


def granitemoe(path: Path, **options: Any) -> TinyCheckpoint:
    """GraniteMoE with 4 heads on 2 kv heads, 8 experts of 24, top 3, and no multiplier one would not notice."""
    defaults = {
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 1.7,
        "logits_scaling": 0.8,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.5,
    }
    return _write(path, transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM, defaults | options)


def phimoe(path: Path, **options: Any) -> TinyCheckpoint:
    """PhiMoE with 4 heads on 2 kv heads, 8 experts of 24, every bias, gates that several experts share."""
    defaults = {
        "intermediate_size": 24,
        "num_local_experts": 8,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,
    }
    return _write(path, transformers.PhimoeConfig, transformers.PhimoeForCausalLM, defaults | options)


def lfm2_moe(path: Path, **options: Any) -> TinyCheckpoint:
    """LFM2-MoE with 4 heads on 2 kv heads, 8 experts of 24, top 3: a convolution with a dense layer of 56, attention,
    and another convolution. Expert biases that change choices."""
    defaults = {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    }
    return _write(path, transformers.Lfm2MoeConfig, transformers.Lfm2MoeForCausalLM, defaults | options)


FAMILIES = {
    "olmoe": olmoe,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "granitemoe": granitemoe,
    "phimoe": phimoe,
    "lfm2_moe": lfm2_moe,
}


def _write(path: Path, config_class: Any, model_class: Any, options: dict[str, Any]) -> TinyCheckpoint:
    """Writes a checkpoint to `path`. `options`: seed, dtype ("f32", "f16", "bf16"), shard_size (for instance "40KB"),
    scale (factors by end of a tensor's name), and any field of the transformers configuration."""
    scale = options.pop("scale", {})
    seed = options.pop("seed", 0)
    dtype = DTYPES[options.pop("dtype", "f32")]
    shard_size = options.pop("shard_size", "1GB")
    common = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    for name in ("transformers", "transformers.modeling_utils", "transformers.configuration_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    model = model_class(config_class(**(common | options)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
        for name, weight in (*model.named_parameters(), *biases):
            factor = next((factor for end, factor in scale.items() if name.endswith(end)), 1.0)
            weight.copy_(factor * _random(name, weight, generator))
    model.to(dtype).save_pretrained(path, max_shard_size=shard_size)
    reference = model_class.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return TinyCheckpoint(Path(path), reference.eval())


def _random(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Weights whose activations keep their size, so that every part shows in the logits and routing is decided."""
    values = torch.randn(weight.shape, generator=generator)
    if name.endswith("bias"):
        return 0.3 * values
    if "norm" in name:
        return 1 + 0.2 * values
    if "embed_tokens" in name:
        return values
    gain = 2.0 if "gate.weight" in name or "q_proj" in name or "k_proj" in name else 1.3
    return gain * values / weight.shape[-1] ** 0.5  # stored [..., out, in]
