"""Rotary tables against transformers' own, for every kind of scaling, and a prefill beyond the original context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from estream import Engine
from estream.models import family
from estream.models.rope import prompt_tables, rope_tables
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.5, 3.0, 7.0, 20.0],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn, other ends": YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3},
    "yarn, two mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4, "original_max_position_embeddings": 4096},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "longrope": LONGROPE,
    "longrope with its own factor": LONGROPE | {"factor": 16.0},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [5, 33, 5000])
def test_tables(name: str, length: int) -> None:
    """head size 8; positions past 4096 included."""
    common = {"num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 8192}
    rope = SCALINGS[name] | {"rope_theta": 500.0}
    config = transformers.OlmoeConfig(rope_parameters=dict(rope), **common)
    inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=length)
    angles = torch.arange(length).float()[:, None] * inverse[None, :]
    own = family("olmoe").from_config(common | {"num_key_value_heads": 4, "rope_parameters": rope}).architecture()
    cos, sin = rope_tables(own.attention.rope, 8, np.arange(length))
    assert cos.dtype == sin.dtype == np.float32
    tolerance = 2e-6 * max(1, length / 16)  # an angle of 5000 has a last bit of 5e-4
    np.testing.assert_allclose(cos, (angles.cos() * factor).numpy(), rtol=0, atol=tolerance)
    np.testing.assert_allclose(sin, (angles.sin() * factor).numpy(), rtol=0, atol=tolerance)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("olmoe", YARN),
    ("mixtral", SCALINGS["llama3"]),
    ("qwen3_moe", YARN | {"truncate": False}),
    ("qwen2_moe", LONGROPE),
    ("granitemoe", SCALINGS["linear"]),
]


@pytest.mark.parametrize(("name", "rope"), CASES)
def test_prefills_beyond_the_original_context(tmp_path: Path, name: str, rope: dict[str, Any]) -> None:
    package, tiny = packed(tmp_path, name, rope_parameters=rope | {"rope_theta": 500.0}, max_position_embeddings=8192)
    with Engine(package, threads=1) as engine:
        for length in (20, 130):
            ids = prompt(length, seed=length)
            expected = tiny.logits(ids)
            actual = engine.prefill(ids, logits="all").logits
            assert actual is not None
            assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)


def test_positions_past_4096(tmp_path: Path) -> None:
    package, tiny = packed(tmp_path, "olmoe", max_position_embeddings=8192, num_hidden_layers=1, hidden_size=16)
    ids = prompt(4300, seed=4)
    expected = tiny.logits(ids)
    with Engine(package, threads=1, max_tokens=4300) as engine:
        actual = engine.prefill(ids, logits="all").logits
    assert actual is not None
    assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)


def test_longrope_of_phimoe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 takes PhiMoE's short factors for every length; the model's own code, and here transformers made
    to, takes the long ones beyond the original context."""
    rope = LONGROPE | {"rope_theta": 500.0, "short_mscale": 1.1, "long_mscale": 1.3}
    package, tiny = packed(tmp_path, "phimoe", rope_parameters=rope)
    rotary = tiny.model.model.rotary_emb
    plain = ROPE_INIT_FUNCTIONS["longrope"]
    with Engine(package, threads=1) as engine:
        for length in (32, 33, 130):
            monkeypatch.setattr(rotary, "rope_init_fn", lambda config, n=length: plain(config, None, seq_len=n))
            ids = prompt(length, seed=length)
            expected = tiny.logits(ids)
            actual = engine.prefill(ids, logits="all").logits
            assert actual is not None
            assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected), length


def test_prompts_of_a_batch_have_frequencies_of_their_own() -> None:
    rope = (
        family("phimoe")
        .from_config(
            {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": LONGROPE}
        )
        .architecture()
        .attention.rope
    )
    short, long, shorter = prompt_tables(rope, 8, [32, 40, 7])
    for (cos, _), length in ((short, 32), (long, 40), (shorter, 7)):
        assert np.array_equal(cos[:length], rope_tables(rope, 8, np.arange(length))[0])
    assert short[0] is shorter[0]
    assert not np.array_equal(short[0][1:32], long[0][1:32])
