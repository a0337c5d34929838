"""Qwen3-MoE: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

from tests.support.families import LOGITS, TINY, FamilyCases, close

CASES = FamilyCases(
    name="qwen3_moe",
    classes=("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    public={
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    # Qwen3-MoE with 4 heads on 2 kv heads, 8 experts of 24, top 3, dense layers of 56.
    tiny={"intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
    smallest={"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4, "attention_bias": True},
    prefills=[
        ({"head_dim": 12}, 33),
        (
            {
                "norm_topk_prob": True,
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 5,
                "num_hidden_layers": 4,
                "mlp_only_layers": [3],
                "decoder_sparse_step": 2,
            },
            21,
        ),
    ],
    engines=[
        (None, {"norm_topk_prob": True, "head_dim": 16}),
        (
            32,
            {
                "moe_intermediate_size": 77,
                "hidden_size": 40,
                "vocab_size": 101,
                "use_sliding_window": True,
                "sliding_window": 19,
                "num_key_value_heads": 1,
                "seed": 1,
            },
        ),
        (
            None,
            {
                "num_hidden_layers": 4,
                "mlp_only_layers": [3],
                "decoder_sparse_step": 2,
                "head_dim": 10,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "seed": 2,
                "dtype": "bf16",
            },
        ),
    ],
    htp={"head_dim": 16, "norm_topk_prob": True, "num_key_value_heads": 1},
    unsupported=[],
    senseless=[],
)


def test_architecture() -> None:
    a = CASES.model().architecture()
    assert (a.experts, a.router_width, a.top_k, a.expert_intermediate) == (128, 128, 8, 768)
    assert (a.attention.q_width, a.attention.k_width, a.attention.qk_norm) == (4096, 512, "head")
    assert (a.shared_intermediate, a.dense_intermediate, a.shared_gate) == (0, 0, False)
    assert {plan.window for plan in a.layers} == {None}
    slides = CASES.model(use_sliding_window=True, sliding_window=9, num_hidden_layers=2).architecture()
    assert [plan.window for plan in slides.layers] == [9, 9]


def test_routes_with_and_without_norm_topk_prob() -> None:
    for normed, gates in ((True, [[2 / 3, 1 / 3]]), (False, [[0.5, 0.25]])):
        choice = CASES.model(**TINY, norm_topk_prob=normed).route(LOGITS)
        assert choice.experts.tolist() == [[1, 3]]
        close(choice.gates, gates)
