"""LFM2-MoE: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

import numpy as np

from estream.models.base import Rope, Source
from tests.support.families import TINY, FamilyCases, close

CASES = FamilyCases(
    name="lfm2_moe",
    classes=("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    public={  # LFM2-8B-A1B
        "architectures": ["Lfm2MoeForCausalLM"],
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 7,
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 7168,
        "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "max_position_embeddings": 128000,
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "transformers_version": "4.57.0.dev0",
        "use_cache": True,
        "use_expert_bias": True,
        "vocab_size": 65536,
    },
    # LFM2-MoE with 4 heads on 2 kv heads, 8 experts of 24, top 3: a convolution with a dense layer of 56, attention,
    # and another convolution. Expert biases that change choices.
    tiny={
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    smallest={"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_experts": 4, "conv_bias": True},
    prefills=[
        ({}, 33),
        (
            {
                "conv_bias": True,
                "conv_L_cache": 4,
                "norm_topk_prob": False,
                "tie_word_embeddings": False,
                "seed": 1,
                "dtype": "bf16",
            },
            21,
        ),
        (
            {
                "use_expert_bias": False,
                "routed_scaling_factor": 2.5,
                "hidden_size": 40,
                "vocab_size": 97,
                "moe_intermediate_size": 21,
                "seed": 2,
                "dtype": "f16",
                "shard_size": "20KB",
            },
            17,
        ),
        (
            {
                "num_hidden_layers": 4,
                "layer_types": ["full_attention", "conv", "conv", "full_attention"],
                "num_dense_layers": 0,
                "num_key_value_heads": 1,
                "conv_L_cache": 2,
                "seed": 3,
            },
            5,
        ),
        ({"layer_types": ["full_attention"] * 3, "head_dim": 12, "seed": 4}, 9),
        ({"layer_types": ["conv"] * 3, "seed": 5}, 40),
    ],
    engines=[
        (None, {}),
        (
            32,
            {
                "moe_intermediate_size": 77,
                "hidden_size": 40,
                "vocab_size": 101,
                "conv_bias": True,
                "conv_L_cache": 4,
                "norm_topk_prob": False,
                "num_key_value_heads": 1,
                "seed": 1,
            },
        ),
        (
            None,
            {
                "num_hidden_layers": 4,
                "layer_types": ["full_attention", "conv", "conv", "full_attention"],
                "num_dense_layers": 0,
                "use_expert_bias": False,
                "routed_scaling_factor": 2.5,
                "seed": 2,
                "tie_word_embeddings": False,
                "conv_L_cache": 2,
                "dtype": "bf16",
            },
        ),
        (None, {"layer_types": ["conv"] * 3, "conv_bias": True, "conv_L_cache": 32, "seed": 3}),
    ],
    htp={
        "conv_bias": True,
        "num_hidden_layers": 4,
        "conv_L_cache": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    unsupported=[
        ({"layer_types": ["conv"] * 23 + ["sliding_attention"]}, "layer_types.*had .*sliding_attention"),
        ({"num_dense_layers": 24}, "no layer has experts"),
        ({"head_dim": 128}, "one output projection serves.*asked hidden_size 2048, had 32 heads of 128"),
        ({"conv_L_cache": 1}, "conv_L_cache .asked 2 to 32, had 1"),
        ({"conv_dim": 1024}, "conv_dim .asked 2048, had 1024"),
        ({"use_pos_enc": False}, "use_pos_enc .asked True, had False"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
    senseless=[
        ({"layer_types": ["conv"] * 23}, "layer_types .asked 24 layers, had 23"),
        ({"layer_types": None}, "layer_types .asked 24 layers, had no full_attn_idxs either"),
        ({"layer_types": None, "full_attn_idxs": [24]}, "full_attn_idxs .asked 0 to 23"),
        ({"full_attn_idxs": [0]}, "layer_types and full_attn_idxs differ"),
        ({"num_dense_layers": 25}, "num_dense_layers .asked 0 to 24, had 25"),
        ({"intermediate_size": 0}, "intermediate_size .asked 1 to .*had 0"),
        ({"norm_eps": 0.0}, "norm_eps .asked more than 0"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
        ({"tie_embedding": False, "tie_word_embeddings": True}, "tie_word_embeddings and tie_embedding"),
    ],
)


def test_architecture() -> None:
    a = CASES.model().architecture()
    assert (a.hidden, a.vocab, a.context, a.norm_eps, a.dense_intermediate) == (2048, 65536, 128000, 1e-5, 7168)
    assert (a.experts, a.router_width, a.top_k, a.expert_intermediate, a.expert_bias) == (32, 32, 4, 1792, True)
    assert (a.attention.heads, a.attention.kv_heads, a.attention.head_dim, a.attention.qk_norm) == (32, 8, 64, "head")
    assert a.moe_layers == tuple(range(2, 24)) and a.attention.rope == Rope(1e6)
    assert [plan.index for plan in a.layers if plan.mixer == "attention"] == [2, 6, 10, 14, 18, 21]
    assert (a.conv_kernel, a.conv_bias, a.o_bias) == (3, False, False)
    plain = CASES.model(layer_types=["full_attention"] * 24, conv_bias=True).architecture()
    assert (plain.conv_kernel, plain.conv_bias, plain.o_bias) == (0, False, False)


def test_configs_of_old_and_with_fields_that_decide_nothing() -> None:
    expected = CASES.model().architecture()
    assert CASES.model(layer_types=None, full_attn_idxs=[2, 6, 10, 14, 18, 21]).architecture() == expected
    more = {"conv_dim": 2048, "conv_dim_out": 2048, "block_dim": 2048, "block_norm_eps": 1e-5, "num_heads": 32}
    more |= {"use_pos_enc": True, "block_use_swiglu": True, "block_multiple_of": 256, "conv_use_xavier_init": True}
    assert CASES.model(**more).architecture() == expected
    for tied in (False, True):
        assert CASES.model(tie_embedding=tied).config.tie_word_embeddings is tied


def test_names() -> None:
    model = CASES.model(conv_bias=True)
    prefix, conv = "model.layers.1", model.layer_sources(1)
    assert set(conv) == {
        *("attn_norm", "conv_b", "conv_c", "conv_x", "conv", "conv_b.bias", "conv_c.bias", "conv_x.bias", "conv.bias"),
        *("o", "o.bias", "ffn_norm"),
    }
    fused = (6144, 2048)
    assert conv["conv_c"] == (Source(f"{prefix}.conv.in_proj.weight", fused, (slice(2048, 4096),), transpose=True),)
    assert conv["conv_x.bias"] == (Source(f"{prefix}.conv.in_proj.bias", (6144,), (slice(4096, 6144),)),)
    assert conv["conv"][0].name == f"{prefix}.conv.conv.weight" and conv["conv"][0].shape == (2048, 1, 3)
    assert conv["o"] == (Source(f"{prefix}.conv.out_proj.weight", (2048, 2048), transpose=True),)
    attention = model.layer_sources(2)
    assert attention["q_norm"] == (Source("model.layers.2.self_attn.q_layernorm.weight", (64,)),)
    assert attention["o"] == (Source("model.layers.2.self_attn.out_proj.weight", (2048, 2048), transpose=True),)
    assert attention["o.bias"] == ()  # zeros: convolutions have one
    assert attention["expert_bias"] == (Source("model.layers.2.feed_forward.expert_bias", (32,)),)
    expert, ffn = model.expert_sources(2, 5), model.ffn_sources(1)
    assert ffn is not None and model.ffn_sources(2) is None
    assert expert.up == Source("model.layers.2.feed_forward.experts.5.w3.weight", (1792, 2048), transpose=True)
    assert ffn.down == Source(f"{prefix}.feed_forward.w2.weight", (2048, 7168), transpose=True)


# Sigmoids 3/4, 1/2, 1/4, 1/10 by hand.
SIGMOIDS = np.log(np.array([[3.0, 1.0, 1 / 3, 1 / 9]], np.float32))


def test_bias_changes_the_choice_and_not_the_gates() -> None:
    model = CASES.model(**TINY)
    choice = model.route(SIGMOIDS)
    assert choice.experts.tolist() == [[0, 1]] and choice.experts.dtype == np.int32
    close(choice.gates, [[0.75 / 1.250001, 0.5 / 1.250001]])
    choice = model.route(SIGMOIDS, np.array([0, -0.3, 0.2, 0], np.float32))
    assert choice.experts.tolist() == [[0, 2]]
    close(choice.gates, [[0.75 / 1.000001, 0.25 / 1.000001]])
    plain = CASES.model(**TINY, norm_topk_prob=False, routed_scaling_factor=2.5)
    choice = plain.route(SIGMOIDS, np.array([-1, 0, 0, 1], np.float32))
    assert choice.experts.tolist() == [[3, 1]]  # in the order of what they are chosen by
    close(choice.gates, [[0.25, 1.25]])


def test_near_ties_are_of_scores_with_their_bias() -> None:
    model = CASES.model(**TINY)
    apart, equal = SIGMOIDS, np.array([[2, 1, 1, -2]], np.float32)
    levelled, parting = np.array([0, 0, 0.25, 0], np.float32), np.array([0, 0.1, 0, 0], np.float32)
    assert model.undecided(apart).tolist() == [] and model.undecided(apart, levelled).tolist() == [0]
    assert model.undecided(equal).tolist() == [0] and model.undecided(equal, parting).tolist() == []
    nearly = levelled * np.float32(1 + 1e-3)
    assert model.undecided(np.concatenate([equal, apart]), nearly).tolist() == [1]
    assert model.undecided(np.concatenate([apart, apart]), 1.1 * levelled).tolist() == []
    every = CASES.model(num_experts=4, num_experts_per_tok=4)
    assert every.undecided(equal).tolist() == []
