"""Copies of a graph's nodes under other names, to stand several times in one graph."""

from __future__ import annotations

from collections.abc import Callable

import onnx


def copied_nodes(graph: onnx.GraphProto, prefix: str, renamed: Callable[[str], str]) -> list[onnx.NodeProto]:
    """The nodes of `graph`, their names behind `prefix`. renamed: a tensor's name in the copy."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{prefix}{node.name}"
        copy.input[:] = [renamed(name) for name in node.input]
        copy.output[:] = [renamed(name) for name in node.output]
        nodes.append(copy)
    return nodes
