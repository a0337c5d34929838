"""A thin layer over onnx.helper: names, constants, and one model per builder."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

ROWS = "rows"  # token rows of a block
KV_ROWS = "kv_rows"  # capacity of the key and value caches
TABLE_ROWS = "table_rows"  # rows of a table that is gathered from or added to

OPSET = 23  # RMSNormalization and RotaryEmbedding are operators of their own from here on
IR_VERSION = 11  # of opset 23's release
MICROSOFT = "com.microsoft"
FLOAT, INT8 = int(onnx.TensorProto.FLOAT), int(onnx.TensorProto.INT8)  # what Cast is told

Shape = tuple[int | str, ...]


class Builder:
    """Collects the nodes of one graph. Names count up in the order of calls, so a build is byte for byte repeatable."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.quantised: dict[str, tuple[str, str]] = {}  # by tensor: its quantised rows and their scales
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def input(self, name: str, shape: Shape, dtype: np.typing.DTypeLike = np.float32) -> str:
        self._inputs.append(_value_info(name, shape, dtype))
        return name

    def output(self, name: str, shape: Shape, dtype: np.typing.DTypeLike = np.float32) -> str:
        """Declares an output; the node that makes it is given its name."""
        self._outputs.append(_value_info(name, shape, dtype))
        return name

    def constant(self, value: np.ndarray | np.generic) -> str:
        """A small constant (never a weight); equal ones are shared."""
        array = np.asarray(value)
        name = f"const_{array.dtype}_{list(array.shape)}_{array.tobytes().hex()}".replace(" ", "")
        self._constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def integers(self, *values: int) -> str:
        """An int64 vector, as shapes and axes want it."""
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        return self.constant(np.float32(value))

    def node(self, operator: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        return self.nodes(operator, *inputs, outs=(out,), domain=domain, **attributes)[0]

    def nodes(
        self, operator: str, *inputs: str, outs: tuple[str | None, ...], domain: str = "", **attributes: Any
    ) -> list[str]:
        """Adds a node with several outputs; None where the name does not matter."""
        label = f"{operator}_{len(self._nodes)}"
        names = [out if out is not None else f"{label}_{position}" for position, out in enumerate(outs)]
        self._nodes.append(helper.make_node(operator, list(inputs), names, label, domain=domain, **attributes))
        return names

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, self._outputs, initializer=list(self._constants.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="estream")


def _value_info(name: str, shape: Shape, dtype: np.typing.DTypeLike) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))
