from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from estream.errors import CheckpointError, UnsupportedModelError
from estream.models import families, family
from estream.models.base import Family, Rope, Source
from estream.models.choose import sigmoid, softmax, top_k
from estream.models.rope import rope_tables

# The config.json of the public checkpoints, as published.
PUBLIC: dict[str, dict[str, Any]] = {
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "granitemoe": {  # granite-3.1-3b-a800m
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
        "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
        "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 512,
        "logits_scaling": 6.0, "max_position_embeddings": 131072, "model_type": "granitemoe",
        "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 40, "output_router_logits": False, "pad_token_id": 0, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.47.0", "use_cache": True,
        "vocab_size": 49155,
    },
    "lfm2_moe": {  # LFM2-8B-A1B
        "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
        "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 7168,
        "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0,
        "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "transformers_version": "4.57.0.dev0",
        "use_cache": True, "use_expert_bias": True, "vocab_size": 65536,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "phimoe": {  # Phi-3.5-MoE-instruct; its factors shortened to those of a head of 8
        "_name_or_path": "Phi-3.5-MoE-instruct", "architectures": ["PhiMoEForCausalLM"], "attention_bias": True,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 32000, "hidden_act": "silu",
        "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02, "input_jitter_noise": 0.01,
        "intermediate_size": 6400, "lm_head_bias": True, "max_position_embeddings": 131072,
        "model_type": "phimoe", "num_attention_heads": 512, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 16, "original_max_position_embeddings": 4096,
        "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [1.02, 1.04, 20.0, 40.0], "long_mscale": 1.243163121016122,
                         "original_max_position_embeddings": 4096, "short_factor": [1.0, 1.04, 1.1, 2.0],
                         "short_mscale": 1.243163121016122, "type": "longrope"},
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 131072,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.3",
        "use_cache": True, "vocab_size": 32064,
    },
}  # fmt: skip


def _model(model_type: str, /, **changes: Any) -> Family:
    return family(model_type).from_config(PUBLIC[model_type] | changes)


def test_families_are_found() -> None:
    assert families() == tuple(sorted(PUBLIC))
    assert family("olmoe").name == "olmoe"
    with pytest.raises(UnsupportedModelError, match=f"asked 'bert', had {', '.join(sorted(PUBLIC))}"):
        family("bert")


def test_families_import_nothing_but_numpy() -> None:
    blocked = "torch transformers safetensors onnx onnxruntime tokenizers rich psutil gguf"
    code = f"import sys\nfor name in {blocked!r}.split(): sys.modules[name] = None\n"
    code += "from estream.models import family, families\nimport estream.models.rope\nprint(*families())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == list(families())


# --- architectures of the public models


def test_olmoe_architecture() -> None:
    a = _model("olmoe").architecture()
    assert (a.hidden, a.vocab, a.context, a.norm_eps) == (2048, 50304, 4096, 1e-5)
    assert (a.experts, a.top_k, a.expert_intermediate, a.router_width) == (64, 8, 1024, 64)
    assert (a.shared_intermediate, a.dense_intermediate, a.shared_gate) == (0, 0, False)
    assert (a.attention.heads, a.attention.kv_heads, a.attention.head_dim) == (16, 16, 128)
    assert (a.attention.qk_norm, a.attention.clip, a.attention.qkv_bias) == ("projection", None, False)
    assert a.attention.rope == Rope(10000.0)
    assert a.moe_layers == tuple(range(16))


def test_mixtral_architecture() -> None:
    a = _model("mixtral", sliding_window=4096).architecture()
    assert (a.experts, a.top_k, a.expert_intermediate) == (8, 2, 14336)
    assert (a.attention.q_width, a.attention.kv_width, a.attention.rope.theta) == (4096, 1024, 1e6)
    assert {plan.window for plan in a.layers} == {4096}
    assert {plan.window for plan in _model("mixtral").architecture().layers} == {None}


def test_qwen2_moe_architecture() -> None:
    a = _model("qwen2_moe").architecture()
    assert (a.experts, a.router_width, a.top_k, a.expert_intermediate) == (60, 61, 4, 1408)
    assert (a.shared_intermediate, a.shared_gate, a.dense_intermediate) == (5632, True, 0)
    assert (a.attention.qkv_bias, a.attention.o_bias, a.attention.qk_norm) == (True, False, "none")
    assert {plan.window for plan in a.layers} == {None}


def test_phimoe_architecture() -> None:
    a = _model("phimoe").architecture()
    assert (a.norm, a.head_bias, a.attention.qkv_bias, a.attention.o_bias) == ("layer", True, True, True)
    assert {plan.window for plan in a.layers} == {None}
    scaling = a.attention.rope.scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("longrope", 32.0)
    assert {plan.window for plan in _model("phimoe", sliding_window=2047).architecture().layers} == {2047}


def test_qwen3_moe_architecture() -> None:
    a = _model("qwen3_moe").architecture()
    assert (a.experts, a.router_width, a.top_k, a.expert_intermediate) == (128, 128, 8, 768)
    assert (a.attention.q_width, a.attention.kv_width, a.attention.qk_norm) == (4096, 512, "head")
    assert (a.shared_intermediate, a.dense_intermediate, a.shared_gate) == (0, 0, False)
    assert {plan.window for plan in a.layers} == {None}
    slides = _model("qwen3_moe", use_sliding_window=True, sliding_window=9, num_hidden_layers=2).architecture()
    assert [plan.window for plan in slides.layers] == [9, 9]


def test_lfm2_moe_architecture() -> None:
    a = _model("lfm2_moe").architecture()
    assert (a.hidden, a.vocab, a.context, a.norm_eps, a.dense_intermediate) == (2048, 65536, 128000, 1e-5, 7168)
    assert (a.experts, a.router_width, a.top_k, a.expert_intermediate, a.expert_bias) == (32, 32, 4, 1792, True)
    assert (a.attention.heads, a.attention.kv_heads, a.attention.head_dim, a.attention.qk_norm) == (32, 8, 64, "head")
    assert a.moe_layers == tuple(range(2, 24)) and a.attention.rope == Rope(1e6)
    assert [plan.index for plan in a.layers if plan.mixer == "attention"] == [2, 6, 10, 14, 18, 21]
    assert (a.conv_kernel, a.conv_bias, a.o_bias) == (3, False, False)
    plain = _model("lfm2_moe", layer_types=["full_attention"] * 24, conv_bias=True).architecture()
    assert (plain.conv_kernel, plain.conv_bias, plain.o_bias) == (0, False, False)


def test_lfm2_moe_configs_of_old_and_with_fields_that_decide_nothing() -> None:
    expected = _model("lfm2_moe").architecture()
    assert _model("lfm2_moe", layer_types=None, full_attn_idxs=[2, 6, 10, 14, 18, 21]).architecture() == expected
    more = {"conv_dim": 2048, "conv_dim_out": 2048, "block_dim": 2048, "block_norm_eps": 1e-5, "num_heads": 32}
    more |= {"use_pos_enc": True, "block_use_swiglu": True, "block_multiple_of": 256, "conv_use_xavier_init": True}
    assert _model("lfm2_moe", **more).architecture() == expected
    for tied in (False, True):
        assert _model("lfm2_moe", tie_embedding=tied).config.tie_word_embeddings is tied


def test_lfm2_moe_names() -> None:
    model = _model("lfm2_moe", conv_bias=True)
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


def test_a_field_under_its_other_name() -> None:
    raw = {name: value for name, value in PUBLIC["qwen3_moe"].items() if name != "num_experts"}
    assert family("qwen3_moe").from_config(raw | {"num_local_experts": 16}).architecture().experts == 16
    assert _model("qwen3_moe", num_local_experts=128).architecture().experts == 128
    with pytest.raises(CheckpointError, match=r"num_experts and num_local_experts are one field.*128 and 16"):
        _model("qwen3_moe", num_local_experts=16)


def test_granitemoe_multipliers_are_factors_of_weights() -> None:
    model = _model("granitemoe")
    a = model.architecture()
    assert (a.experts, a.top_k, a.expert_intermediate, a.attention.kv_heads) == (40, 8, 512, 8)
    sources, whole = model.layer_sources(0), model.model_sources(["lm_head.weight"])
    assert sources["q"][0].scale == 0.015625 * 8 and sources["k"][0].scale == 1  # head size 64
    assert sources["o"][0].scale == model.expert_sources(0, 3).down.scale == 0.22
    assert (whole["embed"][0].scale, whole["head"][0].scale) == (12, 1 / 6)
    up = model.expert_sources(1, 3).up
    assert up.name == "model.layers.1.block_sparse_moe.input_linear.weight"
    assert (up.shape, up.pick) == ((40, 1024, 1536), (3, slice(512, 1024)))


def test_qwen2_moe_layer_plan() -> None:
    model = _model("qwen2_moe", num_hidden_layers=6, mlp_only_layers=[1], decoder_sparse_step=2)
    assert [plan.ffn for plan in model.architecture().layers] == ["dense", "dense", "dense", "moe", "dense", "moe"]
    assert model.architecture().dense_intermediate == 5632
    assert model.shared_sources(0) is None
    assert model.ffn_sources(3) is None
    assert "router" not in model.layer_sources(0)
    ffn = model.ffn_sources(0)
    assert ffn is not None
    assert ffn.down == Source("model.layers.0.mlp.down_proj.weight", (2048, 5632), transpose=True)


def test_qwen2_moe_windows() -> None:
    sliding = {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    plan = _model("qwen2_moe", **sliding).architecture().layers
    assert [layer.window for layer in plan] == [9, None, 9, None, None, None]
    types = ["full_attention"] * 5 + ["sliding_attention"]
    plan = _model("qwen2_moe", **sliding, layer_types=types).architecture().layers
    assert [layer.window for layer in plan] == [None] * 5 + [9]


# --- names


def test_olmoe_names() -> None:
    model = _model("olmoe", attention_bias=True, num_key_value_heads=8)
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


def test_mixtral_names() -> None:
    model = _model("mixtral")
    assert set(model.layer_sources(0)) == {"attn_norm", "ffn_norm", "q", "k", "v", "o", "router"}
    prefix = "model.layers.0.block_sparse_moe"
    assert model.layer_sources(0)["router"] == (Source(f"{prefix}.gate.weight", (8, 4096), transpose=True),)
    expert = model.expert_sources(0, 7)
    assert expert.gate == Source(f"{prefix}.experts.7.w1.weight", (14336, 4096), transpose=True)
    assert expert.down == Source(f"{prefix}.experts.7.w2.weight", (4096, 14336), transpose=True)
    assert expert.up == Source(f"{prefix}.experts.7.w3.weight", (14336, 4096), transpose=True)


def test_qwen2_moe_names() -> None:
    model = _model("qwen2_moe")
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


@pytest.mark.parametrize("model_type", PUBLIC)
def test_model_names_tied_and_untied(model_type: str) -> None:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    for tied, names, expected in ((False, [], head), (True, [], embed), (True, [head], head), (False, [head], head)):
        sources = _model(model_type, tie_word_embeddings=tied).model_sources(names)
        assert sources["embed"][0].name == embed
        assert sources["head"][0].name == expected
        assert sources["head"][0].transpose
        norm = "embedding_norm" if model_type == "lfm2_moe" else "norm"
        assert sources["final_norm"][0].name == f"model.{norm}.weight"


# --- config


@pytest.mark.parametrize("model_type", PUBLIC)
def test_config_round_trips_through_json(model_type: str) -> None:
    model = _model(model_type)
    again = family(model_type).from_config(json.loads(json.dumps(dataclasses.asdict(model.config))))
    assert again.architecture() == model.architecture()


def test_omitted_fields_take_the_defaults_of_transformers() -> None:
    assert family("olmoe").from_config({}).config.num_experts_per_tok == 8
    mixtral = family("mixtral").from_config({"num_key_value_heads": None})
    assert (mixtral.config.kv_heads, mixtral.config.rope_theta) == (32, 1e6)
    assert family("qwen2_moe").from_config({}).architecture().attention.qkv_bias is True


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_theta": 7.0}, 7.0),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5}}, 5.0),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 5.0}, "partial_rotary_factor": 1.0}, 5.0),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "default"}}, 7.0),
        ({"rope_theta": 7.0, "rope_scaling": {}}, 7.0),
        ({"rope_theta": None}, 10000.0),
    ],
)
def test_both_ways_of_writing_rope(rope: dict[str, Any], theta: float) -> None:
    assert _model("olmoe", **rope).architecture().attention.rope == Rope(theta)


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("olmoe", {"hidden_act": "gelu"}, "hidden_act .asked 'silu', had 'gelu'"),
    ("olmoe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*had 'fp8'.*Pack the original"),
    ("olmoe", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.*had 'dynamic' with factor"),
    ("olmoe", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "'linear' with beta_fast"),
    ("olmoe", {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "rope_scaling.*had 'linear'"),
    ("phimoe", {"num_experts_per_tok": 3}, "the sparse mixer chooses two .asked 2, had 3"),
    ("lfm2_moe", {"layer_types": ["conv"] * 23 + ["sliding_attention"]}, "layer_types.*had .*sliding_attention"),
    ("lfm2_moe", {"num_dense_layers": 24}, "no layer has experts"),
    ("lfm2_moe", {"head_dim": 128}, "one output projection serves.*asked hidden_size 2048, had 32 heads of 128"),
    ("lfm2_moe", {"conv_L_cache": 1}, "conv_L_cache .asked 2 to 32, had 1"),
    ("lfm2_moe", {"conv_dim": 1024}, "conv_dim .asked 2048, had 1024"),
    ("lfm2_moe", {"use_pos_enc": False}, "use_pos_enc .asked True, had False"),
    ("lfm2_moe", {"hidden_act": "gelu"}, "hidden_act"),
    ("olmoe", {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
    ("olmoe", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "with full_attention"),
    ("olmoe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("olmoe", {"sliding_window": 128}, "fields that olmoe does not have.*sliding_window"),
    ("mixtral", {"attention_bias": True, "logit_scale": 2.0}, "attention_bias, logit_scale"),
    ("qwen2_moe", {"n_group": 1}, "n_group"),
    ("qwen2_moe", {"mlp_only_layers": list(range(24))}, "no layer has experts"),
    ("qwen2_moe", {"layer_types": ["linear_attention"] * 24}, "layer_types .had linear_attention"),
]

SENSELESS: list[tuple[str, dict[str, Any], str]] = [
    ("olmoe", {"num_experts_per_tok": 65}, "num_experts_per_tok .asked at most 64 experts, had 65"),
    ("olmoe", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ("olmoe", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
    ("olmoe", {"num_key_value_heads": 0}, "kv_heads"),
    ("olmoe", {"hidden_size": 2040, "num_attention_heads": 16, "num_key_value_heads": 16}, "hidden_size is not a"),
    ("olmoe", {"head_dim": 64}, "head_dim"),
    ("olmoe", {"clip_qkv": -1.0}, "clip_qkv"),
    ("olmoe", {"hidden_size": 48, "num_attention_heads": 16}, "even head size"),
    ("olmoe", {"hidden_size": "2048"}, "hidden_size .asked int, had '2048'"),
    ("olmoe", {"hidden_size": True}, "hidden_size"),
    ("olmoe", {"hidden_size": None}, "hidden_size"),
    ("olmoe", {"hidden_size": 2048.0}, "hidden_size"),
    ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob .asked bool"),
    ("olmoe", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("olmoe", {"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ("olmoe", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("olmoe", {"rope_theta": -1.0}, "rope_theta"),
    ("olmoe", {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "given more than once"),
    ("olmoe", {"rope_parameters": 3}, "rope_parameters"),
    ("olmoe", {"model_type": "mixtral"}, "model_type .asked olmoe, had 'mixtral'"),
    ("olmoe", {"rope_scaling": {"type": "yarn", "factor": 0.0}}, "rope_scaling.factor .asked more than 0, had 0.0"),
    ("olmoe", {"rope_scaling": {"type": "yarn"}}, "yarn needs factor"),
    ("olmoe", {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1.0}, "rope_theta with yarn"),
    (
        "olmoe",
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "linear", "factor": 3}},
        "rope_parameters and rope_scaling differ",
    ),
    ("phimoe", {"hidden_size": 5120, "num_attention_heads": 512}, "short_factor: one factor per pair .asked 5, had 4"),
    ("phimoe", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope needs long_factor"),
    ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise"),
    ("phimoe", {"sliding_window": 0}, "sliding_window"),
    ("lfm2_moe", {"layer_types": ["conv"] * 23}, "layer_types .asked 24 layers, had 23"),
    ("lfm2_moe", {"layer_types": None}, "layer_types .asked 24 layers, had no full_attn_idxs either"),
    ("lfm2_moe", {"layer_types": None, "full_attn_idxs": [24]}, "full_attn_idxs .asked 0 to 23"),
    ("lfm2_moe", {"full_attn_idxs": [0]}, "layer_types and full_attn_idxs differ"),
    ("lfm2_moe", {"num_dense_layers": 25}, "num_dense_layers .asked 0 to 24, had 25"),
    ("lfm2_moe", {"intermediate_size": 0}, "intermediate_size .asked 1 to .*had 0"),
    ("lfm2_moe", {"norm_eps": 0.0}, "norm_eps .asked more than 0"),
    ("lfm2_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    ("lfm2_moe", {"tie_embedding": False, "tie_word_embeddings": True}, "tie_word_embeddings and tie_embedding"),
    ("mixtral", {"sliding_window": 0}, "sliding_window"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("qwen2_moe", {"mlp_only_layers": [24]}, "mlp_only_layers .asked 0 to 23, had .24"),
    ("qwen2_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen2_moe", {"layer_types": ["full_attention"]}, "layer_types .asked 24 layers, had 1"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window is false"),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), UNSUPPORTED)
def test_unsupported_configs(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _model(model_type, **changes)


@pytest.mark.parametrize(("model_type", "changes", "message"), SENSELESS)
def test_senseless_configs(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _model(model_type, **changes)
    assert not isinstance(caught.value, UnsupportedModelError)


def test_null_fields_ask_for_nothing() -> None:
    _model("olmoe", sliding_window=None, quantization_config=None, something_new=None)


# --- routing. Probabilities 1/2, 1/4, 1/8, 1/8 by hand: logits ln 4, ln 2, 0, 0.

LOGITS = np.log(np.array([[1.0, 4.0, 1.0, 2.0]], np.float32))
TINY = {"num_experts": 4, "num_experts_per_tok": 2}


def _close(actual: np.ndarray | None, expected: Any) -> None:
    assert actual is not None
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.array(expected, np.float32), rtol=3e-7)


def test_olmoe_routes_with_and_without_norm_topk_prob() -> None:
    choice = _model("olmoe", **TINY).route(LOGITS)
    assert choice.experts.tolist() == [[1, 3]]
    assert choice.experts.dtype == np.int32
    _close(choice.gates, [[0.5, 0.25]])
    assert choice.shared is None
    _close(_model("olmoe", **TINY, norm_topk_prob=True).route(LOGITS).gates, [[2 / 3, 1 / 3]])


def test_mixtral_always_normalises() -> None:
    choice = _model("mixtral", num_local_experts=4, num_experts_per_tok=2).route(LOGITS)
    assert choice.experts.tolist() == [[1, 3]]
    _close(choice.gates, [[2 / 3, 1 / 3]])


def test_qwen2_moe_keeps_the_shared_gate_out_of_the_softmax() -> None:
    logits = np.concatenate([LOGITS, np.full((1, 1), np.log(3.0), np.float32)], axis=1)
    choice = _model("qwen2_moe", **TINY).route(logits)
    assert choice.experts.tolist() == [[1, 3]]
    _close(choice.gates, [[0.5, 0.25]])
    _close(choice.shared, [0.75])  # sigmoid(ln 3)
    normed = _model("qwen2_moe", **TINY, norm_topk_prob=True).route(logits)
    _close(normed.gates, [[2 / 3, 1 / 3]])
    _close(normed.shared, [0.75])


def test_phimoe_gates_are_softmaxes_among_near_logits() -> None:
    route = _model("phimoe", num_local_experts=4, router_jitter_noise=0.1).route
    # Near 10 within a fifth of the larger: 9 but not 5. Then, without 10: near 9 is nothing but itself.
    choice = route(np.array([[5.0, 10.0, 9.0, -20.0]], np.float32))
    assert choice.experts.tolist() == [[1, 2]] and choice.experts.dtype == np.int32
    _close(choice.gates, [[1 / (1 + np.exp(-1.0)), 1.0]])
    # Below zero sizes decide: -2 is near -1.9 and -10 is not; then -2 stands alone.
    _close(route(np.array([[-10.0, -2.0, -1.9, -10.0]], np.float32)).gates, [[1 / (1 + np.exp(-0.1)), 1.0]])
    _close(route(np.zeros((1, 4), np.float32)).gates, [[1 / 4, 1 / 3]])


# Sigmoids 3/4, 1/2, 1/4, 1/10 by hand.
SIGMOID_LOGITS = np.log(np.array([[3.0, 1.0, 1 / 3, 1 / 9]], np.float32))


def test_lfm2_moe_bias_changes_the_choice_and_not_the_gates() -> None:
    model = _model("lfm2_moe", **TINY)
    choice = model.route(SIGMOID_LOGITS)
    assert choice.experts.tolist() == [[0, 1]] and choice.experts.dtype == np.int32
    _close(choice.gates, [[0.75 / 1.250001, 0.5 / 1.250001]])
    choice = model.route(SIGMOID_LOGITS, np.array([0, -0.3, 0.2, 0], np.float32))
    assert choice.experts.tolist() == [[0, 2]]
    _close(choice.gates, [[0.75 / 1.000001, 0.25 / 1.000001]])
    plain = _model("lfm2_moe", **TINY, norm_topk_prob=False, routed_scaling_factor=2.5)
    choice = plain.route(SIGMOID_LOGITS, np.array([-1, 0, 0, 1], np.float32))
    assert choice.experts.tolist() == [[3, 1]]  # in the order of what they are chosen by
    _close(choice.gates, [[0.25, 1.25]])


def test_lfm2_moe_near_ties_are_of_scores_with_their_bias() -> None:
    model = _model("lfm2_moe", **TINY)
    apart, equal = SIGMOID_LOGITS, np.array([[2, 1, 1, -2]], np.float32)
    levelled, parting = np.array([0, 0, 0.25, 0], np.float32), np.array([0, 0.1, 0, 0], np.float32)
    assert model.undecided(apart).tolist() == [] and model.undecided(apart, levelled).tolist() == [0]
    assert model.undecided(equal).tolist() == [0] and model.undecided(equal, parting).tolist() == []
    nearly = levelled * np.float32(1 + 1e-3)
    assert model.undecided(np.concatenate([equal, apart]), nearly).tolist() == [1]
    assert model.undecided(np.concatenate([apart, apart]), 1.1 * levelled).tolist() == []
    every = _model("lfm2_moe", num_experts=4, num_experts_per_tok=4)
    assert every.undecided(equal).tolist() == []


def test_top_k_is_stable() -> None:
    scores = np.array([[1, 3, 3, 2, 3], [0, 0, 0, 0, 0], [5, 4, 3, 2, 1]], np.float32)
    indices, values = top_k(scores, 3)
    assert indices.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2]]
    assert values.tolist() == [[3, 3, 3], [0, 0, 0], [5, 4, 3]]
    assert top_k(scores, 5)[0].tolist()[0] == [1, 2, 4, 3, 0]
    wide = np.random.default_rng(0).integers(0, 4, (50, 64)).astype(np.float32)  # long rows, many ties
    expected = [sorted(range(64), key=lambda expert: (-row[expert], expert))[:8] for row in wide]
    assert top_k(wide, 8)[0].tolist() == expected
    assert top_k(np.zeros((0, 4), np.float32), 2)[0].shape == (0, 2)
    for k in (0, 6):
        with pytest.raises(ValueError, match="scores"):
            top_k(scores, k)


@pytest.mark.filterwarnings("error")
def test_softmax_and_sigmoid_at_the_ends() -> None:
    _close(softmax(np.array([[1000.0, 1000.0, -1000.0]], np.float32)), [[0.5, 0.5, 0.0]])
    _close(sigmoid(np.array([-200.0, 0.0, 200.0], np.float32)), [0.0, 0.5, 1.0])
    _close(sigmoid(np.array([-20.0], np.float32)), [2.0611537e-09])


def test_rope_tables() -> None:
    cos, sin = rope_tables(Rope(100.0), 4, np.array([0, 3]))  # frequencies 1 and 1/10
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, [[1, 1], [np.cos(3), np.cos(0.3)]], rtol=1e-6)
    np.testing.assert_allclose(sin, [[0, 0], [np.sin(3), np.sin(0.3)]], rtol=1e-6)
