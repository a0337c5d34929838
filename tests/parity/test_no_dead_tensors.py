"""Every tensor of a checkpoint counts: without any one of them the engine's logits are others."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from estream import Engine, pack
from tests.support import tiny_checkpoints
from tests.support.tiny_checkpoints import prompt

FILE = "model.safetensors"
# The smallest models that have every kind of layer and every tensor that the family knows.
OPTIONS: dict[str, dict[str, object]] = {
    "olmoe": {"num_hidden_layers": 1, "num_experts": 4},
    "mixtral": {"num_hidden_layers": 1, "num_local_experts": 4},
    "qwen2_moe": {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4},
    "qwen3_moe": {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4, "attention_bias": True},
    "granitemoe": {"num_hidden_layers": 1, "num_local_experts": 4, "attention_bias": True},
    "phimoe": {"num_hidden_layers": 1, "num_local_experts": 4},
    "deepseek_v2": {"num_hidden_layers": 2, "n_routed_experts": 4, "q_lora_rank": 20, "attention_bias": True},
}


def logits(checkpoint: Path, folder: Path) -> np.ndarray:
    package = folder / "model.estream"
    pack(checkpoint, package, experts="f32", force=True)
    with Engine(package, threads=1) as engine:
        found = engine.prefill(prompt(60), logits="all").logits
    assert found is not None
    return found


@pytest.mark.parametrize("family", sorted(tiny_checkpoints.FAMILIES))
def test_zeroing_any_tensor_changes_the_logits(tmp_path: Path, family: str) -> None:
    tiny_checkpoints.FAMILIES[family](tmp_path / "whole", **OPTIONS[family])
    tensors = load_file(tmp_path / "whole" / FILE)
    expected = logits(tmp_path / "whole", tmp_path)
    shutil.copytree(tmp_path / "whole", tmp_path / "without")
    dead = []
    for name, weight in tensors.items():
        save_file(tensors | {name: np.zeros_like(weight)}, tmp_path / "without" / FILE)
        if np.array_equal(logits(tmp_path / "without", tmp_path), expected):
            dead.append(name)
    assert len(tensors) > 10 and not dead
