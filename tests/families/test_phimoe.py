"""PhiMoE: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

import numpy as np

from tests.support.families import FamilyCases, close

CASES = FamilyCases(
    name="phimoe",
    classes=("PhimoeConfig", "PhimoeForCausalLM"),
    public={  # Phi-3.5-MoE-instruct; its factors shortened to those of a head of 8
        "_name_or_path": "Phi-3.5-MoE-instruct",
        "architectures": ["PhiMoEForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_dropout": 0.0,
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "input_jitter_noise": 0.01,
        "intermediate_size": 6400,
        "lm_head_bias": True,
        "max_position_embeddings": 131072,
        "model_type": "phimoe",
        "num_attention_heads": 512,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "original_max_position_embeddings": 4096,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.02, 1.04, 20.0, 40.0],
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0, 1.04, 1.1, 2.0],
            "short_mscale": 1.243163121016122,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.3",
        "use_cache": True,
        "vocab_size": 32064,
    },  # Phi-3.5-MoE-instruct; its factors shortened to those of a head of 8
    # PhiMoE with 4 heads on 2 kv heads, 8 experts of 24, every bias, gates that several experts share.
    tiny={
        "intermediate_size": 24,
        "num_local_experts": 8,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,
    },
    smallest={"num_hidden_layers": 1, "num_local_experts": 4},
    prefills=[
        ({}, 33),
        (
            {
                "sliding_window": 6,
                "attention_bias": False,
                "lm_head_bias": False,
                "vocab_size": 97,
                "seed": 1,
                "dtype": "bf16",
            },
            21,
        ),
    ],
    engines=[
        (None, {}),
        (
            32,
            {
                "intermediate_size": 77,
                "hidden_size": 40,
                "vocab_size": 101,
                "lm_head_bias": False,
                "num_key_value_heads": 1,
                "sliding_window": 19,
                "seed": 1,
            },
        ),
        (
            None,
            {
                "attention_bias": False,
                "num_key_value_heads": 4,
                "router_jitter_noise": 0.01,
                "seed": 2,
                "dtype": "bf16",
            },
        ),
    ],
    htp={"sliding_window": 300},
    unsupported=[({"num_experts_per_tok": 3}, "the sparse mixer chooses two .asked 2, had 3")],
    senseless=[
        ({"hidden_size": 5120, "num_attention_heads": 512}, "short_factor: one factor per pair .asked 5, had 4"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope needs long_factor"),
        ({"router_jitter_noise": -0.1}, "router_jitter_noise"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)


def test_architecture() -> None:
    a = CASES.model().architecture()
    assert (a.norm, a.head_bias, a.attention.qkv_bias, a.attention.o_bias) == ("layer", True, True, True)
    assert {plan.window for plan in a.layers} == {None}
    scaling = a.attention.rope.scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("longrope", 32.0)
    assert {plan.window for plan in CASES.model(sliding_window=2047).architecture().layers} == {2047}


def test_gates_are_softmaxes_among_near_logits() -> None:
    route = CASES.model(num_local_experts=4, router_jitter_noise=0.1).route
    # Near 10 within a fifth of the larger: 9 but not 5. Then, without 10: near 9 is nothing but itself.
    choice = route(np.array([[5.0, 10.0, 9.0, -20.0]], np.float32))
    assert choice.experts.tolist() == [[1, 2]] and choice.experts.dtype == np.int32
    close(choice.gates, [[1 / (1 + np.exp(-1.0)), 1.0]])
    # Below zero sizes decide: -2 is near -1.9 and -10 is not; then -2 stands alone.
    close(route(np.array([[-10.0, -2.0, -1.9, -10.0]], np.float32)).gates, [[1 / (1 + np.exp(-0.1)), 1.0]])
    close(route(np.zeros((1, 4), np.float32)).gates, [[1 / 4, 1 / 3]])
