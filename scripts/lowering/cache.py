"""Compiler reports kept in a file: an interrupted run resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from estream.errors import TargetError
from qnn_graphs.htp.compiler import compile_graph


class ReportCache:
    """Reports by (graph bytes, SoC, compiler version), one JSON line each; refusals are results too. A report's
    `seconds` are those of the run that compiled it."""

    def __init__(self, path: Path | None, deadline: float = float("inf"), timeout_s: float = 120) -> None:
        self._path, self._deadline, self._timeout_s = path, deadline, timeout_s
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry

    def report(self, graph: onnx.ModelProto, soc: str, /, **said: Any) -> dict[str, Any]:
        """The compiler's report with context_bytes and qairt, or `refused`; `said` is kept with it.

        Raises TimeoutError when the time is over and the answer is not known yet."""
        digest = hashlib.sha256(graph.SerializeToString(deterministic=True)).hexdigest()
        key = f"{digest[:24]}-{soc}-{version('onnxruntime-qnn')}"
        if key not in self._known:
            if time.monotonic() > self._deadline:
                raise TimeoutError
            entry: dict[str, Any] = {"key": key, "soc": soc} | said
            try:
                compiled = compile_graph(graph, soc, timeout_s=self._timeout_s)
                entry |= compiled.report.as_dict() | {"context_bytes": len(compiled.context), "qairt": compiled.qairt}
            except TargetError as error:
                entry["refused"] = str(error)[:300]
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
            self._known[key] = entry
        return self._known[key]
