"""Reads a llama-architecture GGUF: hyperparameters, vocabulary, dequantised weights in Hugging Face layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from estream.errors import CheckpointError


@dataclass(frozen=True)
class LlamaConfig:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rope_theta: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class LlamaLayer:
    """One layer, float32, linear weights [out, in]."""

    attn_norm: np.ndarray  # [H]
    q: np.ndarray  # [heads * D, H]
    k: np.ndarray  # [kv_heads * D, H]
    v: np.ndarray  # [kv_heads * D, H]
    o: np.ndarray  # [H, heads * D]
    ffn_norm: np.ndarray  # [H]
    gate: np.ndarray  # [I, H]
    up: np.ndarray  # [I, H]
    down: np.ndarray  # [H, I]


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary. `special[i]`: token i is a control token."""

    tokens: list[str]
    special: list[bool]
    merges: list[tuple[str, str]]
    bos: int
    eos: int
    pad: int
    unknown: int
    chat_template: str


@dataclass(frozen=True)
class Llama:
    """A dense model with tied embeddings: `embed` [V, H] is the output head too."""

    config: LlamaConfig
    vocabulary: Vocabulary
    embed: np.ndarray
    layers: list[LlamaLayer]
    final_norm: np.ndarray


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order of q and k in llama GGUFs.

    They store pairs (i, i + D/2) of each head interleaved for their rotary embedding; Hugging Face keeps the halves
    apart. `weight` is [heads * D, in].
    """
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read(path: Path) -> Llama:
    """Reads the whole file; peak memory is that of the float32 weights. Raises CheckpointError."""
    reader = GGUFReader(path)
    field = _fields(reader, path)
    if field("general.architecture") != "llama":
        raise CheckpointError(f"{path}: architecture", asked="llama", had=field("general.architecture"))
    if field("tokenizer.ggml.model") != "gpt2" or field("tokenizer.ggml.pre") != "smollm":
        raise CheckpointError(
            f"{path}: tokenizer",
            asked="gpt2/smollm",
            had=f"{field('tokenizer.ggml.model')}/{field('tokenizer.ggml.pre')}",
        )
    config = LlamaConfig(
        layers=field("llama.block_count"),
        hidden=field("llama.embedding_length"),
        intermediate=field("llama.feed_forward_length"),
        heads=field("llama.attention.head_count"),
        kv_heads=field("llama.attention.head_count_kv"),
        vocab=field("llama.vocab_size"),
        context=field("llama.context_length"),
        rope_theta=float(field("llama.rope.freq_base")),
        norm_eps=round(float(field("llama.attention.layer_norm_rms_epsilon")), 12),
    )
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in stored or "rope_freqs.weight" in stored:
        raise CheckpointError(f"{path}: an untied head or scaled rotary frequencies are not expected here")

    def tensor(name: str, *shape: int) -> np.ndarray:
        if name not in stored:
            raise CheckpointError(f"{path}: {name} is missing")
        value = np.ascontiguousarray(dequantize(stored[name].data, stored[name].tensor_type), dtype=np.float32)
        if value.shape != shape:
            raise CheckpointError(f"{path}: {name}", asked=shape, had=value.shape)
        return value

    h, i = config.hidden, config.intermediate
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = [
        LlamaLayer(
            attn_norm=tensor(f"blk.{n}.attn_norm.weight", h),
            q=unpermute(tensor(f"blk.{n}.attn_q.weight", q_width, h), config.heads),
            k=unpermute(tensor(f"blk.{n}.attn_k.weight", kv_width, h), config.kv_heads),
            v=tensor(f"blk.{n}.attn_v.weight", kv_width, h),
            o=tensor(f"blk.{n}.attn_output.weight", h, q_width),
            ffn_norm=tensor(f"blk.{n}.ffn_norm.weight", h),
            gate=tensor(f"blk.{n}.ffn_gate.weight", i, h),
            up=tensor(f"blk.{n}.ffn_up.weight", i, h),
            down=tensor(f"blk.{n}.ffn_down.weight", h, i),
        )
        for n in range(config.layers)
    ]
    return Llama(
        config,
        _vocabulary(field),
        tensor("token_embd.weight", config.vocab, h),
        layers,
        tensor("output_norm.weight", h),
    )


def _fields(reader: GGUFReader, path: Path) -> Any:
    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise CheckpointError(f"{path}: metadata {name} is missing")
        return found.contents()

    return field


def _vocabulary(field: Any) -> Vocabulary:
    control = 3  # GGUF's token type of special tokens
    merges = []
    for merge in field("tokenizer.ggml.merges"):
        left, right = merge.split(" ")
        merges.append((left, right))
    return Vocabulary(
        tokens=list(field("tokenizer.ggml.tokens")),
        special=[kind == control for kind in field("tokenizer.ggml.token_type")],
        merges=merges,
        bos=field("tokenizer.ggml.bos_token_id"),
        eos=field("tokenizer.ggml.eos_token_id"),
        pad=field("tokenizer.ggml.padding_token_id"),
        unknown=field("tokenizer.ggml.unknown_token_id"),
        chat_template=field("tokenizer.chat_template"),
    )
