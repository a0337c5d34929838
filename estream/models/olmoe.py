"""OLMoE (model_type `olmoe`): q and k normalised over the whole projection, gates not renormalised by default.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from estream.errors import CheckpointError
from estream.models.base import Architecture, Attention, Choice, ExpertSources, Family, LayerPlan, Rope, Sources
from estream.models.choose import softmax, top_k
from estream.models.config import GroupedHeads, check_decoder, read_config
from estream.models.rope_config import RopeScaling
from estream.models.sources import attention_sources, linear, model_sources, swiglu


@dataclass(frozen=True)
class OlmoeConfig(GroupedHeads):
    """config.json's own fields. `intermediate_size` is one expert's."""

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_decoder(self, experts=self.num_experts, positive=("intermediate_size", "num_experts"))
        if self.head_size * self.num_attention_heads != self.hidden_size:  # q_norm has hidden_size weights
            raise CheckpointError(
                "config.json: head_dim", asked=f"{self.hidden_size} / {self.num_attention_heads}", had=self.head_dim
            )
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise CheckpointError("config.json: clip_qkv", asked="more than 0, or null", had=self.clip_qkv)


class Olmoe(Family):
    name = "olmoe"
    config: OlmoeConfig

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Olmoe:
        return cls(read_config(OlmoeConfig, raw, cls.name))

    @cached_property
    def _architecture(self) -> Architecture:
        c = self.config
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
                qk_norm="projection",
                clip=c.clip_qkv,
            ),
            layers=tuple(LayerPlan(index, "moe") for index in range(c.num_hidden_layers)),
            experts=c.num_experts,
            top_k=c.num_experts_per_tok,
            expert_intermediate=c.intermediate_size,
        )

    def architecture(self) -> Architecture:
        return self._architecture

    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        return model_sources(self._architecture, names, self.config.tie_word_embeddings)

    def layer_sources(self, layer: int) -> dict[str, Sources]:
        router = linear(f"model.layers.{layer}.mlp.gate", self.config.hidden_size, self.config.num_experts)
        return attention_sources(self._architecture, layer) | {"router": (router,)}

    def expert_sources(self, layer: int, expert: int) -> ExpertSources:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        return swiglu(prefix, self.config.hidden_size, self.config.intermediate_size)

    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        experts, gates = top_k(softmax(logits), self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            gates = gates / gates.sum(axis=-1, keepdims=True)
        return Choice(experts, gates)
