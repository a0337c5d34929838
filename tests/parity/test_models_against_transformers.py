"""Families against transformers: names, transposes, config fields, routing, windows, by a prefill in plain numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream.checkpoint import Checkpoint
from tests.support import tiny_checkpoints
from tests.support.numpy_reference import prefill

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("olmoe", {}, 33),
    ("olmoe", {"norm_topk_prob": True, "clip_qkv": 0.7, "attention_bias": True, "seed": 1}, 33),
    ("olmoe", {"num_key_value_heads": None, "hidden_size": 24, "dtype": "bf16", "shard_size": "20KB"}, 17),
    ("olmoe", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": True}, 17),
    ("mixtral", {}, 33),
    ("mixtral", {"sliding_window": 7, "head_dim": 10, "vocab_size": 97, "seed": 2, "dtype": "f16"}, 40),
    ("mixtral", {"num_experts_per_tok": 8, "intermediate_size": 21, "num_key_value_heads": 4}, 9),
    ("qwen2_moe", {}, 33),
    ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False, "seed": 3, "dtype": "bf16"}, 33),
    ("qwen2_moe", {"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2}, 17),
    ("qwen2_moe", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5,
                   "max_window_layers": 2}, 21),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 1,
                   "layer_types": ["full_attention", "sliding_attention"]}, 8),
    ("qwen3_moe", {"head_dim": 12}, 33),
    ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
                   "num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2}, 21),
    ("granitemoe", {}, 33),
    ("phimoe", {}, 33),
    ("phimoe", {"sliding_window": 6, "attention_bias": False, "lm_head_bias": False, "vocab_size": 97, "seed": 1,
                "dtype": "bf16"}, 21),
    ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True, "seed": 1, "dtype": "f16"}, 17),
    ("lfm2_moe", {}, 33),
    ("lfm2_moe", {"conv_bias": True, "conv_L_cache": 4, "norm_topk_prob": False, "tie_word_embeddings": False,
                  "seed": 1, "dtype": "bf16"}, 21),
    ("lfm2_moe", {"use_expert_bias": False, "routed_scaling_factor": 2.5, "hidden_size": 40, "vocab_size": 97,
                  "moe_intermediate_size": 21, "seed": 2, "dtype": "f16", "shard_size": "20KB"}, 17),
    ("lfm2_moe", {"num_hidden_layers": 4, "layer_types": ["full_attention", "conv", "conv", "full_attention"],
                  "num_dense_layers": 0, "num_key_value_heads": 1, "conv_L_cache": 2, "seed": 3}, 5),
    ("lfm2_moe", {"layer_types": ["full_attention"] * 3, "head_dim": 12, "seed": 4}, 9),
    ("lfm2_moe", {"layer_types": ["conv"] * 3, "seed": 5}, 40),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options", "length"), CASES)
def test_logits_equal_transformers(tmp_path: Path, family: str, options: dict[str, Any], length: int) -> None:
    tiny = tiny_checkpoints.FAMILIES[family](tmp_path, **options)
    ids = tiny_checkpoints.prompt(length)
    expected = tiny.logits(ids)
    with Checkpoint.open(tmp_path) as checkpoint:
        model = checkpoint.family()
        checkpoint.check(model)
        actual = prefill(checkpoint, model, ids)
    assert np.abs(actual - expected).max() <= 2e-5 * np.ptp(expected)
    # The comparison means something: positions differ from each other and the logits are not flat.
    assert expected.std() > 0.3
    assert np.abs(expected[1:] - expected[:-1]).max() > 0.3


@pytest.mark.parametrize("family", sorted(tiny_checkpoints.FAMILIES))
def test_every_expert_of_a_tiny_checkpoint_is_used(tmp_path: Path, family: str) -> None:
    tiny = tiny_checkpoints.FAMILIES[family](tmp_path)
    biases = tiny.expert_biases()
    with Checkpoint.open(tmp_path) as checkpoint:
        model = checkpoint.family()
    for at, logits in enumerate(tiny.router_logits(tiny_checkpoints.prompt(200))):
        bias = biases[at] if biases else None
        if model.architecture().shared_gate:
            logits = np.concatenate([logits, np.zeros_like(logits[:, :1])], axis=1)
        counts = np.bincount(model.route(logits, bias).experts.reshape(-1), minlength=8)
        assert counts.min() > 0
        assert counts.max() < 200
