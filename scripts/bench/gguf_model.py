"""A GGUF file of seeded random weights in a package's shape: a model for llama.cpp whose answers do not matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

BLOCK = 32  # weights that share a float16 scale, in both schemes
# scheme: (type, file type, bytes of integers per block, standard deviation of the integers)
SCHEMES = {
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0, 16, 4.6),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0, 32, 73.9),
}


def write_gguf(config: Mapping[str, Any], path: Path, scheme: str, seed: int = 0) -> None:
    """Writes the model that an OLMoE `config` (config.json) describes. Bounded memory: one tensor at a time.

    Raises ValueError for another family.
    """
    if config["model_type"] != "olmoe":
        raise ValueError(f"the generator knows olmoe, not {config['model_type']}")
    kind, file_type, _, _ = SCHEMES[scheme]
    part = path.with_suffix(".part")
    writer = GGUFWriter(part, "olmoe")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(file_type)
    tensors = list(_tensors(config))
    for name, shape, quantised in tensors:
        stored = _stored_shape(shape, scheme) if quantised else shape
        dtype = np.dtype(np.uint8 if quantised else np.float32)
        size = int(np.prod(stored)) * dtype.itemsize
        writer.add_tensor_info(name, stored, dtype, size, raw_dtype=kind if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for name, shape, quantised in tensors:
        writer.write_tensor_data(_quantised(rng, shape, scheme) if quantised else _floats(rng, name, shape))
    writer.close()
    part.rename(path)


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """(name, shape, quantised) in file order."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_experts"]
    head = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head
    yield "token_embd.weight", (config["vocab_size"], hidden), True
    yield "output_norm.weight", (hidden,), False
    yield "output.weight", (config["vocab_size"], hidden), True
    for layer in range(config["num_hidden_layers"]):
        at = f"blk.{layer}."
        for norm, width in (("attn", hidden), ("ffn", hidden), ("attn_q", hidden), ("attn_k", keys)):
            yield f"{at}{norm}_norm.weight", (width,), False
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("output", hidden)):
            yield f"{at}attn_{name}.weight", (rows, hidden), True
        yield f"{at}ffn_gate_inp.weight", (experts, hidden), False
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{at}ffn_{name}_exps.weight", (experts, rows, columns), True


def _stored_shape(shape: tuple[int, ...], scheme: str) -> tuple[int, ...]:
    """In bytes: a float16 scale and the integers of each block."""
    return (*shape[:-1], shape[-1] // BLOCK * (2 + SCHEMES[scheme][2]))


def _quantised(rng: np.random.Generator, shape: tuple[int, ...], scheme: str) -> np.ndarray:
    """Variance 1/K: activations keep their size."""
    _, _, integers, deviation = SCHEMES[scheme]
    blocks = np.empty((int(np.prod(shape)) // BLOCK, 2 + integers), np.uint8)
    blocks[:, :2] = np.full(1, shape[-1] ** -0.5 / deviation, np.float16).view(np.uint8)
    blocks[:, 2:] = np.frombuffer(rng.bytes(len(blocks) * integers), np.uint8).reshape(len(blocks), integers)
    return blocks.reshape(_stored_shape(shape, scheme))


def _floats(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms of ones; the router so that its logits have unit variance and every expert is used."""
    if "norm" in name:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)
