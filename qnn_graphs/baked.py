"""An expert's graph with its weights as constants: what a system has that compiles one graph per expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qnn_graphs.copies import copied_nodes


def bake(model: onnx.ModelProto, name: str, panels: Sequence[Mapping[str, np.ndarray]]) -> onnx.ModelProto:
    """`model`, a graph of one panel, as the graph `name` of an expert with these panels: y is their sum.

    panels: of each, its weights by input name, in the inputs' dtypes and shapes. The other inputs stay inputs. Raises
    ValueError for weights that the graph does not take.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.input}
    for weights in panels:
        for key, array in weights.items():
            if key not in inputs:
                raise ValueError(f"graph {graph.name} has no input {key}")
            tensor = inputs[key].type.tensor_type
            shape = [dimension.dim_value for dimension in tensor.shape.dim]
            if shape != list(array.shape) or tensor.elem_type != helper.np_dtype_to_tensor_dtype(array.dtype):
                raise ValueError(f"input {key} of graph {graph.name} is {shape}, not {array.dtype} {list(array.shape)}")
    outputs = [value.name for value in graph.output]
    kept = {key for key in inputs if key not in panels[0]} | {tensor.name for tensor in graph.initializer} | {""}
    if len(panels) == 1:
        kept |= set(outputs)
    nodes: list[onnx.NodeProto] = []
    constants = list(graph.initializer)

    def renamed(panel: int, key: str) -> str:
        return key if key in kept else f"panel{panel}.{key}"

    for panel, weights in enumerate(panels):
        nodes += copied_nodes(graph, f"panel{panel}.", partial(renamed, panel))
        constants += [numpy_helper.from_array(array, renamed(panel, key)) for key, array in weights.items()]
    for output in outputs if len(panels) > 1 else ():
        total = renamed(0, output)
        for panel in range(1, len(panels)):
            after = output if panel == len(panels) - 1 else f"sum{panel}.{output}"
            nodes.append(helper.make_node("Add", [total, renamed(panel, output)], [after], f"Add_{after}"))
            total = after
    values = [value for value in graph.input if value.name in kept]
    baked = helper.make_graph(nodes, name, values, list(graph.output), initializer=constants)
    return helper.make_model(
        baked, opset_imports=list(model.opset_import), ir_version=model.ir_version, producer_name="estream"
    )
