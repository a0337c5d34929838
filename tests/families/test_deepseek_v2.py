"""DeepSeek-V2: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.families import FamilyCases, close

CASES = FamilyCases(
    name="deepseek_v2",
    classes=("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    public={  # DeepSeek-V2-Lite
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },  # DeepSeek-V2-Lite
    # DeepSeek-V2 with 4 heads of 12 + 8 and values of 16, 8 experts of 24, top 3, 2 shared experts, 1 dense layer.
    tiny={
        "intermediate_size": 56,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
    },
    smallest={"num_hidden_layers": 2, "n_routed_experts": 4, "q_lora_rank": 20, "attention_bias": True},
    prefills=[
        ({}, 33),
        (
            {
                "q_lora_rank": 20,
                "attention_bias": True,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "seed": 1,
            },
            33,
        ),
        (
            {
                "n_shared_experts": 1,
                "first_k_dense_replace": 0,
                "num_hidden_layers": 2,
                "v_head_dim": 24,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "mscale": 0.7,
                    "mscale_all_dim": 1.2,
                },
                "seed": 2,
                "dtype": "bf16",
            },
            40,
        ),
    ],
    engines=[
        (None, {}),
        (
            32,
            {
                "moe_intermediate_size": 40,
                "q_lora_rank": 20,
                "attention_bias": True,
                "v_head_dim": 24,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "vocab_size": 101,
                "routed_scaling_factor": 2.5,
                "seed": 1,
            },
        ),
        (
            None,
            {
                "hidden_size": 40,
                "qk_nope_head_dim": 10,
                "v_head_dim": 7,
                "n_shared_experts": 1,
                "tie_word_embeddings": True,
                "seed": 2,
                "dtype": "bf16",
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "mscale": 0.7,
                    "mscale_all_dim": 1.2,
                },
            },
        ),
    ],
    htp={"qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
    unsupported=[
        ({"norm_topk_prob": True}, "norm_topk_prob .asked False, had True"),
        ({"scoring_func": "sigmoid"}, "scoring_func .asked 'softmax', had 'sigmoid'"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"num_key_value_heads": 4}, "num_key_value_heads .asked 16, had 4"),
        ({"first_k_dense_replace": 27}, "first_k_dense_replace .asked 0 to 26"),
    ],
    senseless=[
        ({"topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 3}, "groups of 64.*had 7 and 3"),
        ({"topk_method": "group_limited_greedy", "n_group": 32, "topk_group": 2}, "so many that 6 fit"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    ],
)


def test_architecture() -> None:
    a = CASES.model().architecture()
    assert [plan.ffn for plan in a.layers[:3]] == ["dense", "moe", "moe"]
    assert (a.experts, a.top_k, a.expert_intermediate, a.dense_intermediate) == (64, 6, 1408, 10944)
    assert (a.shared_intermediate, a.shared_gate) == (2816, False)
    attention = a.attention
    assert (attention.q_width, attention.k_width, attention.v_width, attention.out_width) == (3072, 3072, 2048, 2048)
    assert (attention.rotated, attention.cache_head_dim) == (64, 192)
    assert attention.score_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * np.log(40) + 1) ** 2)


def test_looks_in_the_best_groups_and_scales() -> None:
    logits = np.log(np.array([[8.0, 1.0, 4.0, 3.0]], np.float32))  # of 16: 1/2, 1/16, 1/4, 3/16
    tiny = {"n_routed_experts": 4, "num_experts_per_tok": 2, "routed_scaling_factor": 2.0}
    greedy = CASES.model(**tiny).route(logits)
    assert greedy.experts.tolist() == [[0, 2]] and greedy.shared is None
    close(greedy.gates, [[1.0, 0.5]])
    limited = CASES.model(**tiny, topk_method="group_limited_greedy", n_group=2, topk_group=1).route(logits)
    assert limited.experts.tolist() == [[0, 1]]
    close(limited.gates, [[1.0, 0.125]])
