"""What the targets that run on ONNX Runtime share: environment, memory, loading, release order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from estream.errors import TargetError
from estream.runtime.capi import load_capi
from estream.runtime.environment import Environment
from estream.runtime.graph import OrtGraph
from estream.runtime.memory import HostMemory
from estream.runtime.pieces import cut
from estream.runtime.session import Session
from estream.runtime.target import Buffer


class OrtTarget:
    """Graphs in ONNX Runtime sessions. One thread at a time may use a target; others are free while a graph runs.

    threads: compute threads, the calling one included; None: one per core that this process may use.
    library: libonnxruntime.so; None: the installed package's.
    """

    def __init__(self, *, threads: int | None = None, library: str | Path | None = None) -> None:
        self.threads = threads if threads is not None else len(os.sched_getaffinity(0))
        self._api = load_capi(library)
        self._memory = HostMemory()
        self._graphs: list[OrtGraph] = []
        with ExitStack() as resources:  # released in the opposite order
            self._environment = Environment(self._api, self.threads)
            resources.callback(self._environment.close)
            self._open_provider(resources)
            self._options = self._environment.session_options()
            resources.callback(self._api.release, "SessionOptions", self._options)
            self._configure(self._options)
            # device allocator (0), default memory type (0): memory that ONNX Runtime neither made nor frees
            self._memory_info = self._api.create("CreateCpuMemoryInfo", 0, 0, what="memory info")
            resources.callback(self._api.release, "MemoryInfo", self._memory_info)
            resources.callback(self._memory.close)
            self._resources: ExitStack | None = resources.pop_all()

    def _open_provider(self, resources: ExitStack) -> None:
        """Makes an execution provider known to the environment, and leaves its release in `resources`."""

    def _configure(self, options: int) -> None:
        """Adds what a target's sessions need."""

    @property
    def runtime_version(self) -> str:
        """Version of ONNX Runtime."""
        return self._api.version

    @property
    def allocated_bytes(self) -> int:
        return self._memory.nbytes

    def allocate(self, nbytes: int, label: str) -> Buffer:
        """Page-aligned zeroed memory, committed when touched. Raises TargetError."""
        self._check_open(f"allocate {label}")
        return self._memory.allocate(nbytes, label)

    def allocate_pieces(self, sizes: Sequence[int], label: str) -> list[Buffer]:
        """One allocation, in parts."""
        return cut(self.allocate(sum(sizes), label), sizes)

    def load(self, path: Path) -> OrtGraph:
        """Loads an ONNX file; the graph's name is the file's stem. Raises TargetError: no such file, or refused."""
        path = Path(path)
        self._check_open(f"load {path.stem}")
        if not path.is_file():
            raise TargetError(f"graph {path.stem}: no file {path}", next_step="Pack the model again")
        session = Session(self._api, self._environment.handle, self._options, path)
        graph = self._make_graph(path.stem, session)
        self._graphs.append(graph)
        return graph

    def _make_graph(self, name: str, session: Session) -> OrtGraph:
        return OrtGraph(name, self._api, session, self._memory_info)

    def close(self) -> None:
        """Releases tensor handles and sessions, then memory, then the run time. Twice is harmless."""
        resources, self._resources = self._resources, None
        if resources is None:
            return
        while self._graphs:
            self._graphs.pop().close()
        resources.close()

    def __enter__(self) -> OrtTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self, what: str) -> None:
        if self._resources is None:
            raise TargetError(f"cannot {what}: the target is closed")
