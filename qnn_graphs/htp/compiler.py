"""The offline compiler: an ONNX graph with static shapes → a context for one SoC, and what the compiler says of it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import onnx

from estream.errors import TargetError
from estream.runtime.soc import find_soc
from qnn_graphs.htp.child import COMPILED
from qnn_graphs.htp.report import Report, errors, parse_report, qairt_version, refusals

TIMEOUT_S = 600.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Compiled:
    """A compiled graph. `wrapper` is an ONNX file that names the context `{name}_qnn.bin` beside it."""

    name: str
    soc: str
    wrapper: bytes
    context: bytes
    report: Report
    qairt: str

    def write(self, folder: Path) -> Path:
        """Writes both files and returns the wrapper's path, which is what a session loads."""
        (folder / f"{self.name}_qnn.bin").write_bytes(self.context)
        path = folder / f"{self.name}.onnx"
        path.write_bytes(self.wrapper)
        return path


def compile_graph(model: onnx.ModelProto, soc: str, *, timeout_s: float = TIMEOUT_S) -> Compiled:
    """Compiles `model` for `soc` in a process of its own.

    Raises:
        UsageError: an unknown SoC.
        TargetError: a symbolic dimension (named), a node that the NPU refuses (operator and node named), a graph that
            does not compile (the compiler's last words), or no end within `timeout_s` seconds.
    """
    name, soc = model.graph.name, find_soc(soc).name
    check_static(model)
    with tempfile.TemporaryDirectory(prefix="estream-htp-") as folder:
        source, wrapper = Path(folder, "source.onnx"), Path(folder, f"{name}.onnx")
        source.write_bytes(model.SerializeToString())
        command = [sys.executable, "-m", "qnn_graphs.htp.child", str(source), soc, str(wrapper)]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise TargetError(
                f"graph {name} for {soc} did not compile in time",
                asked=f"{timeout_s:g} s",
                next_step="Make the graph smaller: narrower panels, fewer rows, fewer columns of the head",
            ) from error
        seconds, log, binary = time.monotonic() - started, done.stdout, wrapper.with_name(f"{name}_qnn.bin")
        if done.returncode or COMPILED not in log or not binary.exists():
            raise _refused(name, soc, done.returncode, log)
        report, version = parse_report(log, seconds), qairt_version(log)
        return Compiled(name, soc, wrapper.read_bytes(), binary.read_bytes(), report, version)


def check_static(model: onnx.ModelProto) -> None:
    """Raises TargetError naming the first tensor with a symbolic dimension: those run on the CPU, in silence."""
    for value in (*model.graph.input, *model.graph.output):
        shape = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if any(not isinstance(size, int) or size < 1 for size in shape):
            raise TargetError(
                f"graph {model.graph.name}: tensor {value.name} has a symbolic dimension",
                asked="static shapes",
                had=shape,
                next_step="The HTP takes fixed row counts only; build the graph for a given number of rows",
            )


def _refused(name: str, soc: str, status: int, log: str) -> TargetError:
    refused = refusals(log)
    if refused:
        nodes = "; ".join(f"operator {operator}, node {node}: {reason}" for operator, node, reason in refused)
        return TargetError(f"graph {name} for {soc}: refused by the NPU: {nodes}", next_step="Lower it differently")
    said = " | ".join(errors(log)[-4:]) or log.strip()[-400:]
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    return TargetError(f"graph {name} does not compile for {soc} ({ended}): {said}")
