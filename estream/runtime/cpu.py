"""Target `cpu`: ONNX Runtime's CPU provider. Tensors are bound where they lie; nothing is copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from estream.errors import TargetError
from estream.package.layout import INTEGER_GRAPHS
from estream.runtime.graph import OrtGraph
from estream.runtime.ort import OrtTarget
from estream.runtime.processor import host_integer_fault, host_integer_graphs

MAX_ROWS = 512  # rows per dispatch: more gain nothing, and scratch memory grows with them


class CpuTarget(OrtTarget):
    """Graphs on the CPU: those with the fast 8-bit products of this processor or, for `reference`, the package's
    reference graphs."""

    name = "cpu"
    max_rows = MAX_ROWS

    def __init__(
        self, *, threads: int | None = None, reference: bool = False, library: str | Path | None = None
    ) -> None:
        super().__init__(threads=threads, library=library)
        self.graphs = "reference" if reference else host_integer_graphs()
        self.signed = self.graphs != "cpu-u8"

    def load(self, path: Path) -> OrtGraph:
        """Also raises TargetError where 8-bit kernels are wrong on this processor."""
        graph = super().load(path)
        if self.graphs in INTEGER_GRAPHS and any(info.dtype in (np.int8, np.uint8) for info in graph.inputs.values()):
            fault = host_integer_fault(self._api.version)
            if fault is not None:
                raise TargetError(
                    f"graph {graph.name} takes integer weights, and {fault}",
                    next_step="Use the reference graphs (--reference), or onnxruntime >= 1.32",
                )
        return graph
