"""Safetensors files written by hand: any dtype, any mistake."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """`tensors`: name -> (dtype, shape, bytes), laid out in this order."""
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))
    return path


def f32(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", values.shape, values.astype("<f4").tobytes()


def ramp(*shape: int) -> np.ndarray:
    """0, 1, 2, ... as float32 of this shape."""
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
