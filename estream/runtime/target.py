"""The contract between the engine and whatever runs graphs: `cpu`, `mock`, later `htp`.

    target = open_target("cpu", threads=2)
    buffer = target.allocate(nbytes, "hidden")        # page-aligned, lives until target.close()
    graph = target.load(path)                         # an ONNX file from the package
    graph.bind("x", buffer.part(0, 1 << 20), rows=32) # rows: the value of the tensor's one symbolic dimension
    graph.run()                                       # blocking; releases the GIL

Every (address, capacity) ever bound comes from a set fixed when the engine opens: the QNN provider caches memory
handles by address, so the set must not grow with tokens, layers or prefills.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Buffer:
    """A piece of target memory. The target that allocated it owns it; a part shares it."""

    address: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> Buffer:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"part [{offset}, {offset + nbytes}) of a buffer of {self.nbytes} bytes")
        return Buffer(self.address + offset, nbytes)

    def array(self, dtype: np.typing.DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
        """A numpy view of the first bytes. Valid until the target is closed."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if count * dtype.itemsize > self.nbytes:
            raise ValueError(f"{dtype}{list(shape)} does not fit a buffer of {self.nbytes} bytes")
        raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(self.address)
        return np.frombuffer(memoryview(raw), dtype=dtype, count=count).reshape(shape)

    def memory(self) -> memoryview:
        """The bytes as a writable memoryview, for preadv."""
        return memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.address)).cast("B")


@dataclass(frozen=True)
class TensorInfo:
    """A graph's input or output. A symbolic dimension is a str; a tensor has at most one."""

    dtype: np.dtype
    shape: tuple[int | str, ...]


class Graph(Protocol):
    """One loaded graph with its current bindings; bindings stay until they are replaced."""

    name: str
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]

    def bind(self, name: str, buffer: Buffer, rows: int | None = None) -> None:
        """Binds an input or an output by address. Raises TargetError if the name is unknown, or the buffer is
        smaller than the tensor."""

    def run(self) -> None:
        """Runs with the current bindings. Raises TargetError (unbound tensor, or the run time's own message)."""


class Target(Protocol):
    """Where graphs run. `graphs` names the folder of the package that holds this target's graphs."""

    name: str
    graphs: str
    max_rows: int  # rows per dispatch and per block of dense work
    signed: (
        bool  # its graphs take int8 weights as two's complement, not as packages store them (`estream.layers.signs`)
    )

    def allocate(self, nbytes: int, label: str) -> Buffer:
        """Page-aligned memory, zeroed, uncommitted until touched where the system allows. Raises TargetError."""

    def allocate_pieces(self, sizes: Sequence[int], label: str) -> list[Buffer]:
        """As `allocate`, one buffer per size. Only a piece is contiguous: where a target cannot map everything at once
        they come from several mappings."""

    def load(self, path: Path) -> Graph: ...

    def close(self) -> None:
        """Releases graphs, then memory, then the run time. Twice is harmless."""
