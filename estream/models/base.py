"""What a model family must say about itself; `models/<family>.py` says it.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from estream.models.choose import near_ties
from estream.models.rope_config import RopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head (pairs i and i + D/2, the Hugging Face layout)."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): k and v come from a normed vector of `rank`, and
    where `query_rank` is given q from one of that; the components of k that turn are one head's, for all. `eps`: of
    these norms."""

    rank: int
    query_rank: int | None
    eps: float


@dataclass(frozen=True)
class Attention:
    """Attention geometry, equal in all layers.

    `clip` clamps q, k and v to ±clip after the projection and, where there is one, the q/k norm; before RoPE.
    `rotary_dim`: the first components of a head that turn; None: all. `value_dim`: of a head of v; None: as of q and k.
    `scale`: of the scores; None: head_dim ** -0.5. `sinks`: each head has one more score, of a key without a value.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "projection", "head"] = "none"
    clip: float | None = None
    rotary_dim: int | None = None
    value_dim: int | None = None
    scale: float | None = None
    latent: Latent | None = None
    sinks: bool = False

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def k_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        return self.kv_heads * self.v_dim

    @property
    def out_width(self) -> int:
        """Columns of what attention gives to the output projection."""
        return self.heads * self.v_dim

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def rotated(self) -> int:
        """Components of a head that turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_scale(self) -> float:
        return float(self.head_dim) ** -0.5 if self.scale is None else self.scale

    @property
    def cache_head_dim(self) -> int:
        """Columns of a head in the key and value caches: the fused attention operator takes multiples of 8."""
        return -(-max(self.head_dim, self.v_dim) // 8) * 8

    @property
    def cache_width(self) -> int:
        """Columns of the key (or value) cache per token."""
        return self.kv_heads * self.cache_head_dim


@dataclass(frozen=True)
class Clamped:
    """gpt-oss's SwiGLU: (up + 1) · gate · sigmoid(alpha · gate), gate at most `limit`, up within ±limit, and biases of
    all three projections."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does. `window` w: a query sees itself and the w − 1 keys before it; None: all keys before it.
    `mixer` conv: a gated short convolution along the tokens in the place of attention."""

    index: int
    ffn: Literal["moe", "dense"]
    window: int | None = None
    mixer: Literal["attention", "conv"] = "attention"


@dataclass(frozen=True)
class Architecture:
    """Everything the package, the graphs and the engine need to know of a model, free of family quirks.

    `shared_intermediate` and `dense_intermediate` are 0 where the model has no shared expert or no dense layer.
    `shared_gate`: the router has one more output, whose sigmoid gates the shared expert.
    `norm`: of the residual stream; a layer norm subtracts the mean and has a bias. `head_bias`: of the output logits.
    `expert_bias`: layers have a bias per expert that takes part in the choice alone (`Family.route`). `conv_kernel`:
    taps of the convolution layers, 0 where there are none; `conv_bias`: their projections and the taps have biases.
    `clamped`: the form of the experts; None: plain SwiGLU.
    """

    family: str
    hidden: int
    vocab: int
    context: int
    norm_eps: float
    attention: Attention
    layers: tuple[LayerPlan, ...]
    experts: int
    top_k: int
    expert_intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    dense_intermediate: int = 0
    norm: Literal["rms", "layer"] = "rms"
    head_bias: bool = False
    expert_bias: bool = False
    clamped: Clamped | None = None
    conv_kernel: int = 0
    conv_bias: bool = False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(plan.index for plan in self.layers if plan.ffn == "moe")

    @property
    def router_width(self) -> int:
        """Columns of the router weight: one per expert, and one for the shared expert's gate."""
        return self.experts + int(self.shared_gate)

    @property
    def o_bias(self) -> bool:
        """Whether output projections have a bias. One graph serves all layers: those without one get zeros."""
        return self.attention.o_bias or self.conv_bias


@dataclass(frozen=True)
class Source:
    """Where a packed tensor comes from: a checkpoint tensor, a piece of it, whether to transpose, and a factor.

    `shape` is the checkpoint tensor's whole shape (checked). `pick` indexes it first (fused tensors).
    `order` takes rows of the tensor in this order instead, before the transpose.
    Hugging Face stores linear weights [out, in]; graphs take [in, out]: `transpose`.
    `scale` multiplies the values, in float32: what a family's config multiplies activations with goes into the weights.
    """

    name: str
    shape: tuple[int, ...]
    pick: tuple[int | slice, ...] = ()
    transpose: bool = False
    scale: float = 1.0
    order: tuple[int, ...] = ()


# A packed tensor is one source, or several side by side along the last axis (after the transpose); none: zeros.
Sources = tuple[Source, ...]


@dataclass(frozen=True)
class ExpertSources:
    """gate and up come out as [H, I], down as [I, H]."""

    gate: Source
    up: Source
    down: Source
    biases: tuple[Source, Source, Source] | None = None  # of gate, up and down


@dataclass(frozen=True)
class Choice:
    """Experts chosen per token: experts int32 [N, k], gates float32 [N, k]; shared float32 [N] where it is gated."""

    experts: np.ndarray
    gates: np.ndarray
    shared: np.ndarray | None = None


class Family(ABC):
    """One model family, built from a checkpoint's config.json.

    `config` is the family's frozen dataclass with config.json's own field names; it is stored in model.json and read
    back by `from_config`, so that the phone needs nothing else.
    """

    name: ClassVar[str]  # model_type in config.json

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Family:
        """Reads config.json (or model.json's copy). Raises UnsupportedModelError on a field that changes the
        arithmetic and is not understood, CheckpointError on one that makes no sense. An omitted field takes
        transformers' default."""

    @abstractmethod
    def architecture(self) -> Architecture: ...

    @abstractmethod
    def model_sources(self, names: Collection[str]) -> dict[str, Sources]:
        """`embed` [V, H], `final_norm` [H], `head` [H, V], and `final_norm.bias` [H], `head.bias` [V] where the
        architecture has them. `names`: what the checkpoint holds (tied or untied)."""

    @abstractmethod
    def layer_sources(self, layer: int) -> dict[str, Sources]:
        """Dense tensors of a layer by packed name, those that the architecture has: attn_norm, q, k, v, o, their biases
        as q.bias, ..., q_norm, k_norm, for latent attention q_a, kv_a, k_rope, their biases and norms, ffn_norm,
        router, expert_bias [E]; attn_norm.bias and ffn_norm.bias of a layer norm. A conv layer has, in the place of q,
        k, v: conv_b, conv_c, conv_x [H, H], conv [taps, H], and their biases [H]."""

    @abstractmethod
    def expert_sources(self, layer: int, expert: int) -> ExpertSources: ...

    def shared_sources(self, layer: int) -> ExpertSources | None:
        """The shared expert of a MoE layer."""
        return None

    def ffn_sources(self, layer: int) -> ExpertSources | None:
        """The feed-forward network of a dense layer."""
        return None

    def ignored(self, name: str) -> bool:
        """Checkpoint tensors that may be present and carry no arithmetic: the rotary frequencies that old checkpoints
        store follow from the config."""
        return name.endswith("rotary_emb.inv_freq")

    @abstractmethod
    def route(self, logits: np.ndarray, bias: np.ndarray | None = None) -> Choice:
        """The family's choice of experts. `logits`: float32 [N, router_width]. `bias`: the layer's `expert_bias`,
        float32 [E], where the architecture has one."""

    def undecided(self, logits: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """Rows whose choice hangs on bits that float16 does not hold, ascending. `logits`, `bias`: as of `route`."""
        architecture = self.architecture()
        return near_ties(logits[:, : architecture.experts], architecture.top_k)
