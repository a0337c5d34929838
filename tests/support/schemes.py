"""Weights in each scheme, and the products that graphs compute from them, in numpy."""

from __future__ import annotations

import numpy as np

from estream.package.layout import PanelLayout
from estream.package.quantise import part_views


def pack(weight: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray | None]:
    """A float weight [K, N] in a scheme; for int8 also the float32 scale of each output channel."""
    if scheme != "int8":
        return weight.astype({"f32": np.float32, "f16": np.float16}[scheme]), None
    scale = (np.abs(weight).max(axis=0) / 127).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


def dequantised(weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Float64 values of a packed weight."""
    return weight.astype(np.float64) * (1.0 if scale is None else scale.astype(np.float64))


def unpack_int4(packed: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    """Nibbles [K/2, N] and multipliers [K/32, N] → integers [K, N], row by row as the format says."""
    half = len(packed)
    rows = [(packed[k] & 15 if k < half else packed[k - half] >> 4).astype(np.int64) - 8 for k in range(2 * half)]
    return np.stack([row * multiplier[k // 32].astype(np.int64) for k, row in enumerate(rows)])


def panel_numbers(layout: PanelLayout, panel: np.ndarray) -> dict[str, np.ndarray]:
    """A packed panel's matrices and scales, float64; int4 unpacked to the integers that scales multiply."""
    views = part_views(layout, panel)
    numbers = {name: view.astype(np.float64) for name, view in views.items() if not name.endswith("_multiplier")}
    if layout.scheme == "int4":
        for name in ("gate", "up", "down"):
            numbers[name] = unpack_int4(views[name], views[f"{name}_multiplier"]).astype(np.float64)
    return numbers


def quantise_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integer path's rows: integers in −127…127 as float64, and float64 scales [rows, 1]. Float32 inside."""
    x = x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-30))
    scale = largest * np.float32(1.0 / 127)
    return np.rint(x / scale).astype(np.float64), scale.astype(np.float64)


def integer_product(x: np.ndarray, weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Rows quantised, integer product, scales after: what the cpu target computes for int8."""
    rows, scales = quantise_rows(x)
    return (rows @ weight.astype(np.float64)) * scales * (1.0 if scale is None else scale.astype(np.float64))


def product(x: np.ndarray, weight: np.ndarray, scale: np.ndarray | None, target: str) -> np.ndarray:
    """x [rows, K] · packed weight, as the target defines it, in float64."""
    if weight.dtype == np.int8 and target == "cpu":
        return integer_product(x, weight, scale)
    return x @ dequantised(weight, scale)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))
