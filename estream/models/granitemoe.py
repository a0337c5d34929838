"""GraniteMoE (model_type `granitemoe`): Mixtral's layers, every expert of a layer in one tensor, and four multipliers.

The multipliers act on activations; here they are factors of the weights: the embedding's rows, q (in the place of
1 / sqrt(head size)), what either half of a layer adds to the residual, and the head.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from estream.errors import CheckpointError
from estream.models.base import Architecture, Attention, Choice, ExpertSources, Family, LayerPlan, Rope, Source, Sources
from estream.models.choose import softmax, top_k
from estream.models.config import GroupedHeads, check_decoder, read_config
from estream.models.rope_config import RopeScaling
from estream.models.sources import attention_sources, model_sources


@dataclass(frozen=True)
class GraniteMoeConfig(GroupedHeads):
    """config.json's own fields. `intermediate_size` is one expert's."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_decoder(self, experts=self.num_local_experts, positive=("intermediate_size", "num_local_experts"))
        for name in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"):
            if not getattr(self, name) > 0:
                raise CheckpointError(f"config.json: {name}", asked="more than 0", had=getattr(self, name))


class GraniteMoe(Family):
    name = "granitemoe"
    config: GraniteMoeConfig

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> GraniteMoe:
        return cls(read_config(GraniteMoeConfig, raw, cls.name))

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
            ),
            layers=tuple(LayerPlan(index, "moe") for index in range(c.num_hidden_layers)),
            experts=c.num_local_experts,
            top_k=c.num_experts_per_tok,
            expert_intermediate=c.intermediate_size,
        )

    def architecture(self) -> Architecture:
        return self._architecture

    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        found = model_sources(self._architecture, names, self.config.tie_word_embeddings)
        found["embed"] = _scaled(found["embed"], self.config.embedding_multiplier)
        found["head"] = _scaled(found["head"], 1 / self.config.logits_scaling)
        return found

    def layer_sources(self, layer: int) -> dict[str, Sources]:
        c = self.config
        factors = dict.fromkeys(("q", "q.bias"), c.attention_multiplier * math.sqrt(c.head_size))
        factors |= dict.fromkeys(("o", "o.bias"), c.residual_multiplier)
        found = {
            name: _scaled(sources, factors.get(name, 1.0))
            for name, sources in attention_sources(self._architecture, layer).items()
        }
        router = f"model.layers.{layer}.block_sparse_moe.router.layer.weight"
        found["router"] = (Source(router, (c.num_local_experts, c.hidden_size), transpose=True),)
        return found

    def expert_sources(self, layer: int, expert: int) -> ExpertSources:
        c, prefix = self.config, f"model.layers.{layer}.block_sparse_moe"
        fused = (c.num_local_experts, 2 * c.intermediate_size, c.hidden_size)
        first, second = slice(0, c.intermediate_size), slice(c.intermediate_size, 2 * c.intermediate_size)
        down = (c.num_local_experts, c.hidden_size, c.intermediate_size)
        return ExpertSources(
            gate=Source(f"{prefix}.input_linear.weight", fused, (expert, first), transpose=True),
            up=Source(f"{prefix}.input_linear.weight", fused, (expert, second), transpose=True),
            down=Source(f"{prefix}.output_linear.weight", down, (expert,), True, c.residual_multiplier),
        )

    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        """The softmax over the chosen logits alone."""
        experts, chosen = top_k(logits.astype(np.float32, copy=False), self.config.num_experts_per_tok)
        return Choice(experts, softmax(chosen))


def _scaled(sources: Sources, factor: float) -> Sources:
    return tuple(replace(source, scale=factor) for source in sources)
