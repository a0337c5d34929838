"""Feeds for HTP graphs, and the same arithmetic in float64 on the dequantised weights."""

from __future__ import annotations

import numpy as np

from estream.package.chunks import chunk_names
from estream.runtime import tiles
from qnn_graphs.htp.expert import ExpertGraph
from qnn_graphs.htp.weights import GROUP

Feeds = dict[str, np.ndarray]


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over norm of what was expected."""
    assert np.isfinite(actual).all()
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def columns(matrix: np.ndarray, name: str, chunks: int) -> Feeds:
    """A matrix's column chunks by input name."""
    return {
        key: np.ascontiguousarray(piece)
        for key, piece in zip(chunk_names(name, chunks), np.split(matrix, chunks, axis=1), strict=True)
    }


def pack_int8(weight: np.ndarray, axis: int, *, signed: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes, magnitudes float16 of the channels along the other axis, dequantised float64)."""
    magnitude = _magnitude(weight, axis)
    integers = np.clip(np.rint(weight / magnitude * 128), -127, 127)
    data = integers.astype(np.int8) if signed else (integers + 128).astype(np.uint8)
    return data, magnitude.reshape(-1).astype(np.float16), integers / 128 * magnitude


def pack_int4(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(pairs [K/2, N], multipliers [K/32, N], magnitudes, dequantised float64)."""
    rows, count = weight.shape
    magnitude = _magnitude(weight, axis)
    groups = (weight / magnitude * 128).reshape(rows // GROUP, GROUP, count)
    multiplier = np.clip(np.rint(np.abs(groups).max(axis=1, keepdims=True) / 7), 1, 18)
    values = np.clip(np.rint(groups / multiplier), -7, 7)
    flat = values.reshape(rows, count)
    pairs = (136 + flat[: rows // 2] + 16 * flat[rows // 2 :]).astype(np.uint8)
    whole = (values * multiplier).reshape(rows, count) / 128 * magnitude
    return pairs, multiplier[:, 0].astype(np.uint8), magnitude.reshape(-1).astype(np.float16), whole


def _magnitude(weight: np.ndarray, axis: int) -> np.ndarray:
    return (np.abs(weight).max(axis=axis, keepdims=True) * 1.01).astype(np.float16).astype(np.float64)


def panel_feeds(spec: ExpertGraph, prefix: str, weights: dict[str, np.ndarray]) -> tuple[Feeds, dict[str, np.ndarray]]:
    """A panel's inputs for one slot, and its weights dequantised."""
    feeds: Feeds = {}
    exact: dict[str, np.ndarray] = {}
    magnitudes: dict[str, np.ndarray] = {}
    for part, weight in weights.items():
        axis = 1 if part == "down" else 0
        if spec.scheme == "f16":
            data = weight.astype(np.float16)
            exact[part] = data.astype(np.float64)
        elif spec.scheme == "int8":
            data, magnitudes[part], exact[part] = pack_int8(weight, axis, signed=spec.signed)
        else:
            data, multiplier, magnitudes[part], exact[part] = pack_int4(weight, axis)
            for key, piece in columns(multiplier, part, spec.chunks).items():
                feeds[f"{prefix}{key}_low"], feeds[f"{prefix}{key}_high"] = np.split(piece, 2)
        feeds |= {prefix + key: piece for key, piece in columns(data, part, spec.chunks).items()}
    if spec.scheme != "f16":
        product = magnitudes["up"].astype(np.float64) * magnitudes["down"]
        mid = product.astype(np.float16)
        exact["up"] = exact["up"] * (mid / product)
        for name, vector in (("gate_scale", magnitudes["gate"]), ("mid_scale", mid)):
            feeds |= {prefix + key: piece for key, piece in columns(vector[None], name, spec.chunks).items()}
    return feeds, exact


def expert_case(
    spec: ExpertGraph, seed: int = 0, *, outlier: float = 1.0, loud_row: float = 1.0
) -> tuple[Feeds, list[np.ndarray], list[np.ndarray]]:
    """Feeds, and per slot the exact y and the rows of x as the graph sees them."""
    rng = np.random.default_rng(seed)
    feeds: Feeds = {}
    expected, seen = [], []
    for slot in range(spec.slots):
        prefix = f"slot{slot}."
        x = rng.standard_normal((spec.rows, spec.hidden))
        x[:, 7 % spec.hidden] *= outlier
        x[3 % spec.rows] *= loud_row
        gates = rng.random((spec.rows, 1)).astype(np.float16)
        shapes = {part: (spec.hidden, spec.width) for part in ("gate", "up")} | {"down": (spec.width, spec.hidden)}
        weights = {part: rng.standard_normal(shape) * shape[0] ** -0.5 for part, shape in shapes.items()}
        panel, exact = panel_feeds(spec, prefix, weights)
        feeds |= panel
        feeds[f"{prefix}gates"] = gates
        if spec.tile == "f16":
            feeds[f"{prefix}x"] = x.astype(np.float16)
            x = feeds[f"{prefix}x"].astype(np.float64)
        else:
            feeds[f"{prefix}x"], feeds[f"{prefix}x_scale"] = tiles.quantise_rows(x.astype(np.float32))
        g = x @ exact["gate"]
        expected.append((g / (1 + np.exp(-g)) * (x @ exact["up"])) @ exact["down"] * gates)
        seen.append(x)
    return feeds, expected, seen


def slot_result(spec: ExpertGraph, outputs: Feeds, slot: int) -> np.ndarray:
    """y [T, H] of a slot as float32."""
    prefix = f"slot{slot}."
    y = np.concatenate([outputs[prefix + name] for name in chunk_names("y", spec.chunks)], axis=1)
    if spec.tile == "f16":
        return y.astype(np.float32)
    return tiles.dequantise_rows(y, outputs[f"{prefix}y_scale"], tiles.PRODUCT_UNIT)
