"""MXFP4 experts: read as the values that the format gives, and prefilled like a plain checkpoint of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from estream import Engine
from estream.checkpoint import Checkpoint
from estream.checkpoint.mxfp4 import dequantised
from estream.errors import CheckpointError
from estream.models.base import Source
from estream.package.pack import pack
from tests.support import tiny_checkpoints

NAME = "model.layers.0.mlp.experts.gate_up_proj"
Tensors = dict[str, np.ndarray]


def test_golden_values() -> None:
    blocks = np.zeros((1, 1, 16), np.uint8)
    blocks[0, 0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]  # the low nibble comes first
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert dequantised(blocks, np.array([[127]], np.uint8))[:16, 0].tolist() == expected
    assert dequantised(blocks, np.array([[130]], np.uint8))[7, 0] == 48
    assert np.isnan(dequantised(blocks, np.array([[255]], np.uint8))).all()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Tensors]:
    """gpt-oss with MXFP4 experts, the same with plain ones, and the plain tensors."""
    tiny_checkpoints.write("gpt_oss", tmp_path / "plain", hidden_size=64, intermediate_size=32)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    draw, packed = np.random.default_rng(0), dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, depth, width = packed.pop(name).shape
        blocks = draw.integers(0, 256, (experts, width, depth // 32, 16), np.uint8)
        scales = draw.integers(122, 126, (experts, width, depth // 32)).astype(np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.stack([dequantised(*pair) for pair in zip(blocks, scales, strict=True)])
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "mxfp4").mkdir()
    save_file(packed, tmp_path / "mxfp4" / "model.safetensors")
    (tmp_path / "mxfp4" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    return tmp_path / "mxfp4", tmp_path / "plain", plain


def test_prefills_like_the_plain_checkpoint(folders: tuple[Path, Path, Tensors], tmp_path: Path) -> None:
    logits = []
    for folder in folders[:2]:
        pack(folder, tmp_path / f"{folder.name}.estream", experts="f32")
        with Engine(tmp_path / f"{folder.name}.estream", threads=1) as engine:
            logits.append(engine.prefill(tiny_checkpoints.prompt(40), logits="all").logits)
    assert logits[0] is not None and np.isfinite(logits[0]).all() and np.array_equal(logits[0], logits[1])


def test_what_is_missing_or_of_another_shape_is_named(folders: tuple[Path, Path, Tensors]) -> None:
    folder, _, _ = folders
    tensors = load_file(folder / "model.safetensors")
    whole = (8, 64, 64)
    save_file(tensors | {f"{NAME}_scales": np.zeros((8, 64, 3), np.uint8)}, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        with pytest.raises(CheckpointError, match=r"gate_up_proj_scales asked .8, 64, 2. had .8, 64, 3."):
            checkpoint.check(checkpoint.family())
        with pytest.raises(CheckpointError, match=r"gate_up_proj_scales.*asked U8"):
            checkpoint.read(Source(NAME, whole, (3,)))
    del tensors[f"{NAME}_scales"]
    save_file(tensors, folder / "model.safetensors")
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"1 missing: .*gate_up_proj_scales"),
    ):
        checkpoint.check(checkpoint.family())
