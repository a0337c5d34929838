"""gpt-oss: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

import numpy as np

from estream.models.base import Clamped, Source
from tests.support.families import LOGITS, FamilyCases, close

CASES = FamilyCases(
    name="gpt_oss",
    classes=("GptOssConfig", "GptOssForCausalLM"),
    public={  # gpt-oss-20b
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    },
    # 4 heads of 8 on 2 kv heads, 8 experts of 24, top 3, a window of 7 in the first layer, clamps that bite.
    tiny={
        "head_dim": 8,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    smallest={"num_hidden_layers": 1, "num_local_experts": 4, "layer_types": ["full_attention"]},
    prefills=[
        ({}, 33),
        (
            {
                "num_experts_per_tok": 8,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
                "seed": 1,
                "dtype": "bf16",
            },
            17,
        ),
        ({"attention_bias": False, "layer_types": ["sliding_attention"] * 2, "swiglu_limit": 7.0, "seed": 2}, 21),
    ],
    engines=[
        (None, {}),
        (32, {"intermediate_size": 77, "hidden_size": 40, "vocab_size": 101, "head_dim": 10, "seed": 1}),
        (None, {"num_key_value_heads": 4, "sliding_window": 1, "attention_bias": False, "seed": 2, "dtype": "bf16"}),
    ],
    htp={"head_dim": 16, "sliding_window": 41},
    unsupported=[({"layer_types": ["chunked_attention"] * 24}, "layer_types .*had chunked_attention")],
    senseless=[
        ({"layer_types": ["full_attention"]}, "layer_types .asked 24 layers, had 1"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": None}, "sliding_window, which layers of layer_types use .asked at least 1, had null"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"experts_per_token": 3}, "are one field and differ"),
    ],
)


def test_architecture() -> None:
    a = CASES.model().architecture()
    assert (a.experts, a.top_k, a.expert_intermediate, a.expert_bias) == (32, 4, 2880, True)
    assert (a.attention.q_width, a.attention.k_width, a.attention.sinks, a.attention.o_bias) == (4096, 512, True, True)
    assert [plan.window for plan in a.layers[:3]] == [128, None, 128]
    assert a.clamped == Clamped(7.0, 1.702)
    scaling = a.attention.rope.scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor, scaling.truncate) == ("yarn", 32.0, False)
    assert [plan.window for plan in CASES.model(layer_types=None).architecture().layers[:3]] == [128, None, 128]


def test_names() -> None:
    expert, prefix = CASES.model().expert_sources(3, 5), "model.layers.3.mlp.experts"
    assert expert.up == Source(f"{prefix}.gate_up_proj", (32, 2880, 5760), (5, slice(None), slice(1, 5760, 2)))
    assert expert.down == Source(f"{prefix}.down_proj", (32, 2880, 2880), (5,))
    assert expert.biases is not None
    assert expert.biases[0] == Source(f"{prefix}.gate_up_proj_bias", (32, 5760), (5, slice(0, 5760, 2)))


def test_the_softmax_is_over_the_chosen_logits_and_the_bias_is_part_of_them() -> None:
    model = CASES.model(num_local_experts=4, num_experts_per_tok=2, experts_per_token=2)
    choice = model.route(LOGITS)
    assert choice.experts.tolist() == [[1, 3]]
    close(choice.gates, [[2 / 3, 1 / 3]])
    choice = model.route(LOGITS, np.log(np.array([1, 1, 8, 1], np.float32)))
    assert choice.experts.tolist() == [[2, 1]]
    close(choice.gates, [[2 / 3, 1 / 3]])
    assert model.undecided(LOGITS).tolist() == []
    assert model.undecided(LOGITS, np.log(np.array([2, 1, 1, 1], np.float32))).tolist() == [0]
