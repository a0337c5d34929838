"""Qwen2-MoE and Qwen1.5-MoE (model_type `qwen2_moe`): q/k/v biases, a gated shared expert, some layers dense.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from estream.errors import CheckpointError, UnsupportedModelError
from estream.models.base import Architecture, Attention, Choice, ExpertSources, Family, LayerPlan, Rope, Sources
from estream.models.choose import sigmoid, softmax, top_k
from estream.models.config import GroupedHeads, check_decoder, read_config
from estream.models.rope_config import RopeScaling
from estream.models.sources import attention_sources, linear, model_sources, swiglu
from estream.models.sparse_layers import check_sparse_layers, is_moe


@dataclass(frozen=True)
class Qwen2MoeConfig(GroupedHeads):
    """config.json's own fields. `intermediate_size` is that of the dense layers."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    qkv_bias: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts: int = 60
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False

    def is_moe(self, layer: int) -> bool:
        return is_moe(self, layer)

    def window(self, layer: int) -> int | None:
        """transformers' rule: layer_types where it is given, else every other layer below max_window_layers."""
        if self.layer_types is not None:
            slides = self.layer_types[layer] == "sliding_attention"
        else:
            slides = self.use_sliding_window and layer < self.max_window_layers and (layer + 1) % 2 == 1
        return self.sliding_window if slides else None

    def __post_init__(self) -> None:
        sizes = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        check_decoder(self, experts=self.num_experts, positive=(*sizes, "num_experts", "decoder_sparse_step"))
        check_sparse_layers(self)
        if self.layer_types is not None:
            unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
            if unknown:
                raise UnsupportedModelError("config.json: layer_types", had=", ".join(sorted(unknown)))
            if len(self.layer_types) != self.num_hidden_layers:
                raise CheckpointError(
                    "config.json: layer_types", asked=f"{self.num_hidden_layers} layers", had=len(self.layer_types)
                )
            if "sliding_attention" in self.layer_types and not self.use_sliding_window:
                raise CheckpointError("config.json: layer_types has sliding_attention, use_sliding_window is false")
        if self.use_sliding_window and (self.sliding_window is None or self.sliding_window < 1):
            raise CheckpointError("config.json: sliding_window", asked="at least 1", had=self.sliding_window)


class Qwen2Moe(Family):
    name = "qwen2_moe"
    config: Qwen2MoeConfig

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Qwen2Moe:
        return cls(read_config(Qwen2MoeConfig, raw, cls.name))

    @cached_property
    def _architecture(self) -> Architecture:
        c = self.config
        layers = tuple(
            LayerPlan(index, "moe" if c.is_moe(index) else "dense", c.window(index))
            for index in range(c.num_hidden_layers)
        )
        return Architecture(
            family=self.name,
            hidden=c.hidden_size,
            vocab=c.vocab_size,
            context=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            attention=Attention(
                c.num_attention_heads, c.kv_heads, c.head_size, Rope(c.rope_theta, c.rope_scaling), qkv_bias=c.qkv_bias
            ),
            layers=layers,
            experts=c.num_experts,
            top_k=c.num_experts_per_tok,
            expert_intermediate=c.moe_intermediate_size,
            shared_intermediate=c.shared_expert_intermediate_size,
            shared_gate=True,
            dense_intermediate=c.intermediate_size if any(plan.ffn == "dense" for plan in layers) else 0,
        )

    def architecture(self) -> Architecture:
        return self._architecture

    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        return model_sources(self._architecture, names, self.config.tie_word_embeddings)

    def layer_sources(self, layer: int) -> dict[str, Sources]:
        found = attention_sources(self._architecture, layer)
        if self.config.is_moe(layer):
            prefix, hidden = f"model.layers.{layer}.mlp", self.config.hidden_size
            router = linear(f"{prefix}.gate", hidden, self.config.num_experts)
            found["router"] = (router, linear(f"{prefix}.shared_expert_gate", hidden, 1))
        return found

    def expert_sources(self, layer: int, expert: int) -> ExpertSources:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        return swiglu(prefix, self.config.hidden_size, self.config.moe_intermediate_size)

    def shared_sources(self, layer: int) -> ExpertSources | None:
        if not self.config.is_moe(layer):
            return None
        prefix = f"model.layers.{layer}.mlp.shared_expert"
        return swiglu(prefix, self.config.hidden_size, self.config.shared_expert_intermediate_size)

    def ffn_sources(self, layer: int) -> ExpertSources | None:
        if self.config.is_moe(layer):
            return None
        return swiglu(f"model.layers.{layer}.mlp", self.config.hidden_size, self.config.intermediate_size)

    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        experts, gates = top_k(softmax(logits[:, :-1]), self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            gates = gates / gates.sum(axis=-1, keepdims=True)
        return Choice(experts, gates, sigmoid(logits[:, -1]))
