"""DeepSeek-V2 (model_type `deepseek_v2`): latent attention, shared experts, the first layers dense, YaRN.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from estream.errors import CheckpointError, UnsupportedModelError, brief
from estream.models.base import (
    Architecture,
    Attention,
    Choice,
    ExpertSources,
    Family,
    Latent,
    LayerPlan,
    Rope,
    Source,
    Sources,
)
from estream.models.choose import near_ties, softmax, top_k
from estream.models.config import GroupedHeads, check_decoder, read_config
from estream.models.rope import yarn_mscale
from estream.models.rope_config import RopeScaling
from estream.models.sources import linear, model_sources, swiglu

_LATENT_EPS = 1e-6  # of the norms within attention, whatever rms_norm_eps says


@dataclass(frozen=True)
class DeepseekV2Config(GroupedHeads):
    """config.json's own fields. `intermediate_size` is that of the dense layers; `head_dim` and `qk_head_dim`, where
    they are given, count the components that turn, and all; groups matter for the method group_limited_greedy."""

    vocab_size: int = 102400
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
    mlp_bias: bool = False
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    qk_head_dim: int | None = None
    v_head_dim: int = 128
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    moe_intermediate_size: int = 1407
    n_routed_experts: int = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int = 6
    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        """What the rotary embedding turns."""
        return self.qk_rope_head_dim

    def __post_init__(self) -> None:
        sizes = ("intermediate_size", "moe_intermediate_size", "n_routed_experts", "kv_lora_rank", "qk_nope_head_dim",
                 "qk_rope_head_dim", "v_head_dim")  # fmt: skip
        positive = sizes + (("q_lora_rank",) if self.q_lora_rank is not None else ())
        check_decoder(self, experts=self.n_routed_experts, positive=positive)
        for name, supported in (
            ("mlp_bias", False),
            ("moe_layer_freq", 1),
            ("scoring_func", "softmax"),
            ("norm_topk_prob", False),  # the implementations there are differ in what it does to the scaling factor
            ("num_key_value_heads", self.num_attention_heads),
            ("head_dim", self.qk_rope_head_dim),
            ("qk_head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim),
        ):
            if getattr(self, name) not in (None, supported):
                had = brief(getattr(self, name))
                raise UnsupportedModelError(f"config.json: {name}", asked=brief(supported), had=had)
        if not 0 <= self.first_k_dense_replace < self.num_hidden_layers:
            asked = f"0 to {self.num_hidden_layers - 1}: some layer must have experts"
            raise UnsupportedModelError(
                "config.json: first_k_dense_replace", asked=asked, had=self.first_k_dense_replace
            )
        if self.n_shared_experts is not None and self.n_shared_experts < 0:
            raise CheckpointError("config.json: n_shared_experts", asked="at least 0", had=self.n_shared_experts)
        if not self.routed_scaling_factor > 0:
            raise CheckpointError(
                "config.json: routed_scaling_factor", asked="more than 0", had=self.routed_scaling_factor
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if self.topk_method == "greedy":
            return
        if self.topk_method != "group_limited_greedy":
            asked = "'greedy' or 'group_limited_greedy'"
            raise UnsupportedModelError("config.json: topk_method", asked=asked, had=brief(self.topk_method))
        groups, chosen = self.n_group or 0, self.topk_group or 0
        whole = groups > 0 and self.n_routed_experts % groups == 0
        if (
            not whole
            or not 1 <= chosen <= groups
            or chosen * (self.n_routed_experts // groups) < self.num_experts_per_tok
        ):
            raise CheckpointError(
                "config.json: n_group and topk_group",
                asked=f"groups of {self.n_routed_experts} experts, so many that {self.num_experts_per_tok} fit",
                had=f"{self.n_group} and {self.topk_group}",
            )

    @property
    def shared_width(self) -> int:
        return self.moe_intermediate_size * (self.n_shared_experts or 0)

    @property
    def score_scale(self) -> float:
        """YaRN sharpens the scores themselves, beside what it does to cos and sin."""
        scale = float(self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if self.rope_scaling is None or not self.rope_scaling.mscale_all_dim:
            return scale
        return scale * yarn_mscale(self.rope_scaling.factor, self.rope_scaling.mscale_all_dim) ** 2


class DeepseekV2(Family):
    name = "deepseek_v2"
    config: DeepseekV2Config

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> DeepseekV2:
        return cls(read_config(DeepseekV2Config, raw, cls.name, aliases={"num_experts": "n_routed_experts"}))

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
                kv_heads=c.num_attention_heads,
                head_dim=c.qk_rope_head_dim + c.qk_nope_head_dim,
                rope=Rope(c.rope_theta, c.rope_scaling),
                qkv_bias=c.attention_bias,
                o_bias=c.attention_bias,
                rotary_dim=c.qk_rope_head_dim,
                value_dim=c.v_head_dim,
                scale=c.score_scale,
                latent=Latent(c.kv_lora_rank, c.q_lora_rank, _LATENT_EPS),
            ),
            layers=tuple(
                LayerPlan(index, "dense" if index < c.first_k_dense_replace else "moe")
                for index in range(c.num_hidden_layers)
            ),
            experts=c.n_routed_experts,
            top_k=c.num_experts_per_tok,
            expert_intermediate=c.moe_intermediate_size,
            shared_intermediate=c.shared_width,
            dense_intermediate=c.intermediate_size if c.first_k_dense_replace else 0,
        )

    def architecture(self) -> Architecture:
        return self._architecture

    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        return model_sources(self._architecture, names, self.config.tie_word_embeddings)

    def layer_sources(self, layer: int) -> dict[str, Sources]:
        c, prefix = self.config, f"model.layers.{layer}"
        hidden, rank, at = c.hidden_size, c.kv_lora_rank, f"{prefix}.self_attn"
        q_name, q_depth = (f"{at}.q_proj", hidden) if c.q_lora_rank is None else (f"{at}.q_b_proj", c.q_lora_rank)
        both, expand = f"{at}.kv_a_proj_with_mqa", f"{at}.kv_b_proj.weight"
        turning = tuple(rank + row for row in self._pairs_apart)
        found = {
            "attn_norm": Source(f"{prefix}.input_layernorm.weight", (hidden,)),
            "ffn_norm": Source(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            "q": Source(f"{q_name}.weight", (len(self._q_order), q_depth), transpose=True, order=self._q_order),
            "kv_a": Source(f"{both}.weight", (rank + c.qk_rope_head_dim, hidden), (slice(0, rank),), transpose=True),
            "k_rope": Source(f"{both}.weight", (rank + c.qk_rope_head_dim, hidden), transpose=True, order=turning),
            "kv_a_norm": Source(f"{at}.kv_a_layernorm.weight", (rank,)),
            "o": linear(f"{at}.o_proj", c.num_attention_heads * c.v_head_dim, hidden),
        }
        for name, order in zip("kv", self._kv_orders, strict=True):
            rows = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
            found[name] = Source(expand, (rows, rank), transpose=True, order=order)
        if c.q_lora_rank is not None:
            found["q_a"] = linear(f"{at}.q_a_proj", hidden, c.q_lora_rank)
            found["q_a_norm"] = Source(f"{at}.q_a_layernorm.weight", (c.q_lora_rank,))
        if c.attention_bias:
            whole = (rank + c.qk_rope_head_dim,)
            found["kv_a.bias"] = Source(f"{both}.bias", whole, (slice(0, rank),))
            found["k_rope.bias"] = Source(f"{both}.bias", whole, order=turning)
            found["o.bias"] = Source(f"{at}.o_proj.bias", (hidden,))
            if c.q_lora_rank is not None:
                found["q_a.bias"] = Source(f"{at}.q_a_proj.bias", (c.q_lora_rank,))
        if layer >= c.first_k_dense_replace:
            found["router"] = linear(f"{prefix}.mlp.gate", hidden, c.n_routed_experts)
        return {name: (source,) for name, source in found.items()}

    @cached_property
    def _pairs_apart(self) -> tuple[int, ...]:
        """Checkpoints turn neighbours (2i, 2i + 1), graphs i and i + R/2. q and k are ordered alike: scores stay."""
        return (*range(0, self.config.qk_rope_head_dim, 2), *range(1, self.config.qk_rope_head_dim, 2))

    @cached_property
    def _q_order(self) -> tuple[int, ...]:
        """Rows of the query projection, heads stored as [the rest | what turns]."""
        still, size = self.config.qk_nope_head_dim, self.config.qk_nope_head_dim + self.config.qk_rope_head_dim
        head = (*(still + row for row in self._pairs_apart), *range(still))
        return tuple(at * size + row for at in range(self.config.num_attention_heads) for row in head)

    @cached_property
    def _kv_orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows of the expanding projection that give k and v, heads stored as [k | v]."""
        still, size = self.config.qk_nope_head_dim, self.config.qk_nope_head_dim + self.config.v_head_dim
        starts = range(0, self.config.num_attention_heads * size, size)
        keys = tuple(start + row for start in starts for row in range(still))
        return keys, tuple(start + row for start in starts for row in range(still, size))

    def expert_sources(self, layer: int, expert: int) -> ExpertSources:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        return swiglu(prefix, self.config.hidden_size, self.config.moe_intermediate_size)

    def shared_sources(self, layer: int) -> ExpertSources | None:
        c = self.config
        if layer < c.first_k_dense_replace or not c.shared_width:
            return None
        return swiglu(f"model.layers.{layer}.mlp.shared_experts", c.hidden_size, c.shared_width)

    def ffn_sources(self, layer: int) -> ExpertSources | None:
        if layer >= self.config.first_k_dense_replace:
            return None
        return swiglu(f"model.layers.{layer}.mlp", self.config.hidden_size, self.config.intermediate_size)

    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        """Softmax over all experts; group_limited_greedy looks for the experts in the groups of the largest scores."""
        scores = softmax(logits)
        if self.config.topk_method != "greedy":
            scores = np.where(self._in_best_groups(scores), scores, np.float32(0.0))
        experts, gates = top_k(scores, self.config.num_experts_per_tok)
        return Choice(experts, gates * np.float32(self.config.routed_scaling_factor))

    def _in_best_groups(self, scores: np.ndarray) -> np.ndarray:
        """bool [N, E]."""
        best, _ = top_k(self._group_scores(scores), self.config.topk_group or 1)
        chosen = np.zeros((len(scores), self.config.n_group or 1), bool)
        np.put_along_axis(chosen, best, True, axis=1)
        return np.repeat(chosen, self.config.n_routed_experts // (self.config.n_group or 1), axis=1)

    def _group_scores(self, scores: np.ndarray) -> np.ndarray:
        return np.asarray(scores.reshape(len(scores), self.config.n_group or 1, -1).max(axis=2))

    def undecided(self, logits: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """Near ties of experts within the chosen groups, and of groups."""
        if self.config.topk_method == "greedy":
            return super().undecided(logits)
        within = np.where(self._in_best_groups(logits), logits, logits.min(axis=1, keepdims=True))
        groups = near_ties(self._group_scores(logits), self.config.topk_group or 1)
        return np.union1d(near_ties(within, self.config.num_experts_per_tok), groups)
