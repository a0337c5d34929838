"""ONNX graphs as code. Every weight is an input of its graph, bound when the graph is called."""

from __future__ import annotations

from qnn_graphs.build import TARGETS, build_graphs

__all__ = ["TARGETS", "build_graphs"]
