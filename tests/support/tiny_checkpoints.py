"""Tiny random Hugging Face checkpoints, written by transformers itself, and the logits it computes from them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.families import found

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
        """Router logits of one prompt per MoE layer, float32 [len(ids), experts], without biases and without a shared
        expert's gate."""
        with torch.no_grad():
            outputs = self.model(torch.tensor([ids]), use_cache=False, output_router_logits=True)
        added = self.expert_biases() if any(_is_part_of_logits(name) for name, _ in self._biases()) else []
        logits = [logits.numpy() for logits in outputs.router_logits]
        return [one - bias for one, bias in zip(logits, added, strict=True)] if added else logits

    def expert_biases(self) -> list[np.ndarray]:
        """What `Family.route` of each MoE layer takes as bias, float32 [experts]; empty without biases."""
        return [bias.detach().numpy() for _, bias in self._biases()]

    def _biases(self) -> list[tuple[str, torch.Tensor]]:
        found = (*self.model.named_buffers(), *self.model.named_parameters())
        return [(name, bias) for name, bias in found if name.endswith("expert_bias") or _is_part_of_logits(name)]


def _is_part_of_logits(name: str) -> bool:
    """gpt-oss's router adds its bias to the logits; LFM2-MoE's is for the choice alone."""
    return name.endswith("router.bias")


def prompt(length: int, vocab: int = 96, seed: int = 0) -> list[int]:
    """`length` random token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, length)]


def write(family: str, path: Path, **options: Any) -> TinyCheckpoint:
    """Writes a checkpoint of a family (tests/families) to `path`.

    `options`: seed, dtype ("f32", "f16", "bf16"), shard_size (for instance "40KB"), scale (factors by end of a tensor's
    name), and any field of the transformers configuration."""
    cases = found()[family]
    config_class, model_class = (getattr(transformers, name) for name in cases.classes)
    options = cases.tiny | options
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
