"""PhiMoE (model_type `phimoe`; Phi-3.5-MoE, Phi-tiny-MoE): LayerNorm, biases, LongRoPE, sparse-mixer routing.

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
from estream.models.choose import softmax
from estream.models.config import GroupedHeads, check_decoder, check_window, read_config
from estream.models.rope_config import RopeScaling
from estream.models.sources import attention_sources, block_sparse_expert, block_sparse_router, model_sources


@dataclass(frozen=True)
class PhimoeConfig(GroupedHeads):
    """config.json's own fields. `intermediate_size` is one expert's; `router_jitter_noise` is the relative distance
    from the largest logit within which the sparse mixer counts an expert, also when it does not train."""

    vocab_size: int = 32064
    hidden_size: int = 4096
    intermediate_size: int = 6400
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
    attention_bias: bool = False
    lm_head_bias: bool = False
    num_local_experts: int = 16
    num_experts_per_tok: int = 2
    router_jitter_noise: float = 0.01
    tie_word_embeddings: bool = False

    @property
    def window(self) -> int | None:
        """Public checkpoints give the whole context as window, which is none."""
        limited = self.sliding_window is not None and self.sliding_window < self.max_position_embeddings
        return self.sliding_window if limited else None

    def __post_init__(self) -> None:
        check_decoder(self, experts=self.num_local_experts, positive=("intermediate_size", "num_local_experts"))
        if self.num_experts_per_tok != 2:
            raise UnsupportedModelError(
                "config.json: num_experts_per_tok: the sparse mixer chooses two", asked=2, had=self.num_experts_per_tok
            )
        check_window(self.sliding_window)
        if self.router_jitter_noise < 0:
            raise CheckpointError("config.json: router_jitter_noise", asked="at least 0", had=self.router_jitter_noise)


class Phimoe(Family):
    name = "phimoe"
    config: PhimoeConfig

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Phimoe:
        return cls(read_config(PhimoeConfig, raw, cls.name))

    @cached_property
    def _architecture(self) -> Architecture:
        c = self.config
        return Architecture(
            family=self.name,
            hidden=c.hidden_size,
            vocab=c.vocab_size,
            context=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            norm="layer",
            head_bias=c.lm_head_bias,
            attention=Attention(
                heads=c.num_attention_heads,
                kv_heads=c.kv_heads,
                head_dim=c.head_size,
                rope=Rope(c.rope_theta, c.rope_scaling),
                qkv_bias=c.attention_bias,
                o_bias=c.attention_bias,
            ),
            layers=tuple(LayerPlan(index, "moe", c.window) for index in range(c.num_hidden_layers)),
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
        """The sparse mixer (arXiv 2409.12136): the largest logit, then the largest of the others. A gate is the softmax
        among the logits near the chosen one; the gates of a token do not add up to 1."""
        logits = logits.astype(np.float32, copy=False)
        left, experts, gates = logits, [], []
        for _ in range(2):
            chosen = left.argmax(axis=1)[:, None]
            largest = np.take_along_axis(left, chosen, axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):  # all logits 0: none is far
                far = (largest - logits) / np.maximum(np.abs(logits), largest) > 2 * self.config.router_jitter_noise
            near = softmax(np.where(far, np.float32(-np.inf), left))
            experts.append(chosen)
            gates.append(np.take_along_axis(near, chosen, axis=1))
            left = left.copy()
            np.put_along_axis(left, chosen, np.float32(-np.inf), axis=1)
        return Choice(np.concatenate(experts, axis=1).astype(np.int32), np.concatenate(gates, axis=1))

    def undecided(self, logits: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """Every row: a gate jumps where another logit comes near, whichever experts are chosen."""
        return np.arange(len(logits))
