"""OLMoE: config.json as published, golden values, and the shapes that are compared with transformers."""

from __future__ import annotations

import numpy as np

from estream.models.base import Rope, Source
from tests.support.families import LOGITS, TINY, FamilyCases, close

CASES = FamilyCases(
    name="olmoe",
    classes=("OlmoeConfig", "OlmoeForCausalLM"),
    public={
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 50304,
    },
    # OLMoE with 4 heads on 2 kv heads, 8 experts of 24, top 3.
    tiny={"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
    smallest={"num_hidden_layers": 1, "num_experts": 4},
    prefills=[
        ({}, 33),
        ({"norm_topk_prob": True, "clip_qkv": 0.7, "attention_bias": True, "seed": 1}, 33),
        ({"num_key_value_heads": None, "hidden_size": 24, "dtype": "bf16", "shard_size": "20KB"}, 17),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": True}, 17),
    ],
    engines=[
        (None, {}),
        (32, {"intermediate_size": 72, "num_key_value_heads": 4, "seed": 1, "clip_qkv": 0.7}),
        (None, {"hidden_size": 40, "intermediate_size": 21, "vocab_size": 101, "norm_topk_prob": True, "seed": 2}),
    ],
    htp={"clip_qkv": 2.0},
    unsupported=[
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt .asked 'e4m3', had 'e5m2'"),
        ({"hidden_act": "gelu"}, "hidden_act .asked 'silu', had 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*had 'awq'.*Pack the original"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.*had 'dynamic' with factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "'linear' with beta_fast"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "rope_scaling.*had 'linear'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "with full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 128}, "fields that olmoe does not have.*sliding_window"),
    ],
    senseless=[
        ({"num_experts_per_tok": 65}, "num_experts_per_tok .asked at most 64 experts, had 65"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"num_key_value_heads": 0}, "kv_heads"),
        ({"hidden_size": 2040, "num_attention_heads": 16, "num_key_value_heads": 16}, "hidden_size is not a"),
        ({"head_dim": 64}, "head_dim"),
        ({"clip_qkv": -1.0}, "clip_qkv"),
        ({"hidden_size": 48, "num_attention_heads": 16}, "even head size"),
        ({"hidden_size": "2048"}, "hidden_size .asked int, had '2048'"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 2048.0}, "hidden_size"),
        ({"norm_topk_prob": 1}, "norm_topk_prob .asked bool"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "given more than once"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"model_type": "mixtral"}, "model_type .asked olmoe, had 'mixtral'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.0}}, "rope_scaling.factor .asked more than 0, had 0.0"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn needs factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1.0}, "rope_theta with yarn"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "linear", "factor": 3}},
            "rope_parameters and rope_scaling differ",
        ),
    ],
)


def test_architecture() -> None:
    a = CASES.model().architecture()
    assert (a.hidden, a.vocab, a.context, a.norm_eps) == (2048, 50304, 4096, 1e-5)
    assert (a.experts, a.top_k, a.expert_intermediate, a.router_width) == (64, 8, 1024, 64)
    assert (a.shared_intermediate, a.dense_intermediate, a.shared_gate) == (0, 0, False)
    assert (a.attention.heads, a.attention.kv_heads, a.attention.head_dim) == (16, 16, 128)
    assert (a.attention.qk_norm, a.attention.clip, a.attention.qkv_bias) == ("projection", None, False)
    assert a.attention.rope == Rope(10000.0)
    assert a.moe_layers == tuple(range(16))


def test_names() -> None:
    model = CASES.model(attention_bias=True, num_key_value_heads=8)
    layer = model.layer_sources(3)
    prefix = "model.layers.3"
    assert layer == {
        "attn_norm": (Source(f"{prefix}.input_layernorm.weight", (2048,)),),
        "ffn_norm": (Source(f"{prefix}.post_attention_layernorm.weight", (2048,)),),
        "q": (Source(f"{prefix}.self_attn.q_proj.weight", (2048, 2048), transpose=True),),
        "k": (Source(f"{prefix}.self_attn.k_proj.weight", (1024, 2048), transpose=True),),
        "v": (Source(f"{prefix}.self_attn.v_proj.weight", (1024, 2048), transpose=True),),
        "o": (Source(f"{prefix}.self_attn.o_proj.weight", (2048, 2048), transpose=True),),
        "q.bias": (Source(f"{prefix}.self_attn.q_proj.bias", (2048,)),),
        "k.bias": (Source(f"{prefix}.self_attn.k_proj.bias", (1024,)),),
        "v.bias": (Source(f"{prefix}.self_attn.v_proj.bias", (1024,)),),
        "o.bias": (Source(f"{prefix}.self_attn.o_proj.bias", (2048,)),),
        "q_norm": (Source(f"{prefix}.self_attn.q_norm.weight", (2048,)),),
        "k_norm": (Source(f"{prefix}.self_attn.k_norm.weight", (1024,)),),
        "router": (Source(f"{prefix}.mlp.gate.weight", (64, 2048), transpose=True),),
    }
    expert = model.expert_sources(3, 5)
    assert expert.gate == Source(f"{prefix}.mlp.experts.5.gate_proj.weight", (1024, 2048), transpose=True)
    assert expert.up == Source(f"{prefix}.mlp.experts.5.up_proj.weight", (1024, 2048), transpose=True)
    assert expert.down == Source(f"{prefix}.mlp.experts.5.down_proj.weight", (2048, 1024), transpose=True)


def test_routes_with_and_without_norm_topk_prob() -> None:
    choice = CASES.model(**TINY).route(LOGITS)
    assert choice.experts.tolist() == [[1, 3]]
    assert choice.experts.dtype == np.int32
    close(choice.gates, [[0.5, 0.25]])
    assert choice.shared is None
    close(CASES.model(**TINY, norm_topk_prob=True).route(LOGITS).gates, [[2 / 3, 1 / 3]])
