"""Mixtral: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

from estream.models.base import Source
from tests.support.families import LOGITS, FamilyCases, close

CASES = FamilyCases(
    name="mixtral",
    classes=("MixtralConfig", "MixtralForCausalLM"),
    public={
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    # Mixtral with 4 heads on 2 kv heads, 8 experts of 24, top 2.
    tiny={"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
    smallest={"num_hidden_layers": 1, "num_local_experts": 4},
    prefills=[
        ({}, 33),
        ({"sliding_window": 4}, 9),
        ({"sliding_window": 7, "head_dim": 10, "vocab_size": 97, "seed": 2, "dtype": "f16"}, 40),
        ({"num_experts_per_tok": 8, "intermediate_size": 21, "num_key_value_heads": 4}, 9),
    ],
    engines=[
        (None, {}),
        (32, {"intermediate_size": 77, "sliding_window": 19, "num_key_value_heads": 1, "seed": 1}),
        (None, {"head_dim": 10, "vocab_size": 97, "num_key_value_heads": 4, "seed": 2, "dtype": "bf16"}),
    ],
    htp={"sliding_window": 41, "num_key_value_heads": 1},
    unsupported=[({"attention_bias": True, "logit_scale": 2.0}, "attention_bias, logit_scale")],
    senseless=[({"sliding_window": 0}, "sliding_window"), ({"num_local_experts": 0}, "num_local_experts")],
)


def test_architecture() -> None:
    a = CASES.model(sliding_window=4096).architecture()
    assert (a.experts, a.top_k, a.expert_intermediate) == (8, 2, 14336)
    assert (a.attention.q_width, a.attention.k_width, a.attention.rope.theta) == (4096, 1024, 1e6)
    assert {plan.window for plan in a.layers} == {4096}
    assert {plan.window for plan in CASES.model().architecture().layers} == {None}


def test_names() -> None:
    model = CASES.model()
    assert set(model.layer_sources(0)) == {"attn_norm", "ffn_norm", "q", "k", "v", "o", "router"}
    prefix = "model.layers.0.block_sparse_moe"
    assert model.layer_sources(0)["router"] == (Source(f"{prefix}.gate.weight", (8, 4096), transpose=True),)
    expert = model.expert_sources(0, 7)
    assert expert.gate == Source(f"{prefix}.experts.7.w1.weight", (14336, 4096), transpose=True)
    assert expert.down == Source(f"{prefix}.experts.7.w2.weight", (4096, 14336), transpose=True)
    assert expert.up == Source(f"{prefix}.experts.7.w3.weight", (14336, 4096), transpose=True)


def test_always_normalises() -> None:
    choice = CASES.model(num_local_experts=4, num_experts_per_tok=2).route(LOGITS)
    assert choice.experts.tolist() == [[1, 3]]
    close(choice.gates, [[2 / 3, 1 / 3]])
