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
from estream.models.base import Family, Rope
from estream.models.choose import sigmoid, softmax, top_k
from estream.models.rope import rope_tables
from tests.support.families import close, found

PUBLIC = {name: cases.public for name, cases in found().items()}  # config.json as published


def _model(model_type: str, /, **changes: Any) -> Family:
    return found()[model_type].model(**changes)


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


def test_a_field_under_its_other_name() -> None:
    raw = {name: value for name, value in PUBLIC["qwen3_moe"].items() if name != "num_experts"}
    assert family("qwen3_moe").from_config(raw | {"num_local_experts": 16}).architecture().experts == 16
    assert _model("qwen3_moe", num_local_experts=128).architecture().experts == 128
    with pytest.raises(CheckpointError, match=r"num_experts and num_local_experts are one field.*128 and 16"):
        _model("qwen3_moe", num_local_experts=16)


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


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [(name, *case) for name, cases in found().items() for case in cases.unsupported],
)
def test_unsupported_configs(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _model(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"), [(name, *case) for name, cases in found().items() for case in cases.senseless]
)
def test_senseless_configs(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _model(model_type, **changes)
    assert not isinstance(caught.value, UnsupportedModelError)


def test_null_fields_ask_for_nothing() -> None:
    _model("olmoe", sliding_window=None, quantization_config=None, something_new=None)


# --- building blocks


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
    close(softmax(np.array([[1000.0, 1000.0, -1000.0]], np.float32)), [[0.5, 0.5, 0.0]])
    close(sigmoid(np.array([-200.0, 0.0, 200.0], np.float32)), [0.0, 0.5, 1.0])
    close(sigmoid(np.array([-20.0], np.float32)), [2.0611537e-09])


def test_rope_tables() -> None:
    cos, sin = rope_tables(Rope(100.0), 4, np.array([0, 3]))  # frequencies 1 and 1/10
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, [[1, 1], [np.cos(3), np.cos(0.3)]], rtol=1e-6)
    np.testing.assert_allclose(sin, [[0, 0], [np.sin(3), np.sin(0.3)]], rtol=1e-6)
