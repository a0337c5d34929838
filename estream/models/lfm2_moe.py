"""LFM2-MoE (model_type `lfm2_moe`; LFM2-8B-A1B): most layers a gated short convolution in the place of attention,
experts chosen by sigmoid scores to which each layer adds a bias of its own, the first layers dense.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from estream.errors import CheckpointError, UnsupportedModelError, brief
from estream.models.base import Architecture, Attention, Choice, ExpertSources, Family, LayerPlan, Rope, Source, Sources
from estream.models.choose import near_ties_of_scores, sigmoid, top_k, uncertainty
from estream.models.config import GroupedHeads, check_decoder, read_config
from estream.models.rope_config import RopeScaling
from estream.models.sources import linear, model_sources, swiglu

# Fields that decide nothing as long as they say this (a str: what that field says).
_ASSUMED: dict[str, str | bool] = {
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "block_norm_eps": "norm_eps",
    "block_use_swiglu": True,
    "use_pos_enc": True,
}
# How training initialised, and how it came to the dense layers' width, which intermediate_size and the tensors tell.
_TRAINING = frozenset(
    """
    block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of block_mlp_init_scale
    block_out_init_scale block_use_xavier_init conv_use_xavier_init
    """.split()  # noqa: SIM905
)
_TAPS = (2, 32)  # of a convolution: one has no past, and an NPU block has 32 rows
_LEAST_SUM = 1e-6  # is added to the gates' sum before they are divided by it


@dataclass(frozen=True)
class Lfm2MoeConfig(GroupedHeads):
    """config.json's own fields. `intermediate_size` is that of the `num_dense_layers` first layers. `conv_L_cache`:
    taps of the convolution. `full_attn_idxs`: what old configs have in the place of `layer_types`."""

    vocab_size: int = 65536
    hidden_size: int = 2048
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 128000
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    conv_bias: bool = False
    conv_L_cache: int = 3
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = True
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    layer_types: tuple[str, ...] | None = None
    full_attn_idxs: tuple[int, ...] | None = None
    tie_word_embeddings: bool = True

    @property
    def rms_norm_eps(self) -> float:
        return self.norm_eps

    @property
    def kinds(self) -> tuple[str, ...]:
        """full_attention or conv, per layer."""
        if self.layer_types is not None:
            return self.layer_types
        attention = set(self.full_attn_idxs or ())
        return tuple("full_attention" if at in attention else "conv" for at in range(self.num_hidden_layers))

    def __post_init__(self) -> None:
        if not self.norm_eps > 0:
            raise CheckpointError("config.json: norm_eps", asked="more than 0", had=self.norm_eps)
        dense = ("intermediate_size",) if self.num_dense_layers else ()
        check_decoder(self, experts=self.num_experts, positive=("moe_intermediate_size", "num_experts", *dense))
        self._check_layers()
        if not self.routed_scaling_factor > 0:
            had = self.routed_scaling_factor
            raise CheckpointError("config.json: routed_scaling_factor", asked="more than 0", had=had)
        if "conv" not in self.kinds:
            return
        if not _TAPS[0] <= self.conv_L_cache <= _TAPS[1]:
            raise UnsupportedModelError(
                "config.json: conv_L_cache", asked=f"{_TAPS[0]} to {_TAPS[1]}", had=self.conv_L_cache
            )
        if self.num_attention_heads * self.head_size != self.hidden_size:
            raise UnsupportedModelError(
                "config.json: one output projection serves attention and convolution, and their widths differ",
                asked=f"hidden_size {self.hidden_size}",
                had=f"{self.num_attention_heads} heads of {self.head_size}",
            )

    def _check_layers(self) -> None:
        count, indices = self.num_hidden_layers, self.full_attn_idxs
        if self.layer_types is None and indices is None:
            raise CheckpointError("config.json: layer_types", asked=f"{count} layers", had="no full_attn_idxs either")
        if indices is not None and not all(0 <= index < count for index in indices):
            raise CheckpointError("config.json: full_attn_idxs", asked=f"0 to {count - 1}", had=brief(indices))
        if len(self.kinds) != count:
            raise CheckpointError("config.json: layer_types", asked=f"{count} layers", had=len(self.kinds))
        unknown = sorted(set(self.kinds) - {"full_attention", "conv"})
        if unknown:
            raise UnsupportedModelError(
                "config.json: layer_types", asked="'full_attention' or 'conv'", had=brief(", ".join(unknown))
            )
        if indices is not None and {at for at in range(count) if self.kinds[at] != "conv"} != set(indices):
            raise CheckpointError("config.json: layer_types and full_attn_idxs differ", had=brief(indices))
        if not 0 <= self.num_dense_layers <= count:
            raise CheckpointError("config.json: num_dense_layers", asked=f"0 to {count}", had=self.num_dense_layers)
        if self.num_dense_layers == count:
            raise UnsupportedModelError("config.json: no layer has experts (num_dense_layers)", had=count)


class Lfm2Moe(Family):
    name = "lfm2_moe"
    config: Lfm2MoeConfig

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Lfm2Moe:
        fields = {name: value for name, value in raw.items() if name not in _ASSUMED and name not in _TRAINING}
        config = read_config(Lfm2MoeConfig, fields, cls.name, aliases={"tie_embedding": "tie_word_embeddings"})
        for name, assumed in _ASSUMED.items():
            asked = getattr(config, assumed) if isinstance(assumed, str) else assumed
            if raw.get(name) not in (None, asked):
                raise UnsupportedModelError(f"config.json: {name}", asked=asked, had=brief(raw[name]))
        return cls(config)

    @cached_property
    def _architecture(self) -> Architecture:
        c = self.config
        conv = "conv" in c.kinds
        return Architecture(
            family=self.name,
            hidden=c.hidden_size,
            vocab=c.vocab_size,
            context=c.max_position_embeddings,
            norm_eps=c.norm_eps,
            attention=Attention(
                heads=c.num_attention_heads,
                kv_heads=c.kv_heads,
                head_dim=c.head_size,
                rope=Rope(c.rope_theta, c.rope_scaling),
                qk_norm="head",
            ),
            layers=tuple(
                LayerPlan(
                    at,
                    "dense" if at < c.num_dense_layers else "moe",
                    mixer="conv" if kind == "conv" else "attention",
                )
                for at, kind in enumerate(c.kinds)
            ),
            experts=c.num_experts,
            top_k=c.num_experts_per_tok,
            expert_intermediate=c.moe_intermediate_size,
            dense_intermediate=c.intermediate_size if c.num_dense_layers else 0,
            expert_bias=c.use_expert_bias,
            conv_kernel=c.conv_L_cache if conv else 0,
            conv_bias=conv and c.conv_bias,
        )

    def architecture(self) -> Architecture:
        return self._architecture

    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        found = model_sources(self._architecture, names, self.config.tie_word_embeddings)
        return found | {"final_norm": (Source("model.embedding_norm.weight", (self.config.hidden_size,)),)}

    def layer_sources(self, layer: int) -> dict[str, Sources]:
        c, prefix = self.config, f"model.layers.{layer}"
        found = {
            "attn_norm": Source(f"{prefix}.operator_norm.weight", (c.hidden_size,)),
            "ffn_norm": Source(f"{prefix}.ffn_norm.weight", (c.hidden_size,)),
        }
        conv = c.kinds[layer] == "conv"
        found |= self._conv_sources(f"{prefix}.conv") if conv else self._attention_sources(f"{prefix}.self_attn")
        if layer >= c.num_dense_layers:
            found["router"] = linear(f"{prefix}.feed_forward.gate", c.hidden_size, c.num_experts)
            if c.use_expert_bias:
                found["expert_bias"] = Source(f"{prefix}.feed_forward.expert_bias", (c.num_experts,))
        sources: dict[str, Sources] = {name: (source,) for name, source in found.items()}
        if self._architecture.o_bias:
            sources.setdefault("o.bias", ())
        return sources

    def _attention_sources(self, prefix: str) -> dict[str, Source]:
        attention, hidden = self._architecture.attention, self.config.hidden_size
        return {
            "q": linear(f"{prefix}.q_proj", hidden, attention.q_width),
            "k": linear(f"{prefix}.k_proj", hidden, attention.k_width),
            "v": linear(f"{prefix}.v_proj", hidden, attention.v_width),
            "o": linear(f"{prefix}.out_proj", attention.out_width, hidden),
            "q_norm": Source(f"{prefix}.q_layernorm.weight", (attention.head_dim,)),
            "k_norm": Source(f"{prefix}.k_layernorm.weight", (attention.head_dim,)),
        }

    def _conv_sources(self, prefix: str) -> dict[str, Source]:
        """in_proj holds the rows of b, c and x, one below the other."""
        hidden, taps = self.config.hidden_size, self.config.conv_L_cache
        found = {
            "conv": Source(f"{prefix}.conv.weight", (hidden, 1, taps), (slice(None), 0), transpose=True),
            "o": linear(f"{prefix}.out_proj", hidden, hidden),
        }
        if self.config.conv_bias:
            found["conv.bias"] = Source(f"{prefix}.conv.bias", (hidden,))
            found["o.bias"] = Source(f"{prefix}.out_proj.bias", (hidden,))
        for at, name in enumerate(("conv_b", "conv_c", "conv_x")):
            rows = slice(at * hidden, (at + 1) * hidden)
            found[name] = Source(f"{prefix}.in_proj.weight", (3 * hidden, hidden), (rows,), transpose=True)
            if self.config.conv_bias:
                found[f"{name}.bias"] = Source(f"{prefix}.in_proj.bias", (3 * hidden,), (rows,))
        return found

    def expert_sources(self, layer: int, expert: int) -> ExpertSources:
        prefix = f"model.layers.{layer}.feed_forward.experts.{expert}"
        return swiglu(prefix, self.config.hidden_size, self.config.moe_intermediate_size, ("w1", "w3", "w2"))

    def ffn_sources(self, layer: int) -> ExpertSources | None:
        if layer >= self.config.num_dense_layers:
            return None
        prefix = f"model.layers.{layer}.feed_forward"
        return swiglu(prefix, self.config.hidden_size, self.config.intermediate_size, ("w1", "w3", "w2"))

    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        """Chosen by score and bias together; gates are the scores alone."""
        scores = sigmoid(logits)
        experts, _ = top_k(_biased(scores, bias), self.config.num_experts_per_tok)
        gates = np.take_along_axis(scores, experts, axis=1)
        if self.config.norm_topk_prob:
            gates = gates / (gates.sum(axis=-1, keepdims=True) + np.float32(_LEAST_SUM))
        return Choice(experts, gates * np.float32(self.config.routed_scaling_factor))

    def undecided(self, logits: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """Near ties of what is chosen by. A score moves as its logit does, times the sigmoid's slope."""
        scores = sigmoid(logits)
        slack = scores * (1 - scores) * (uncertainty(logits) / 2)
        return near_ties_of_scores(_biased(scores, bias), slack, self.config.num_experts_per_tok)


def _biased(scores: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return scores if bias is None else scores + bias
