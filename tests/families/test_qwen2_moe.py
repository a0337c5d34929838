"""Qwen2-MoE: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

import numpy as np

from estream.models.base import Source
from tests.support.families import LOGITS, TINY, FamilyCases, close

CASES = FamilyCases(
    name="qwen2_moe",
    classes=("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    public={
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    # Qwen2-MoE with 4 heads on 2 kv heads, 8 experts of 24, top 3, a shared expert of 40, dense layers of 56.
    tiny={
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    smallest={"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4},
    prefills=[
        ({}, 33),
        ({"norm_topk_prob": True, "qkv_bias": False, "seed": 3, "dtype": "bf16"}, 33),
        ({"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2}, 17),
        ({"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, 21),
        ({"use_sliding_window": True, "sliding_window": 1, "layer_types": ["full_attention", "sliding_attention"]}, 8),
    ],
    engines=[
        (None, {}),
        (32, {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 88, "norm_topk_prob": True, "seed": 1}),
        (
            None,
            {
                "num_hidden_layers": 4,
                "mlp_only_layers": [3],
                "decoder_sparse_step": 2,
                "seed": 2,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
            },
        ),
    ],
    htp={"num_hidden_layers": 3, "mlp_only_layers": [1], "num_key_value_heads": 4},
    unsupported=[
        ({"n_group": 1}, "n_group"),
        ({"mlp_only_layers": list(range(24))}, "no layer has experts"),
        ({"layer_types": ["linear_attention"] * 24}, "layer_types .had linear_attention"),
    ],
    senseless=[
        ({"mlp_only_layers": [24]}, "mlp_only_layers .asked 0 to 23, had .24"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"layer_types": ["full_attention"]}, "layer_types .asked 24 layers, had 1"),
        ({"layer_types": ["sliding_attention"] * 24}, "use_sliding_window is false"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
    ],
)


def test_architecture() -> None:
    a = CASES.model().architecture()
    assert (a.experts, a.router_width, a.top_k, a.expert_intermediate) == (60, 61, 4, 1408)
    assert (a.shared_intermediate, a.shared_gate, a.dense_intermediate) == (5632, True, 0)
    assert (a.attention.qkv_bias, a.attention.o_bias, a.attention.qk_norm) == (True, False, "none")
    assert {plan.window for plan in a.layers} == {None}


def test_layer_plan() -> None:
    model = CASES.model(num_hidden_layers=6, mlp_only_layers=[1], decoder_sparse_step=2)
    assert [plan.ffn for plan in model.architecture().layers] == ["dense", "dense", "dense", "moe", "dense", "moe"]
    assert model.architecture().dense_intermediate == 5632
    assert model.shared_sources(0) is None
    assert model.ffn_sources(3) is None
    assert "router" not in model.layer_sources(0)
    ffn = model.ffn_sources(0)
    assert ffn is not None
    assert ffn.down == Source("model.layers.0.mlp.down_proj.weight", (2048, 5632), transpose=True)


def test_windows() -> None:
    sliding = {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    plan = CASES.model(**sliding).architecture().layers
    assert [layer.window for layer in plan] == [9, None, 9, None, None, None]
    types = ["full_attention"] * 5 + ["sliding_attention"]
    plan = CASES.model(**sliding, layer_types=types).architecture().layers
    assert [layer.window for layer in plan] == [None] * 5 + [9]


def test_names() -> None:
    model = CASES.model()
    layer = model.layer_sources(2)
    assert {"q.bias", "k.bias", "v.bias"} < set(layer)
    assert "o.bias" not in layer
    assert layer["router"] == (
        Source("model.layers.2.mlp.gate.weight", (60, 2048), transpose=True),
        Source("model.layers.2.mlp.shared_expert_gate.weight", (1, 2048), transpose=True),
    )
    shared = model.shared_sources(2)
    assert shared is not None
    assert shared.up == Source("model.layers.2.mlp.shared_expert.up_proj.weight", (5632, 2048), transpose=True)


def test_keeps_the_shared_gate_out_of_the_softmax() -> None:
    logits = np.concatenate([LOGITS, np.full((1, 1), np.log(3.0), np.float32)], axis=1)
    choice = CASES.model(**TINY).route(logits)
    assert choice.experts.tolist() == [[1, 3]]
    close(choice.gates, [[0.5, 0.25]])
    close(choice.shared, [0.75])  # sigmoid(ln 3)
    normed = CASES.model(**TINY, norm_topk_prob=True).route(logits)
    close(normed.gates, [[2 / 3, 1 / 3]])
    close(normed.shared, [0.75])
