"""An expert's graph several times over, side by side in one graph: what runs a group of experts with one call."""

from __future__ import annotations

from functools import partial

import onnx
from onnx import helper

from qnn_graphs.copies import copied_nodes


def group(model: onnx.ModelProto, slots: int) -> onnx.ModelProto:
    """`model`, whose inputs and outputs become `slot0.x`, `slot1.x`, ...: one set for each of `slots` experts.

    Constants are shared, and so is the symbolic number of rows: every slot computes as many.
    """
    graph = model.graph
    shared = {tensor.name for tensor in graph.initializer} | {""}

    def renamed(slot: int, name: str) -> str:
        return name if name in shared else f"slot{slot}.{name}"

    nodes: list[onnx.NodeProto] = []
    inputs: list[onnx.ValueInfoProto] = []
    outputs: list[onnx.ValueInfoProto] = []
    for slot in range(slots):
        nodes += copied_nodes(graph, f"slot{slot}.", partial(renamed, slot))
        for values, copies in ((graph.input, inputs), (graph.output, outputs)):
            for value in values:
                one = onnx.ValueInfoProto()
                one.CopyFrom(value)
                one.name = renamed(slot, value.name)
                copies.append(one)
    grouped = helper.make_graph(nodes, f"{graph.name}.x{slots}", inputs, outputs, initializer=list(graph.initializer))
    return helper.make_model(
        grouped, opset_imports=list(model.opset_import), ir_version=model.ir_version, producer_name="estream"
    )
