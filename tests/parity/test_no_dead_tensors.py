"""Every tensor of a checkpoint counts: without any one of them the engine's logits are others."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from estream import Engine, pack
from tests.support import tiny_checkpoints
from tests.support.families import found
from tests.support.tiny_checkpoints import prompt

FILE = "model.safetensors"


def logits(checkpoint: Path, folder: Path) -> np.ndarray:
    package = folder / "model.estream"
    pack(checkpoint, package, experts="f32", force=True)
    with Engine(package, threads=1) as engine:
        found = engine.prefill(prompt(60), logits="all").logits
    assert found is not None
    return found


@pytest.mark.parametrize("family", found())
def test_zeroing_any_tensor_changes_the_logits(tmp_path: Path, family: str) -> None:
    tiny_checkpoints.write(family, tmp_path / "whole", **found()[family].smallest)
    tensors = load_file(tmp_path / "whole" / FILE)
    expected = logits(tmp_path / "whole", tmp_path)
    shutil.copytree(tmp_path / "whole", tmp_path / "without")
    dead = []
    for name, weight in tensors.items():
        save_file(tensors | {name: np.zeros_like(weight)}, tmp_path / "without" / FILE)
        if np.array_equal(logits(tmp_path / "without", tmp_path), expected):
            dead.append(name)
    assert len(tensors) > 10 and not dead
