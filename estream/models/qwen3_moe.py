"""Qwen3-MoE (model_type `qwen3_moe`): a norm on every head of q and k, no shared expert, some layers dense.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from estream.models.base import Architecture, Attention, Choice, ExpertSources, Family, LayerPlan, Rope, Sources
from estream.models.choose import softmax, top_k
from estream.models.config import GroupedHeads, check_decoder, check_window, read_config
from estream.models.rope_config import RopeScaling
from estream.models.sources import attention_sources, linear, model_sources, swiglu
from estream.models.sparse_layers import check_sparse_layers, is_moe


@dataclass(frozen=True)
class Qwen3MoeConfig(GroupedHeads):
    """config.json's own fields. `intermediate_size` is that of the dense layers. `max_window_layers` stands in public
    checkpoints and decides nothing: where use_sliding_window is set, transformers slides in every layer."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def __post_init__(self) -> None:
        sizes = ("intermediate_size", "moe_intermediate_size", "num_experts", "decoder_sparse_step")
        check_decoder(self, experts=self.num_experts, positive=sizes)
        check_sparse_layers(self)
        check_window(self.window)


class Qwen3Moe(Family):
    name = "qwen3_moe"
    config: Qwen3MoeConfig

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Qwen3Moe:
        return cls(read_config(Qwen3MoeConfig, raw, cls.name, aliases={"num_local_experts": "num_experts"}))

    @cached_property
    def _architecture(self) -> Architecture:
        c = self.config
        layers = tuple(
            LayerPlan(index, "moe" if is_moe(c, index) else "dense", c.window) for index in range(c.num_hidden_layers)
        )
        return Architecture(
            family=self.name,
            hidden=c.hidden_size,
            vocab=c.vocab_size,
            context=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            attention=Attention(
                heads=c.num_attention_heads,
                kv_heads=c.kv_heads,
                head_dim=c.head_size,
                rope=Rope(c.rope_theta, c.rope_scaling),
                qkv_bias=c.attention_bias,
                o_bias=c.attention_bias,
                qk_norm="head",
            ),
            layers=layers,
            experts=c.num_experts,
            top_k=c.num_experts_per_tok,
            expert_intermediate=c.moe_intermediate_size,
            dense_intermediate=c.intermediate_size if any(plan.ffn == "dense" for plan in layers) else 0,
        )

    def architecture(self) -> Architecture:
        return self._architecture

    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        return model_sources(self._architecture, names, self.config.tie_word_embeddings)

    def layer_sources(self, layer: int) -> dict[str, Sources]:
        found = attention_sources(self._architecture, layer)
        if is_moe(self.config, layer):
            gate = linear(f"model.layers.{layer}.mlp.gate", self.config.hidden_size, self.config.num_experts)
            found["router"] = (gate,)
        return found

    def expert_sources(self, layer: int, expert: int) -> ExpertSources:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        return swiglu(prefix, self.config.hidden_size, self.config.moe_intermediate_size)

    def ffn_sources(self, layer: int) -> ExpertSources | None:
        if is_moe(self.config, layer):
            return None
        return swiglu(f"model.layers.{layer}.mlp", self.config.hidden_size, self.config.intermediate_size)

    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        experts, gates = top_k(softmax(logits), self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            gates = gates / gates.sum(axis=-1, keepdims=True)
        return Choice(experts, gates)
