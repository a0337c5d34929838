"""Runs graphs of `qnn_graphs` on a target with numpy arrays in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from estream.models.base import Architecture, Attention, LayerPlan, Rope
from estream.runtime.target import Buffer, Graph, Target
from qnn_graphs.movement import build_quantise
from tests.support.schemes import taken


class GraphRunner:
    """Saves models under `folder`, loads them into `target`, binds copies of arrays and runs."""

    def __init__(self, target: Target, folder: Path, models: Mapping[str, onnx.ModelProto]) -> None:
        self._target, self._folder = target, folder
        self.graphs: dict[str, Graph] = {}
        for name, model in models.items():
            path = folder / f"{name}.onnx"
            onnx.save(model, path)
            self.graphs[name] = target.load(path)

    def buffer(self, array: np.ndarray) -> Buffer:
        """Target memory that holds a copy of `array`."""
        buffer = self._target.allocate(max(array.nbytes, 1), "test")
        buffer.array(array.dtype, array.shape)[...] = array
        return buffer

    def quantised(self, inputs: Mapping[str, np.ndarray | Buffer]) -> dict[str, np.ndarray]:
        """x and x_scale as the quantising graph gives them for the float32 rows `inputs["x"]`."""
        x = inputs["x"]
        assert isinstance(x, np.ndarray)
        if "quantise" not in self.graphs:
            path = self._folder / "quantise.onnx"
            onnx.save(build_quantise(x.shape[1]), path)
            self.graphs["quantise"] = self._target.load(path)
        found = self.run("quantise", {"normed": x}, table_rows=len(x))
        return {"x": found["table"], "x_scale": found["table_scale"]}

    def run(
        self,
        name: str,
        inputs: Mapping[str, np.ndarray | Buffer],
        in_place: Mapping[str, str] | None = None,
        **rows: int,
    ) -> dict[str, np.ndarray]:
        """Outputs by name. `in_place` maps an output to the input whose address it shares; `rows` gives the symbolic
        dimensions. Inputs that the graph does not take are left out, so one dict may serve many graphs."""
        graph = self.graphs[name]
        bound: dict[str, Buffer] = {}
        for tensor, info in graph.inputs.items():
            given = inputs[tensor] if tensor in inputs else self.quantised(inputs)[tensor]
            if tensor == "x" and info.dtype == np.uint8:
                given = self.buffer(self.quantised(inputs)["x"])
            if not isinstance(given, Buffer):
                given = taken(given, "cpu-u8" if info.dtype == np.uint8 else "cpu").astype(info.dtype, copy=False)
            bound[tensor] = given if isinstance(given, Buffer) else self.buffer(given)
            graph.bind(tensor, bound[tensor], _rows(info.shape, rows))
        views: dict[str, np.ndarray] = {}
        for tensor, info in graph.outputs.items():
            shape = tuple(rows[size] if isinstance(size, str) else size for size in info.shape)
            shared = (in_place or {}).get(tensor)
            buffer = (
                bound[shared]
                if shared
                else self.buffer(np.full(shape, np.nan if info.dtype.kind == "f" else 0, info.dtype))
            )
            graph.bind(tensor, buffer, _rows(info.shape, rows))
            views[tensor] = buffer.array(info.dtype, shape)
        graph.run()
        return {tensor: view.copy() for tensor, view in views.items()}


def _rows(shape: tuple[int | str, ...], rows: Mapping[str, int]) -> int | None:
    return next((rows[size] for size in shape if isinstance(size, str)), None)


def architecture(
    *,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    bias: bool = False,
    qk_norm: str = "none",
    clip: float | None = None,
    layers: tuple[LayerPlan, ...] = (LayerPlan(0, "moe"),),
    experts: int = 8,
) -> Architecture:
    """A small architecture."""
    attention = Attention(heads, kv_heads, head_dim, Rope(10000.0), bias, bias, qk_norm, clip)  # type: ignore[arg-type]
    return Architecture("test", hidden, 96, 1024, 1e-5, attention, layers, experts, 2, 32)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Frobenius norm of the difference over that of `want`."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
