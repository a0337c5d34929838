"""The whole prefill, package to logits, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream import Engine
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

LENGTHS = (1, 2, 31, 32, 33, 130, 600)
CASES: list[tuple[str, int | None, dict[str, Any]]] = [
    ("olmoe", None, {}),
    ("olmoe", 32, {"intermediate_size": 72, "num_key_value_heads": 4, "seed": 1, "clip_qkv": 0.7}),
    ("olmoe", None, {"hidden_size": 40, "intermediate_size": 21, "vocab_size": 101, "norm_topk_prob": True, "seed": 2}),
    ("mixtral", None, {}),
    ("mixtral", 32, {"intermediate_size": 77, "sliding_window": 19, "num_key_value_heads": 1, "seed": 1}),
    ("mixtral", None, {"head_dim": 10, "vocab_size": 97, "num_key_value_heads": 4, "seed": 2, "dtype": "bf16"}),
    ("qwen2_moe", None, {}),
    ("qwen2_moe", 32, {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 88, "norm_topk_prob": True,
                       "seed": 1}),
    ("qwen2_moe", None, {"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2, "seed": 2,
                         "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen3_moe", None, {"norm_topk_prob": True, "head_dim": 16}),
    ("qwen3_moe", 32, {"moe_intermediate_size": 77, "hidden_size": 40, "vocab_size": 101, "use_sliding_window": True,
                       "sliding_window": 19, "num_key_value_heads": 1, "seed": 1}),
    ("qwen3_moe", None, {"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2, "head_dim": 10,
                         "attention_bias": True, "tie_word_embeddings": True, "seed": 2, "dtype": "bf16"}),
    ("granitemoe", None, {}),
    ("granitemoe", 32, {"intermediate_size": 77, "hidden_size": 40, "vocab_size": 101, "tie_word_embeddings": True,
                        "num_key_value_heads": 1, "seed": 1}),
    ("granitemoe", None, {"attention_bias": True, "num_key_value_heads": 4, "num_experts_per_tok": 8, "seed": 2,
                          "dtype": "bf16", "attention_multiplier": 0.125, "logits_scaling": 6.0}),
    ("phimoe", None, {}),
    ("phimoe", 32, {"intermediate_size": 77, "hidden_size": 40, "vocab_size": 101, "lm_head_bias": False,
                    "num_key_value_heads": 1, "sliding_window": 19, "seed": 1}),
    ("phimoe", None, {"attention_bias": False, "num_key_value_heads": 4, "router_jitter_noise": 0.01, "seed": 2,
                      "dtype": "bf16"}),
    ("lfm2_moe", None, {}),
    ("lfm2_moe", 32, {"moe_intermediate_size": 77, "hidden_size": 40, "vocab_size": 101, "conv_bias": True,
                      "conv_L_cache": 4, "norm_topk_prob": False, "num_key_value_heads": 1, "seed": 1}),
    ("lfm2_moe", None, {"num_hidden_layers": 4, "layer_types": ["full_attention", "conv", "conv", "full_attention"],
                        "num_dense_layers": 0, "use_expert_bias": False, "routed_scaling_factor": 2.5, "seed": 2,
                        "tie_word_embeddings": False, "conv_L_cache": 2, "dtype": "bf16"}),
    ("lfm2_moe", None, {"layer_types": ["conv"] * 3, "conv_bias": True, "conv_L_cache": 32, "seed": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "panel", "options"), CASES)
def test_logits_equal_transformers(tmp_path: Path, family: str, panel: int | None, options: dict[str, Any]) -> None:
    package, tiny = packed(tmp_path, family, panel=panel, **options)
    vocab = tiny.model.config.vocab_size
    with Engine(package, threads=1) as engine:
        if panel:
            assert engine.package.pool.panels_per_expert > 1
        for length in LENGTHS:
            ids = prompt(length, vocab, seed=length)
            expected = tiny.logits(ids)
            result = engine.prefill(ids, logits="all")
            assert result.logits is not None
            assert np.abs(result.logits - expected).max() <= 1e-4 * np.ptp(expected)
            assert np.array_equal(engine.prefill(ids).logits, result.logits[-1])


def test_hidden_states_are_those_of_transformers(tmp_path: Path) -> None:
    import torch

    package, tiny = packed(tmp_path, "olmoe")
    ids = prompt(20)
    with torch.no_grad():
        expected = tiny.model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    with Engine(package, threads=1) as engine:
        result = engine.prefill(ids, logits=None, hidden=True)
    assert result.logits is None and result.hidden is not None
    assert np.abs(result.hidden - expected).max() <= 1e-5 * np.ptp(expected)


@pytest.mark.parametrize(("experts", "limit"), [("f16", 2e-3), ("int8", 6e-2)])
def test_reduced_schemes_stay_near(tmp_path: Path, experts: str, limit: float) -> None:
    """Expert choices may flip where two router logits are close: all experts are chosen here, so that none can."""
    package, tiny = packed(tmp_path, "mixtral", experts=experts, num_experts_per_tok=8, hidden_size=64)
    ids = prompt(130)
    expected = tiny.logits(ids)
    with Engine(package, threads=1) as engine, Engine(package, threads=1, reference=True) as reference:
        actual, plain = engine.prefill(ids, logits="all").logits, reference.prefill(ids, logits="all").logits
    assert actual is not None and plain is not None
    for logits in (actual, plain):
        assert np.linalg.norm(logits - expected) <= limit * np.linalg.norm(expected)
    assert not np.array_equal(actual, plain) or experts == "f16"
