"""A graph on the NPU: tensors in memory that it shares with the host, and what its driver copies of all others."""

from __future__ import annotations

from typing import Protocol

from estream.runtime.capi import CApi
from estream.runtime.graph import OrtGraph
from estream.runtime.session import Session
from estream.runtime.target import Buffer


class NpuMemory(Protocol):
    """What a graph asks its target."""

    def in_shared_memory(self, buffer: Buffer) -> int | None: ...

    def count_copied(self, nbytes: int) -> None: ...


class NpuGraph(OrtGraph):
    """Counts, run by run, the bytes that are bound where the NPU cannot see them: nothing else tells of that copy."""

    def __init__(self, name: str, api: CApi, session: Session, memory_info: int, memory: NpuMemory) -> None:
        super().__init__(name, api, session, memory_info)
        self._memory = memory
        self._unseen: dict[str, int] = {}  # bytes by tensor
        self._copied = 0

    def bind(self, name: str, buffer: Buffer, rows: int | None = None) -> None:
        super().bind(name, buffer, rows)
        nbytes = self._tensors[name][1].nbytes(rows)
        unseen = nbytes if self._memory.in_shared_memory(Buffer(buffer.address, nbytes)) is None else 0
        self._copied += unseen - self._unseen.get(name, 0)
        self._unseen[name] = unseen

    def run(self) -> None:
        super().run()
        self._memory.count_copied(self._copied)

    def _memory_info_of(self, buffer: Buffer) -> int:
        return self._memory.in_shared_memory(buffer) or super()._memory_info_of(buffer)
