"""Runs a graph here as the phone's HTP would: its numbers are the NPU's, its times say nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from estream.errors import TargetError
from estream.runtime.soc import DEFAULT_SOC, find_soc
from qnn_graphs.htp.compiler import check_static, compile_graph
from qnn_graphs.htp.session import open_session


class Simulator:
    """One graph, compiled for one SoC inside this process."""

    def __init__(self, model: onnx.ModelProto, soc: str = DEFAULT_SOC) -> None:
        """Raises TargetError as `compile_graph` does."""
        check_static(model)
        self.name = model.graph.name
        try:
            self._session = open_session(model.SerializeToString(), find_soc(soc))
        except Exception as error:
            compile_graph(model, soc)  # says what is wrong in its own words
            raise TargetError(f"graph {self.name} compiles for {soc} but does not open here: {error}") from error
        self.outputs = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name. Raises TargetError with the run time's message."""
        try:
            values = self._session.run(self.outputs, dict(feeds))
        except Exception as error:
            raise TargetError(f"graph {self.name} failed in the simulator: {error}") from error
        return dict(zip(self.outputs, values, strict=True))


def run_in_simulator(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], soc: str = DEFAULT_SOC
) -> dict[str, np.ndarray]:
    """Compiles and runs `model` once; outputs by name. Raises TargetError."""
    return Simulator(model, soc).run(feeds)
