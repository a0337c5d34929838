"""Mixtral (model_type `mixtral`): experts named w1 (gate), w3 (up), w2 (down); gates always sum to one.

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
from estream.models.sources import attention_sources, block_sparse_expert, block_sparse_router, model_sources


@dataclass(frozen=True)
class MixtralConfig(GroupedHeads):
    """config.json's own fields. `intermediate_size` is one expert's; `sliding_window` holds for all layers."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_decoder(self, experts=self.num_local_experts, positive=("intermediate_size", "num_local_experts"))
        check_window(self.sliding_window)


class Mixtral(Family):
    name = "mixtral"
    config: MixtralConfig

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Mixtral:
        return cls(read_config(MixtralConfig, raw, cls.name))

    @cached_property
    def _architecture(self) -> Architecture:
        c = self.config
        return Architecture(
            family=self.name,
            hidden=c.hidden_size,
            vocab=c.vocab_size,
            context=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            attention=Attention(c.num_attention_heads, c.kv_heads, c.head_size, Rope(c.rope_theta, c.rope_scaling)),
            layers=tuple(LayerPlan(index, "moe", c.sliding_window) for index in range(c.num_hidden_layers)),
            experts=c.num_local_experts,
            top_k=c.num_experts_per_tok,
            expert_intermediate=c.intermediate_size,
        )

    def architecture(self) -> Architecture:
        return self._architecture

    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        return model_sources(self._architecture, names, self.config.tie_word_embeddings)

    def layer_sources(self, layer: int) -> dict[str, Sources]:
        router = block_sparse_router(self._architecture, layer)
        return attention_sources(self._architecture, layer) | {"router": (router,)}

    def expert_sources(self, layer: int, expert: int) -> ExpertSources:
        return block_sparse_expert(self._architecture, layer, expert)

    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        experts, gates = top_k(softmax(logits), self.config.num_experts_per_tok)
        return Choice(experts, gates / gates.sum(axis=-1, keepdims=True))
