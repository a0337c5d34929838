"""FP8 checkpoints with a scale per block: read as torch dequantises them, refused where something is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from estream import Engine
from estream.checkpoint import Checkpoint
from estream.checkpoint.fp8 import float_of_byte
from estream.errors import CheckpointError, UnsupportedModelError
from estream.models.base import Source
from estream.package.pack import pack
from tests.support import tiny_checkpoints

BLOCK = (16, 12)  # divides neither 40 nor 24 nor 77: the last blocks are ragged
Tensors = dict[str, torch.Tensor]


def test_every_byte() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(float_of_byte(), expected, equal_nan=True)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(FP8, scales, what they mean)."""
    rows, columns = weight.shape
    at = [torch.arange(size) // step for size, step in zip(weight.shape, BLOCK, strict=True)]
    blocks = [[weight[at[0] == i][:, at[1] == j].abs().max() for j in range(-(-columns // BLOCK[1]))]
              for i in range(-(-rows // BLOCK[0]))]  # fmt: skip
    scales = torch.tensor(blocks) / 448
    factor = scales[at[0]][:, at[1]]
    eighth = (weight / factor).to(torch.float8_e4m3fn)
    return eighth, scales, eighth.float() * factor


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Tensors]:
    """A Qwen3-MoE checkpoint in FP8, and the weights that it means."""
    tiny_checkpoints.write("qwen3_moe", tmp_path, hidden_size=40, moe_intermediate_size=77)
    tensors, meant = load_file(tmp_path / "model.safetensors"), Tensors()
    for name, weight in list(tensors.items()):
        matrix = weight.ndim == 2 and "_proj" in name
        meant[name] = weight
        if matrix:
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = quantised(weight)
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    change(tmp_path, quantization_config=settings)
    return tmp_path, meant


def change(folder: Path, **fields: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def test_reads_what_torch_means(folder: tuple[Path, Tensors]) -> None:
    path, meant = folder
    with Checkpoint.open(path) as checkpoint:
        checkpoint.check(checkpoint.family())
        for name, expected in meant.items():
            whole = checkpoint.read(Source(name, tuple(expected.shape)))
            assert np.array_equal(whole, expected.numpy()), name
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        piece = checkpoint.read(Source(name, (77, 40), (slice(30, 75),), transpose=True, scale=0.5))
        assert np.array_equal(piece, 0.5 * meant[name].numpy()[30:75].T)
        strided = checkpoint.read(Source(name, (77, 40), (slice(1, 77, 2),)))
        assert np.array_equal(strided, meant[name].numpy()[1:77:2])


def test_prefills(folder: tuple[Path, Tensors], tmp_path: Path) -> None:
    path, meant = folder
    pack(path, tmp_path / "fp8.estream", experts="f32")
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(meant, plain / "model.safetensors")
    (plain / "config.json").write_text((path / "config.json").read_text())
    change(plain, quantization_config=None)
    pack(plain, tmp_path / "plain.estream", experts="f32")
    ids = tiny_checkpoints.prompt(40)
    with Engine(tmp_path / "fp8.estream", threads=1) as one, Engine(tmp_path / "plain.estream", threads=1) as other:
        logits = [engine.prefill(ids, logits="all").logits for engine in (one, other)]
    assert logits[0] is not None and np.array_equal(logits[0], logits[1])


def test_what_is_missing_is_named(folder: tuple[Path, Tensors]) -> None:
    path, _ = folder
    name = "model.layers.0.self_attn.q_proj.weight"
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    change(path, quantization_config={"quant_method": "fp8"})
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match="weight_block_size"):
        checkpoint.read(Source(name, (40, 40)))
    change(path, quantization_config=settings)
    tensors = load_file(path / "model.safetensors")
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, path / "model.safetensors")
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match=f"1 missing: {name}_scale_inv"):
        checkpoint.check(checkpoint.family())


def test_scales_without_fp8_are_refused(folder: tuple[Path, Tensors]) -> None:
    path, meant = folder
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | meant, path / "model.safetensors")
    with Checkpoint.open(path) as checkpoint, pytest.raises(UnsupportedModelError, match="already quantised"):
        checkpoint.check(checkpoint.family())
