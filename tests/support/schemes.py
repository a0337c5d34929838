"""Weights in each scheme, and the products that graphs compute from them, in numpy."""

from __future__ import annotations

import numpy as np


def pack(weight: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray | None]:
    """A float weight [K, N] in a scheme; for int8 also the float32 scale of each output channel."""
    if scheme != "int8":
        return weight.astype({"f32": np.float32, "f16": np.float16}[scheme]), None
    scale = (np.abs(weight).max(axis=0) / 127).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


def dequantised(weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Float64 values of a packed weight."""
    return weight.astype(np.float64) * (1.0 if scale is None else scale.astype(np.float64))


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
