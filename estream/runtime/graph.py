"""A graph in an ONNX Runtime session: tensors bound by address, runs without copies. The same for every target."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType

from estream.errors import TargetError
from estream.runtime.capi import CApi
from estream.runtime.session import Session, Tensor
from estream.runtime.target import Buffer, TensorInfo

MAX_VALUES = 4096  # cached tensor handles per graph


class OrtGraph:
    """A loaded graph with its bindings. Obtained from a target's `load`, closed with the target."""

    def __init__(self, name: str, api: CApi, session: Session, memory_info: int) -> None:
        self.name = name
        self._api = api
        self._memory_info = memory_info
        self._session: Session | None = session
        tensors = [*session.inputs, *session.outputs]
        self.inputs: Mapping[str, TensorInfo] = MappingProxyType(
            {tensor.name: tensor.info for tensor in session.inputs}
        )
        self.outputs: Mapping[str, TensorInfo] = MappingProxyType(
            {tensor.name: tensor.info for tensor in session.outputs}
        )
        self._tensors = {tensor.name: (index, tensor) for index, tensor in enumerate(tensors)}
        # What Run takes, made once: names, and the array of handles that `bind` fills in (inputs, then outputs).
        self._handles = (ctypes.c_void_p * len(tensors))()
        self._names = (ctypes.c_char_p * len(tensors))(*(tensor.name.encode() for tensor in tensors))
        count, size = len(session.inputs), ctypes.sizeof(ctypes.c_void_p)
        names, handles = ctypes.addressof(self._names), ctypes.addressof(self._handles)
        self._arguments = (
            *(session.handle, None, names, handles, count),
            *(names + count * size, len(session.outputs), handles + count * size),
        )
        self._rows: list[int | None] = [None] * len(tensors)
        self._values: dict[tuple[int, int, int | None], int] = {}  # (tensor, address, rows) → handle
        self._unchecked = True

    @property
    def session_handle(self) -> int:
        """ONNX Runtime's; 0 once closed."""
        return 0 if self._session is None else self._session.handle

    def bind(self, name: str, buffer: Buffer, rows: int | None = None) -> None:
        """Binds an input or output at a buffer's address; `rows` is its symbolic dimension's value.

        Raises TargetError: unknown name, rows missing or not wanted, buffer too small, target closed.
        """
        found = self._tensors.get(name)
        if found is None or self._session is None:
            raise self._refused(name)
        index, tensor = found
        key = (index, buffer.address, rows)
        handle = self._values.get(key)
        if handle is None or buffer.nbytes < tensor.nbytes(rows):
            handle = self._make(key, tensor, buffer)
        if self._rows[index] != rows or not self._handles[index]:
            self._rows[index] = rows
            self._unchecked = True
        self._handles[index] = handle

    def run(self) -> None:
        """Runs with the current bindings; returns when the outputs are written. Raises TargetError."""
        if self._unchecked:
            self._check()
        status = self._api.run(*self._arguments)
        if status:
            raise TargetError(f"graph {self.name}: {self._api.status_error(status)}")

    def unbind(self) -> None:
        """Releases tensor handles: to run again, everything must be bound again."""
        self._unchecked = True
        ctypes.memset(self._handles, 0, ctypes.sizeof(self._handles))
        self._release_values(keep=frozenset())

    def close(self) -> None:
        """Releases tensor handles, then the session. Twice is harmless."""
        session, self._session = self._session, None
        if session is None:
            return
        self.unbind()
        session.close()

    def _make(self, key: tuple[int, int, int | None], tensor: Tensor, buffer: Buffer) -> int:
        _, address, rows = key
        where = f"graph {self.name}, tensor {tensor.name}"
        if (rows is None) == tensor.symbolic:
            state = "missing" if rows is None else "not wanted"
            raise TargetError(f"{where}: rows {state}", asked=rows, had=list(tensor.info.shape))
        if rows is not None and rows < 1:
            raise TargetError(f"{where}: rows must be at least 1", asked=rows)
        nbytes = tensor.nbytes(rows)
        if nbytes > buffer.nbytes:
            raise TargetError(f"{where}: the buffer is too small", asked=f"{nbytes} bytes", had=buffer.nbytes)
        if len(self._values) >= MAX_VALUES:
            self._release_values(keep=frozenset(handle for handle in self._handles if handle))
        shape_array = (ctypes.c_int64 * len(tensor.info.shape))(*tensor.shape(rows))
        handle = self._api.create(
            "CreateTensorWithDataAsOrtValue",
            *(self._memory_info_of(buffer), address, nbytes, shape_array, len(shape_array), tensor.element_type),
            what=where,
        )
        self._values[key] = handle
        return handle

    def _memory_info_of(self, buffer: Buffer) -> int:
        """What ONNX Runtime is told of the memory that a tensor is bound at."""
        return self._memory_info

    def _release_values(self, keep: frozenset[int]) -> None:
        for key, handle in list(self._values.items()):
            if handle not in keep:
                del self._values[key]
                self._api.release("Value", handle)

    def _check(self) -> None:
        """All tensors bound, and one number of rows per symbolic dimension: a mismatch could broadcast in silence."""
        if self._session is None:
            raise TargetError(f"cannot run graph {self.name}: the target is closed")
        seen: dict[str, tuple[str, int | None]] = {}
        for name, (index, tensor) in self._tensors.items():
            if not self._handles[index]:
                raise TargetError(f"graph {self.name}: tensor {name} is not bound", next_step="Bind it before run")
            if tensor.symbol is None:
                continue
            first, rows = seen.setdefault(tensor.symbol, (name, self._rows[index]))
            if rows != self._rows[index]:
                raise TargetError(
                    f"graph {self.name}: {tensor.symbol} of {name} differs from that of {first}",
                    asked=self._rows[index],
                    had=rows,
                )
        self._unchecked = False

    def _refused(self, name: str) -> TargetError:
        if self._session is None:
            return TargetError(f"cannot bind {name} of graph {self.name}: the target is closed")
        return TargetError(f"graph {self.name} has no tensor {name}", had=", ".join(self._tensors))
