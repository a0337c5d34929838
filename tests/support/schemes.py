"""Weights in each scheme, and the products that graphs compute from them, in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from estream.package.chunks import chunk_names
from estream.package.layout import DTYPES, INTEGER_GRAPHS, PanelLayout
from estream.package.quantise import part_views
from estream.package.reader import Package
from estream.runtime.processor import host_integer_graphs
from qnn_graphs import TARGETS

HOST_GRAPHS = host_integer_graphs()  # the integer graph set that target cpu takes here
_NEEDS_DOT_PRODUCTS = pytest.mark.skipif(
    HOST_GRAPHS != "cpu", reason="uint8 × int8 saturates on a processor without dot-product instructions"
)
LOWERINGS = [pytest.param(target, marks=[_NEEDS_DOT_PRODUCTS] if target == "cpu" else []) for target in TARGETS]


def pack(weight: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray | None]:
    """A float weight [K, N] as a cpu graph takes it; for int8 also the float16 magnitude of each output channel."""
    if scheme != "int8":
        return weight.astype({"f32": np.float32, "f16": np.float16}[scheme]), None
    magnitude = (np.abs(weight).max(axis=0) * (128 / 127)).astype(np.float16)
    return np.clip(np.rint(weight * 128 / magnitude), -127, 127).astype(np.int8), magnitude


def taken(weight: np.ndarray, lowering: str) -> np.ndarray:
    """What `pack` gives, as the graphs of a lowering take it: for cpu-u8, int8 is integer + 128."""
    return weight.view(np.uint8) ^ np.uint8(128) if weight.dtype == np.int8 and lowering == "cpu-u8" else weight


def dequantised(weight: np.ndarray, magnitude: np.ndarray | None) -> np.ndarray:
    """Float64 values of what `pack` gives."""
    return weight.astype(np.float64) * (1.0 if magnitude is None else magnitude / np.float64(128))


def unpack_int4(packed: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    """Nibbles [K/2, N] and multipliers [K/32, N] → integers [K, N], row by row as the format says."""
    half = len(packed)
    rows = [(packed[k] & 15 if k < half else packed[k - half] >> 4).astype(np.int64) - 8 for k in range(2 * half)]
    return np.stack([row * multiplier[k // 32].astype(np.int64) for k, row in enumerate(rows)])


def panel_numbers(layout: PanelLayout, panel: np.ndarray) -> dict[str, np.ndarray]:
    """A packed panel's matrices, float64, whole; int8 and int4 as the integers that gate_scale and mid_scale, float64,
    multiply."""
    views = part_views(layout, panel)
    numbers: dict[str, np.ndarray] = {}
    for name in ("gate", "up", "down"):
        chunks = [views[key] for key in chunk_names(name, layout.chunks)]
        if layout.scheme == "int4":
            multipliers = [views[key] for key in chunk_names(f"{name}_multiplier", layout.chunks)]
            chunks = [unpack_int4(*pair) for pair in zip(chunks, multipliers, strict=True)]
        numbers[name] = np.concatenate(chunks, axis=1).astype(np.float64)
        if layout.scheme == "int8":
            numbers[name] -= 128
    if "gate_scale" in views:
        numbers["gate_scale"] = views["gate_scale"] / np.float64(128)
        numbers["mid_scale"] = views["mid_scale"] / np.float64(128**2)
    return numbers


def dense_matrix(package: Package, name: str) -> np.ndarray:
    """What a dense tensor, or a matrix stored in column chunks, stands for: float32, whole."""

    def stored(key: str) -> np.ndarray:
        tensor = package.dense[key]
        dtype = DTYPES[tensor.dtype]
        count = tensor.nbytes // dtype.itemsize
        return np.fromfile(package.dense_file, dtype, count, offset=tensor.offset).reshape(tensor.shape)

    chunks = sum(key == name or (key.rpartition(".")[0] == name and key[-1].isdigit()) for key in package.dense)
    values = np.concatenate([stored(key) for key in chunk_names(name, chunks)], axis=-1).astype(np.float32)
    if f"{name}.scale" in package.dense:
        values = (values - 128) / 128 * stored(f"{name}.scale").astype(np.float32)
    return values


def quantise_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integer path's rows: integers in −127…127 as float64, and float64 scales [rows, 1]. Float32 inside."""
    x = x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-30))
    scale = largest * np.float32(1.0 / 127)
    return np.rint(x / scale).astype(np.float64), scale.astype(np.float64)


def product(x: np.ndarray, weight: np.ndarray, magnitude: np.ndarray | None, target: str) -> np.ndarray:
    """x [rows, K] · packed weight, as the target defines it, in float64: rows quantised for int8 on cpu and cpu-u8."""
    if weight.dtype == np.int8 and target in INTEGER_GRAPHS:
        rows, scales = quantise_rows(x)
        return (rows @ dequantised(weight, magnitude)) * scales
    return x @ dequantised(weight, magnitude)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))
