"""gpt-oss (model_type `gpt_oss`): attention sinks, every other layer with a window, clamped experts with biases, YaRN.

Published checkpoints hold the experts in MXFP4, which `Checkpoint` reads under the names of the plain tensors.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from estream.errors import CheckpointError, UnsupportedModelError
from estream.models.base import (
    Architecture,
    Attention,
    Choice,
    Clamped,
    ExpertSources,
    Family,
    LayerPlan,
    Rope,
    Source,
    Sources,
)
from estream.models.choose import near_ties, softmax, top_k
from estream.models.config import GroupedHeads, check_decoder, read_config
from estream.models.rope_config import RopeScaling
from estream.models.sources import attention_sources, linear, model_sources

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class GptOssConfig(GroupedHeads):
    """config.json's own fields. `layer_types`, if missing, begin with a window and alternate."""

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    tie_word_embeddings: bool = False

    @property
    def types(self) -> tuple[str, ...]:
        """Kind of each layer's attention."""
        if self.layer_types is not None:
            return self.layer_types
        return tuple(_FULL if index % 2 else _SLIDING for index in range(self.num_hidden_layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(self.sliding_window if kind == _SLIDING else None for kind in self.types)

    def __post_init__(self) -> None:
        check_decoder(self, experts=self.num_local_experts, positive=("intermediate_size", "num_local_experts"))
        if self.layer_types is not None:
            unknown = sorted(set(self.layer_types) - {_FULL, _SLIDING})
            if unknown:
                raise UnsupportedModelError(
                    "config.json: layer_types", asked=f"{_FULL}, {_SLIDING}", had=", ".join(unknown)
                )
            if len(self.layer_types) != self.num_hidden_layers:
                asked = f"{self.num_hidden_layers} layers"
                raise CheckpointError("config.json: layer_types", asked=asked, had=len(self.layer_types))
        if (self.sliding_window or 0) < 1 and _SLIDING in self.types:
            had = self.sliding_window if self.sliding_window is not None else "null"
            raise CheckpointError(
                "config.json: sliding_window, which layers of layer_types use", asked="at least 1", had=had
            )
        for name in ("swiglu_limit", "swiglu_alpha"):
            if not getattr(self, name) > 0:
                raise CheckpointError(f"config.json: {name}", asked="more than 0", had=getattr(self, name))


class GptOss(Family):
    name = "gpt_oss"
    config: GptOssConfig

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> GptOss:
        raw = dict(raw)
        raw.pop("initial_context_length", None)  # of YaRN, where rope_scaling has it, too
        aliases = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
        return cls(read_config(GptOssConfig, raw, cls.name, aliases=aliases))

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
                sinks=True,
            ),
            layers=tuple(LayerPlan(index, "moe", window) for index, window in enumerate(c.windows)),
            experts=c.num_local_experts,
            top_k=c.num_experts_per_tok,
            expert_intermediate=c.intermediate_size,
            expert_bias=True,  # the router's own
            clamped=Clamped(c.swiglu_limit, c.swiglu_alpha),
        )

    def architecture(self) -> Architecture:
        return self._architecture

    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        return model_sources(self._architecture, names, self.config.tie_word_embeddings)

    def layer_sources(self, layer: int) -> dict[str, Sources]:
        c, prefix = self.config, f"model.layers.{layer}"
        router = linear(f"{prefix}.mlp.router", c.hidden_size, c.num_local_experts)
        return attention_sources(self._architecture, layer) | {
            "sinks": (Source(f"{prefix}.self_attn.sinks", (c.num_attention_heads,)),),
            "router": (router,),
            "expert_bias": (Source(f"{prefix}.mlp.router.bias", (c.num_local_experts,)),),
        }

    def expert_sources(self, layer: int, expert: int) -> ExpertSources:
        """gate and up are interleaved; matrices are stored as [in, out]."""
        c, prefix = self.config, f"model.layers.{layer}.mlp.experts"
        experts, hidden, inner = c.num_local_experts, c.hidden_size, c.intermediate_size
        both = Source(f"{prefix}.gate_up_proj", (experts, hidden, 2 * inner))
        bias = Source(f"{prefix}.gate_up_proj_bias", (experts, 2 * inner))
        first, second = slice(0, 2 * inner, 2), slice(1, 2 * inner, 2)
        return ExpertSources(
            gate=replace(both, pick=(expert, slice(None), first)),
            up=replace(both, pick=(expert, slice(None), second)),
            down=Source(f"{prefix}.down_proj", (experts, inner, hidden), (expert,)),
            biases=(
                replace(bias, pick=(expert, first)),
                replace(bias, pick=(expert, second)),
                Source(f"{prefix}.down_proj_bias", (experts, hidden), (expert,)),
            ),
        )

    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        """The softmax over the chosen logits alone. bias: the router's own, float32 [E]."""
        experts, chosen = top_k(_biased(logits, bias), self.config.num_experts_per_tok)
        return Choice(experts, softmax(chosen))

    def undecided(self, logits: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        return near_ties(_biased(logits, bias), self.config.num_experts_per_tok)


def _biased(logits: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    logits = logits.astype(np.float32, copy=False)
    return logits if bias is None else logits + bias
