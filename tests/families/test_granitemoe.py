"""GraniteMoE: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

from tests.support.families import LOGITS, FamilyCases, close

CASES = FamilyCases(
    name="granitemoe",
    classes=("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    public={  # granite-3.1-3b-a800m
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.1,
        "attention_multiplier": 0.015625,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 131072,
        "model_type": "granitemoe",
        "num_attention_heads": 24,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "output_router_logits": False,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.47.0",
        "use_cache": True,
        "vocab_size": 49155,
    },  # granite-3.1-3b-a800m
    # GraniteMoE with 4 heads on 2 kv heads, 8 experts of 24, top 3, and no multiplier one would not notice.
    tiny={
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 1.7,
        "logits_scaling": 0.8,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.5,
    },
    smallest={"num_hidden_layers": 1, "num_local_experts": 4, "attention_bias": True},
    prefills=[({}, 33), ({"attention_bias": True, "tie_word_embeddings": True, "seed": 1, "dtype": "f16"}, 17)],
    engines=[
        (None, {}),
        (
            32,
            {
                "intermediate_size": 77,
                "hidden_size": 40,
                "vocab_size": 101,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "seed": 1,
            },
        ),
        (
            None,
            {
                "attention_bias": True,
                "num_key_value_heads": 4,
                "num_experts_per_tok": 8,
                "seed": 2,
                "dtype": "bf16",
                "attention_multiplier": 0.125,
                "logits_scaling": 6.0,
            },
        ),
    ],
    htp={"num_experts_per_tok": 4},
    unsupported=[],
    senseless=[],
)


def test_multipliers_are_factors_of_weights() -> None:
    model = CASES.model()
    a = model.architecture()
    assert (a.experts, a.top_k, a.expert_intermediate, a.attention.kv_heads) == (40, 8, 512, 8)
    sources, whole = model.layer_sources(0), model.model_sources(["lm_head.weight"])
    assert sources["q"][0].scale == 0.015625 * 8 and sources["k"][0].scale == 1  # head size 64
    assert sources["o"][0].scale == model.expert_sources(0, 3).down.scale == 0.22
    assert (whole["embed"][0].scale, whole["head"][0].scale) == (12, 1 / 6)
    up = model.expert_sources(1, 3).up
    assert up.name == "model.layers.1.block_sparse_moe.input_linear.weight"
    assert (up.shape, up.pick) == ((40, 1024, 1536), (3, slice(512, 1024)))


def test_the_softmax_is_over_the_chosen_logits() -> None:
    choice = CASES.model(num_local_experts=4, num_experts_per_tok=2).route(LOGITS)
    assert choice.experts.tolist() == [[1, 3]]
    close(choice.gates, [[2 / 3, 1 / 3]])
