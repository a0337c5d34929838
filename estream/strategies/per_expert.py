"""`per-expert-graph`: a graph for every expert of every layer, with constants: the baseline that switches graphs.

The graphs are built when the engine opens, on a machine that can: with onnx, and for htp with the offline compiler.
Nothing is paged; the run time holds the weights. Exact but for rounding: an expert's panels are added in its graph.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from estream.errors import FlashError, TargetError
from estream.flash.checks import check_panel
from estream.flash.states import ReadyGroup
from estream.layers.experts import ExpertRunner
from estream.layers.htp.experts import HtpExperts
from estream.layers.htp.graphs import Rung
from estream.layers.htp.slots import Slots, Work, weight_inputs
from estream.layers.htp.state import HtpState
from estream.layers.observe import Observer
from estream.layers.signs import panel_preparation
from estream.layers.state import State
from estream.layers.targets import ExpertPart, RunnerOpening
from estream.opening import Options
from estream.package.reader import Package
from estream.routing import RouteTable
from estream.runtime.target import Buffer, Graph, TensorInfo

Bake = Callable[[str, list[memoryview]], Path]  # (name, an expert's panels) -> a graph's file
Experts = dict[tuple[int, int], Graph]  # by layer and expert


def open_per_expert(opening: RunnerOpening, options: Options) -> ExpertPart:
    """Builds and loads all graphs. Raises TargetError: it cannot be done here, or a graph does not compile."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "qnn_graphs")):
        raise TargetError(
            "--strategy per-expert-graph builds graphs, which this machine cannot",
            had="no onnx",
            next_step="Run it on a workstation: pip install onnx",
        )
    if isinstance(opening.state, HtpState):
        return PerExpertContexts(opening, opening.state, options)
    assert isinstance(opening.state, State)
    return PerExpertGraphs(opening, opening.state, options)


class PerExpertGraphs(ExpertRunner):
    """On cpu: the package's expert graph with constants. Shared experts and dense FFNs as everywhere."""

    def __init__(self, opening: RunnerOpening, state: State, options: Options) -> None:
        target, package = opening.target, opening.package
        super().__init__(target, package, state)
        import onnx

        from qnn_graphs.baked import bake

        model = onnx.load(package.graph(target.graphs, "expert"))
        parts = {part.name: (part.offset, part.nbytes) for part in package.pool.panel.parts}
        weights = [(value.name, *parts[value.name]) for value in model.graph.input if value.name in parts]
        dtypes = _tensors(model)

        with tempfile.TemporaryDirectory(prefix="estream-experts-") as folder:

            def build(name: str, panels: list[memoryview]) -> Path:
                path = Path(folder, f"{name}.onnx")
                onnx.save(bake(model, name, [_arrays(dtypes, weights, panel) for panel in panels]), path)
                return path

            self._graphs = _load(opening, options, build)
        self.configuration = {"expert_graphs": len(self._graphs)}

    def run_group(self, ready: ReadyGroup) -> None:
        """All tokens of a layer's experts, one after the other."""
        table, observe = self._routed
        panels = self._panels_per_expert
        for expert in dict.fromkeys(panel // panels for panel, _ in ready.panels):
            graph = self._graphs[ready.layer, expert]
            for tile, least in self.tiles(table, expert):
                computed = self.rows_computed
                self.run(tile, least, graph)
                self.rows_computed += (panels - 1) * (self.rows_computed - computed)
                self.rows_useful += (panels - 1) * len(tile.rows)
                if observe:
                    observe(ready.layer, "expert", tile.rows, {"y": self.y(len(tile.rows))}, expert * panels)
        ready.release()


class PerExpertContexts(HtpExperts):
    """On htp: a compiled context for each expert, tiles of the ladder's middle rung, one per dispatch."""

    def __init__(self, opening: RunnerOpening, state: HtpState, options: Options) -> None:
        assert opening.graphs is not None
        target, package, soc = opening.target, opening.package, opening.graphs.contexts.soc
        super().__init__(target, opening.graphs.rungs, package.pool, state)
        from qnn_graphs.baked import bake
        from qnn_graphs.htp.compiler import compile_graph
        from qnn_graphs.htp.expert import ExpertGraph, build_expert

        panel, rows = package.pool.panel, self._ladder[max(len(self._ladder) - 2, 0)][1]
        clamped = package.architecture.clamped
        model = build_expert(
            ExpertGraph(panel.hidden, panel.width, panel.scheme, 1, rows, panel.chunks, clamped=clamped)
        )
        dtypes = _tensors(model)
        weights = [(f"slot0.{name}", offset, nbytes) for name, offset, nbytes in weight_inputs(dtypes, panel)]

        with tempfile.TemporaryDirectory(prefix="estream-experts-") as folder:

            def build(name: str, panels: list[memoryview]) -> Path:
                baked = bake(model, name, [_arrays(dtypes, weights, one) for one in panels])
                return compile_graph(baked, soc).write(Path(folder))

            graphs = _load(opening, options, build)
        self._slots = {key: Slots(target, Rung(1, rows, graph), panel) for key, graph in graphs.items()}
        self._table: RouteTable
        self.configuration = {"expert_graphs": len(graphs), "expert_rows": rows}

    def start(self, layer: int, table: RouteTable, observe: Observer | None = None) -> None:
        """The layer whose experts come next."""
        self._layer, self._graph, self._observe, self._table = layer, "expert", observe, table

    def run_group(self, ready: ReadyGroup) -> None:
        """All tokens of a layer's experts, one after the other."""
        panels = self._panels_per_expert
        for expert in dict.fromkeys(panel // panels for panel, _ in ready.panels):
            slots = self._slots[ready.layer, expert]
            for tile in self._table.tiles(expert, slots.rows):
                work = Work(expert * panels, Buffer(0, 0), tile)
                (chunks,) = slots.run([work], self._state.normed)
                y = np.concatenate(chunks, axis=1)
                self._check(y, work)
                self._add([(work, y)])
                self.rows_computed += panels * slots.rows
                self.rows_useful += panels * len(tile.rows)
                self._state.bytes_copied += 3 * y.nbytes
        ready.release()


def _load(opening: RunnerOpening, options: Options, build: Bake) -> Experts:
    """Every expert's graph, built and loaded."""
    graphs: Experts = {}
    total = len(opening.package.pool.moe_layers) * opening.package.pool.experts
    for layer, expert, panels in _records(opening, options.verify_reads):
        graphs[layer, expert] = opening.target.load(build(f"expert.{layer}.{expert}", panels))
        if options.progress is not None:
            options.progress("building graphs", len(graphs), total)
    return graphs


def _records(opening: RunnerOpening, verify: bool) -> Iterator[tuple[int, int, list[memoryview]]]:
    """(layer, expert, its panels as the target's graphs take them). Raises FlashError."""
    package: Package = opening.package
    pool, size = package.pool, package.pool.panel.panel_bytes
    prepare = panel_preparation(opening.target, pool.panel)
    with package.experts_file.open("rb") as file:
        for layer in pool.moe_layers:
            for expert in range(pool.experts):
                first = expert * pool.panels_per_expert
                file.seek(pool.panel_offset(layer, first))
                record = memoryview(bytearray(file.read(pool.record_bytes)))
                if len(record) != pool.record_bytes:
                    raise FlashError(f"{package.experts_file} ends in layer {layer}, expert {expert}")
                panels = [record[at : at + size] for at in range(0, len(record), size)]
                for panel, memory in enumerate(panels, first):
                    if verify:
                        check_panel(memory, pool, layer, panel, package.checksum)
                    if prepare is not None:
                        prepare(memory)
                yield layer, expert, panels


def _tensors(model: Any) -> dict[str, TensorInfo]:
    """Inputs of an ONNX model by name."""
    from onnx import helper

    return {
        value.name: TensorInfo(
            np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)),
            tuple(size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim),
        )
        for value in model.graph.input
    }


def _arrays(
    inputs: dict[str, TensorInfo], weights: list[tuple[str, int, int]], panel: memoryview
) -> dict[str, np.ndarray]:
    """A panel's weights by input name; `weights`: (input, offset, bytes)."""
    return {
        name: np.frombuffer(panel[offset : offset + nbytes], inputs[name].dtype).reshape(
            [int(size) for size in inputs[name].shape]
        )
        for name, offset, nbytes in weights
    }
