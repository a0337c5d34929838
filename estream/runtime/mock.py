"""Target `mock`: the contract of a target without a device, for tests of arenas, bindings and failure paths.

Graphs run numpy functions, another target's graphs, or nothing. Every (address, capacity) bound is recorded, and
allocations and runs can be made to fail or to take time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from estream.errors import TargetError
from estream.runtime.memory import HostMemory
from estream.runtime.pieces import cut
from estream.runtime.target import Buffer, Graph, Target, TensorInfo

# Receives every bound tensor by name as a numpy view of the bound memory, and writes the outputs in place.
Function = Callable[[Mapping[str, np.ndarray]], None]


@dataclass(frozen=True)
class MockProgram:
    """What a graph of the mock takes, gives and does."""

    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    function: Function | None = None


@dataclass
class Faults:
    """What goes wrong, and how long things take. Numbers count from 1 over the whole target; None: never.

    May be changed at any time. `delay(graph, run)` gives the seconds that a run takes beside its function.
    """

    allocation: int | None = None
    allocation_above: int | None = None  # bytes: larger allocations fail
    run: int | None = None
    run_graph: str | None = None  # with `run`: count this graph's runs only
    delay: Callable[[str, int], float] | None = None


class MockTarget:
    """A target that records.

    Args:
        programs: graphs by name. A graph that is not among them comes from `inner`, or else accepts any tensor name
            and does nothing.
        inner: a target that really loads and runs graphs; closed with the mock.
        faults: injected failures and delays.
        sleep: how a delay is spent.

    Attributes:
        bound: every distinct (address, capacity in bytes) ever bound.
        allocations: (label, bytes) of each allocation.
        runs: how often each graph ran.
    """

    name = "mock"

    def __init__(
        self,
        programs: Mapping[str, MockProgram] | None = None,
        *,
        inner: Target | None = None,
        faults: Faults | None = None,
        reference: bool = False,
        max_rows: int = 512,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.graphs = inner.graphs if inner is not None else "reference" if reference else "cpu"
        self.max_rows = inner.max_rows if inner is not None else max_rows
        self.signed = inner.signed if inner is not None else True
        self.faults = faults if faults is not None else Faults()
        self.bound: set[tuple[int, int]] = set()
        self.allocations: list[tuple[str, int]] = []
        self.runs: Counter[str] = Counter()
        self.closed = False
        self._programs = dict(programs or {})
        self._inner = inner
        self._memory = HostMemory()
        self._sleep = sleep

    def allocate(self, nbytes: int, label: str) -> Buffer:
        """Memory as of a real target. Raises TargetError, also where a fault says so."""
        self.check_open(f"allocate {label}")
        self.allocations.append((label, nbytes))
        faults = self.faults
        too_large = faults.allocation_above is not None and nbytes > faults.allocation_above
        if too_large or len(self.allocations) == faults.allocation:
            raise TargetError(f"memory for {label} was refused (injected)", asked=f"{nbytes} bytes")
        return self._memory.allocate(nbytes, label)

    def allocate_pieces(self, sizes: Sequence[int], label: str) -> list[Buffer]:
        """One allocation, in parts; recorded and refused as such."""
        return cut(self.allocate(sum(sizes), label), sizes)

    def load(self, path: Path) -> MockGraph:
        """The graph named by the file's stem; the file is read by `inner` only. Raises TargetError."""
        path = Path(path)
        self.check_open(f"load {path.stem}")
        program = self._programs.get(path.stem)
        inner = self._inner.load(path) if program is None and self._inner is not None else None
        return MockGraph(path.stem, self, program, inner)

    def before_run(self, graph: str) -> None:
        """Counts a run, spends its delay, raises its fault."""
        self.check_open(f"run graph {graph}")
        self.runs[graph] += 1
        faults = self.faults
        if faults.delay is not None:
            self._sleep(faults.delay(graph, self.runs[graph]))
        count = self.runs.total() if faults.run_graph is None else self.runs[faults.run_graph]
        if count == faults.run and faults.run_graph in (None, graph):
            raise TargetError(f"graph {graph}: run {count} failed (injected)")

    def check_open(self, what: str) -> None:
        if self.closed:
            raise TargetError(f"cannot {what}: the target is closed")

    def close(self) -> None:
        """Closes `inner`, then the memory. Twice is harmless."""
        if not self.closed:
            self.closed = True
            if self._inner is not None:
                self._inner.close()
            self._memory.close()

    def __enter__(self) -> MockTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MockGraph:
    """A graph of the mock. `inputs` and `outputs` are empty where nothing is known of it."""

    def __init__(self, name: str, target: MockTarget, program: MockProgram | None, inner: Graph | None) -> None:
        self.name = name
        self._target = target
        self._program = program
        self._inner = inner
        known = program if program is not None else inner
        self.inputs: Mapping[str, TensorInfo] = MappingProxyType(dict(known.inputs) if known else {})
        self.outputs: Mapping[str, TensorInfo] = MappingProxyType(dict(known.outputs) if known else {})
        self._views: dict[str, np.ndarray] = {}

    def bind(self, name: str, buffer: Buffer, rows: int | None = None) -> None:
        """Records, then binds. Raises TargetError as a real target does."""
        self._target.check_open(f"bind {name} of graph {self.name}")
        if self._inner is not None:
            self._inner.bind(name, buffer, rows)
        elif self._program is not None:
            self._views[name] = self._view(name, buffer, rows)
        self._target.bound.add((buffer.address, buffer.nbytes))

    def run(self) -> None:
        """Raises TargetError: a tensor is not bound, or a fault is injected."""
        if self._program is not None:
            for name in (*self.inputs, *self.outputs):
                if name not in self._views:
                    raise TargetError(f"graph {self.name}: tensor {name} is not bound", next_step="Bind it before run")
        self._target.before_run(self.name)
        if self._inner is not None:
            self._inner.run()
        elif self._program is not None and self._program.function is not None:
            self._program.function(self._views)

    def _view(self, name: str, buffer: Buffer, rows: int | None) -> np.ndarray:
        info = self.inputs.get(name) or self.outputs.get(name)
        if info is None:
            raise TargetError(f"graph {self.name} has no tensor {name}", had=", ".join((*self.inputs, *self.outputs)))
        where = f"graph {self.name}, tensor {name}"
        if (rows is None) == any(isinstance(size, str) for size in info.shape):
            state = "missing" if rows is None else "not wanted"
            raise TargetError(f"{where}: rows {state}", asked=rows, had=list(info.shape))
        shape = tuple(rows or 0 if isinstance(size, str) else size for size in info.shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * info.dtype.itemsize
        if nbytes > buffer.nbytes:
            raise TargetError(f"{where}: the buffer is too small", asked=f"{nbytes} bytes", had=buffer.nbytes)
        return buffer.array(info.dtype, shape)
