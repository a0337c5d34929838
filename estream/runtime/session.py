"""An ONNX Runtime session and what it says of its tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from estream.errors import TargetError
from estream.runtime.capi import ELEMENT_TYPES, CApi
from estream.runtime.target import TensorInfo


@dataclass(frozen=True)
class Tensor:
    """An input or output: `element_type` is ONNX Runtime's number, `symbol` the symbolic dimension's name."""

    name: str
    info: TensorInfo
    element_type: int
    symbol: str | None
    row_bytes: int  # bytes per row of the symbolic dimension; of the whole tensor where there is none

    @property
    def symbolic(self) -> bool:
        return self.symbol is not None

    def nbytes(self, rows: int | None) -> int:
        return self.row_bytes * (1 if rows is None else rows)

    def shape(self, rows: int | None) -> tuple[int, ...]:
        """The shape with `rows` in place of the symbolic dimension."""
        return tuple(rows or 0 if isinstance(size, str) else size for size in self.info.shape)


class Session:
    """Loads `path`; `inputs` and `outputs` in the graph's order. Raises TargetError."""

    def __init__(self, api: CApi, environment: int, options: int, path: Path) -> None:
        self._api = api
        what = f"graph {path.stem}"
        self.handle = api.create("CreateSession", environment, str(path).encode(), options, what=what)
        try:
            self.inputs = self._tensors("Input", what)
            self.outputs = self._tensors("Output", what)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        self._api.release("Session", handle)

    def _tensors(self, kind: str, what: str) -> list[Tensor]:
        count = ctypes.c_size_t()
        self._api.call(f"SessionGet{kind}Count", self.handle, ctypes.byref(count), what=what)
        return [self._tensor(kind, index, what) for index in range(count.value)]

    def _tensor(self, kind: str, index: int, what: str) -> Tensor:
        api = self._api
        allocator = api.create("GetAllocatorWithDefaultOptions", what=what)  # the run time's own, not released
        address = api.create(f"SessionGet{kind}Name", self.handle, index, allocator, what=what)
        name = ctypes.string_at(address).decode()
        api.call("AllocatorFree", allocator, address, what=what)
        where = f"{what}, tensor {name}"
        type_info = api.create(f"SessionGet{kind}TypeInfo", self.handle, index, what=where)
        try:
            info = api.create("CastTypeInfoToTensorInfo", type_info, what=where)  # part of type_info
            element = ctypes.c_int()
            api.call("GetTensorElementType", info, ctypes.byref(element), what=where)
            count = ctypes.c_size_t()
            api.call("GetDimensionsCount", info, ctypes.byref(count), what=where)
            sizes = (ctypes.c_int64 * count.value)()
            api.call("GetDimensions", info, sizes, count.value, what=where)
            symbols = (ctypes.c_char_p * count.value)()
            api.call("GetSymbolicDimensions", info, symbols, count.value, what=where)
            shape = tuple(
                size if size >= 0 else (symbol or b"?").decode() for size, symbol in zip(sizes, symbols, strict=True)
            )
        finally:
            api.release("TypeInfo", type_info)
        return describe(name, element.value, shape, where)


def describe(name: str, element: int, shape: tuple[int | str, ...], where: str) -> Tensor:
    """Checks that the dtype is known and at most one dimension is symbolic. Raises TargetError."""
    dtype = ELEMENT_TYPES.get(element)
    if dtype is None:
        raise TargetError(f"{where}: element type {element} is not supported")
    symbolic = [size for size in shape if isinstance(size, str)]
    if len(symbolic) > 1:
        raise TargetError(f"{where}: more than one symbolic dimension", had=list(shape))
    fixed = [size for size in shape if not isinstance(size, str)]
    row_bytes = int(np.prod(fixed, dtype=np.int64)) * dtype.itemsize
    return Tensor(name, TensorInfo(dtype, shape), element, symbolic[0] if symbolic else None, row_bytes)
