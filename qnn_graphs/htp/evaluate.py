"""An HTP graph's arithmetic in numpy, in float32 from end to end: what a compiled context is compared with.

Only QuantizeLinear rounds, as it must: unpacking int4 depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from estream.package.chunks import CONV_LINEARS
from qnn_graphs.htp.attention import MASKED

Array = np.ndarray
_MAGNITUDE = 4.0  # of norm-like vectors and scales: far from both ends of float16
_MATRICES = ("gate", "up", "down", "q", "k", "v", *CONV_LINEARS, "o", "head", "router")


def evaluate(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name, float32. Tensors are dropped after their last use. Raises KeyError for an unknown operator."""
    values = {item.name: _wide(numpy_helper.to_array(item)) for item in model.graph.initializer}
    values |= {name: _wide(array) for name, array in feeds.items()}
    left = Counter(name for node in model.graph.node for name in node.input)
    left.update(output.name for output in model.graph.output)
    for node in model.graph.node:
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        results = _OPERATORS[node.op_type](attributes, *(values[name] for name in node.input))
        values |= dict(zip(node.output, results if isinstance(results, list) else [results], strict=True))
        for name in node.input:
            left[name] -= 1
            if not left[name]:
                del values[name]
    return {output.name: values[output.name] for output in model.graph.output}


def random_feeds(model: onnx.ModelProto, seed: int = 0) -> dict[str, Array]:
    """Inputs as a model gives them, in size and in sign; the same on every call."""
    draw = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        packed = dtype == np.uint8 and not value.name.endswith(("_low", "_high"))
        drawn = _integers(draw, shape) if packed else _draw(draw, value.name, shape)
        feeds[value.name] = drawn.astype(dtype)
    return feeds


def _integers(draw: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Stored weights: bytes around 128, and as pairs of nibbles neither of which is 0, which int4 does not use."""
    return 16 * draw.integers(1, 16, shape) + draw.integers(1, 16, shape)


def _draw(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    word = name.removeprefix(name.partition(".")[0] + ".") if name.startswith("slot") else name
    word = word.partition(".")[0] if not word.endswith(("_low", "_high")) else word.rpartition("_")[2]
    rows = shape[0]
    if word in ("low", "high"):
        return draw.integers(1, 19, shape)
    if ".scale" in name or word in ("gate_scale", "mid_scale", "up_scale", "down_scale"):
        return draw.uniform(0.5, 1.0, shape) * shape[-1] ** -0.5 * _MAGNITUDE
    if word in ("norm", "q_norm", "k_norm", "gates") and not name.endswith(".bias"):
        return draw.uniform(0.5, 1.5, shape)
    if word == "mask":
        return np.where(draw.random(shape) < 0.3, MASKED, 0.0)
    if word == "sum":
        return draw.uniform(1.0, 4.0, shape)
    if word in ("cos", "sin"):
        return (np.cos if word == "cos" else np.sin)(np.arange(np.prod(shape)).reshape(shape))
    if word in _MATRICES and len(shape) == 2:
        return draw.standard_normal(shape) * rows**-0.5
    return draw.standard_normal(shape)


def _wide(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _dequantise(_: Any, x: Array, scale: Array, zero: Array) -> Array:
    return (x.astype(np.float32) - np.float32(zero)) * scale


def _quantise(_: Any, x: Array, scale: Array, zero: Array) -> Array:
    limits = np.iinfo(zero.dtype)
    return np.clip(np.rint(x / scale) + np.float32(zero), limits.min, limits.max).astype(zero.dtype)


def _norm(attributes: Mapping[str, Any], x: Array, weight: Array) -> Array:
    square = np.square(x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(square + np.float32(attributes["epsilon"])) * weight


def _layer_norm(attributes: Mapping[str, Any], x: Array, weight: Array, bias: Array) -> Array:
    return _norm(attributes, x - x.mean(axis=-1, keepdims=True), weight) + bias


def _slice(_: Any, x: Array, starts: Array, ends: Array, axes: Array) -> Array:
    index = [slice(None)] * x.ndim
    for start, end, axis in zip(starts, ends, axes, strict=True):
        index[axis] = slice(start, end)
    return x[tuple(index)]


def _split(attributes: Mapping[str, Any], x: Array) -> list[Array]:
    return np.split(x, attributes["num_outputs"], axis=attributes["axis"])


def _reduce(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda attributes, x, axes: function(x, axis=tuple(axes), keepdims=bool(attributes["keepdims"]))


def _exp(_: Any, x: Array) -> Array:
    return np.exp(x)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": lambda _, x: np.abs(x),
    "Add": lambda _, x, y: x + y,
    "Clip": lambda _, x, low, high: np.clip(x, low, high),
    "Concat": lambda attributes, *pieces: np.concatenate(pieces, axis=attributes["axis"]),
    "DequantizeLinear": _dequantise,
    "Div": lambda _, x, y: x / y,
    "Exp": _exp,
    "Expand": lambda _, x, shape: np.broadcast_to(x, tuple(shape)),
    "Identity": lambda _, x: x,
    "MatMul": lambda _, x, y: x @ y,
    "Max": lambda _, x, y: np.maximum(x, y),
    "Min": lambda _, x, y: np.minimum(x, y),
    "Mul": lambda _, x, y: x * y,
    "QuantizeLinear": _quantise,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _norm,
    "ReduceMax": _reduce(np.max),
    "ReduceSum": _reduce(np.sum),
    "Reshape": lambda _, x, shape: x.reshape(tuple(shape)),
    "Sigmoid": lambda _, x: 1 / (1 + np.exp(-x)),
    "Slice": _slice,
    "Split": _split,
    "Sub": lambda _, x, y: x - y,
    "Transpose": lambda attributes, x: x.transpose(attributes["perm"]),
}
