"""ONNX Runtime's C API through ctypes: the functions that EStream calls, every status checked.

The API is a table of function pointers that only ever grows at its end, so a function's index is the same in every
release. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from estream.errors import TargetError

API_VERSION = 24  # ONNX Runtime 1.24: the oldest release whose kernels the graphs rely on

_Handle = POINTER(c_void_p)  # where a created object's address is returned
_Name = c_char_p
# parameter, severity, category, log id, place in the source, message
LogFunction = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_char_p, c_char_p, c_char_p)

# name: (index in the table, argument types). These return a status: null, or an error to copy and release.
_CHECKED: dict[str, tuple[int, tuple[Any, ...]]] = {
    "CreateEnv": (3, (c_int, _Name, _Handle)),
    "CreateSession": (7, (c_void_p, _Name, c_void_p, _Handle)),
    "CreateSessionOptions": (10, (_Handle,)),
    "DisableMemPattern": (17, (c_void_p,)),
    "DisableCpuMemArena": (19, (c_void_p,)),
    "SetSessionLogSeverityLevel": (22, (c_void_p, c_int)),
    "SetSessionGraphOptimizationLevel": (23, (c_void_p, c_int)),
    "SetIntraOpNumThreads": (24, (c_void_p, c_int)),
    "SetInterOpNumThreads": (25, (c_void_p, c_int)),
    "SessionGetInputCount": (30, (c_void_p, POINTER(c_size_t))),
    "SessionGetOutputCount": (31, (c_void_p, POINTER(c_size_t))),
    "SessionGetInputTypeInfo": (33, (c_void_p, c_size_t, _Handle)),
    "SessionGetOutputTypeInfo": (34, (c_void_p, c_size_t, _Handle)),
    "SessionGetInputName": (36, (c_void_p, c_size_t, c_void_p, _Handle)),
    "SessionGetOutputName": (37, (c_void_p, c_size_t, c_void_p, _Handle)),
    "CreateTensorWithDataAsOrtValue": (
        49,
        (c_void_p, c_void_p, c_size_t, POINTER(c_int64), c_size_t, c_int, _Handle),
    ),
    "CastTypeInfoToTensorInfo": (55, (c_void_p, _Handle)),
    "GetTensorElementType": (60, (c_void_p, POINTER(c_int))),
    "GetDimensionsCount": (61, (c_void_p, POINTER(c_size_t))),
    "GetDimensions": (62, (c_void_p, POINTER(c_int64), c_size_t)),
    "GetSymbolicDimensions": (63, (c_void_p, POINTER(c_char_p), c_size_t)),
    "CreateCpuMemoryInfo": (69, (c_int, c_int, _Handle)),
    "AllocatorAlloc": (75, (c_void_p, c_size_t, _Handle)),
    "AllocatorFree": (76, (c_void_p, c_void_p)),
    "GetAllocatorWithDefaultOptions": (78, (_Handle,)),
    "DisablePerSessionThreads": (120, (c_void_p,)),
    "CreateThreadingOptions": (121, (_Handle,)),
    "AddSessionConfigEntry": (130, (c_void_p, _Name, _Name)),
    "CreateAllocator": (131, (c_void_p, c_void_p, _Handle)),
    "RegisterExecutionProviderLibrary": (301, (c_void_p, _Name, _Name)),
    "UnregisterExecutionProviderLibrary": (302, (c_void_p, _Name)),
    "GetEpDevices": (303, (c_void_p, c_void_p, POINTER(c_size_t))),
    "SessionOptionsAppendExecutionProvider_V2": (
        304,
        (c_void_p, c_void_p, c_void_p, c_size_t, POINTER(c_char_p), POINTER(c_char_p), c_size_t),
    ),
    "SetGlobalIntraOpNumThreads": (147, (c_void_p, c_int)),
    "SetGlobalInterOpNumThreads": (148, (c_void_p, c_int)),
    "SetGlobalSpinControl": (149, (c_void_p, c_int)),
    "CreateEnvWithCustomLoggerAndGlobalThreadPools": (
        151,
        (LogFunction, c_void_p, c_int, _Name, c_void_p, _Handle),
    ),
}
_RUN = (9, (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p))
_RELEASES = {
    "ReleaseEnv": 92,
    "ReleaseStatus": 93,
    "ReleaseMemoryInfo": 94,
    "ReleaseSession": 95,
    "ReleaseValue": 96,
    "ReleaseTypeInfo": 98,
    "ReleaseSessionOptions": 100,
    "ReleaseThreadingOptions": 122,
    "ReleaseAllocator": 132,
}
_GET_ERROR_MESSAGE = 2
_EP_NAME = 312  # EpDevice_EpName
_MEMORY_INFO = 374  # EpDevice_MemoryInfo

# ONNXTensorElementDataType
ELEMENT_TYPES: dict[int, np.dtype] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    4: np.dtype(np.uint16),
    5: np.dtype(np.int16),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    9: np.dtype(np.bool_),
    10: np.dtype(np.float16),
    11: np.dtype(np.float64),
}


class _ApiBase(ctypes.Structure):
    _fields_ = (
        ("GetApi", ctypes.CFUNCTYPE(c_void_p, c_uint32)),
        ("GetVersionString", ctypes.CFUNCTYPE(c_char_p)),
    )


class CApi:
    """One loaded libonnxruntime.so. Use `load_capi`, which loads each library once per process."""

    def __init__(self, library: Path) -> None:
        self.library = library
        try:
            self._dll = ctypes.CDLL(str(library))
            get_base = self._dll.OrtGetApiBase
        except (OSError, AttributeError) as error:
            raise TargetError(
                f"ONNX Runtime's library {library} cannot be loaded: {error}",
                next_step="Give the path of libonnxruntime.so, or install onnxruntime",
            ) from error
        get_base.restype = POINTER(_ApiBase)
        base = get_base().contents
        self.version: str = base.GetVersionString().decode()
        table = base.GetApi(API_VERSION)
        if not table:
            raise TargetError(
                f"ONNX Runtime in {library} is too old",
                asked=f">= 1.{API_VERSION}",
                had=self.version,
                next_step="Install a newer onnxruntime",
            )
        self._table = ctypes.cast(table, POINTER(c_void_p))
        self._message = self._function(_GET_ERROR_MESSAGE, c_char_p, c_void_p)
        self._release = {name: self._function(index, None, c_void_p) for name, index in _RELEASES.items()}
        self._checked = {name: self._function(index, c_void_p, *types) for name, (index, types) in _CHECKED.items()}
        self._ep_name = self._function(_EP_NAME, c_char_p, c_void_p)
        self._memory_info_of = self._function(_MEMORY_INFO, c_void_p, c_void_p, c_int)
        # session, run options, input names, inputs, count, output names, count, outputs → status; see `status_error`
        self.run = self._function(_RUN[0], c_void_p, *_RUN[1])

    def _function(self, index: int, result: Any, *arguments: Any) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(result, *arguments)(self._table[index])

    def status_error(self, status: int) -> str:
        """Copies a status's message and releases it."""
        message: str = self._message(status).decode(errors="replace")
        self._release["ReleaseStatus"](status)
        return message

    def call(self, name: str, *arguments: Any, what: str) -> None:
        """Calls a function that returns a status. Raises TargetError with `what` and the run time's message."""
        status = self._checked[name](*arguments)
        if status:
            raise TargetError(f"{what}: {self.status_error(status)}")

    def create(self, name: str, *arguments: Any, what: str) -> int:
        """Calls a function whose last argument receives an object; returns the object's address."""
        handle = c_void_p()
        self.call(name, *arguments, ctypes.byref(handle), what=what)
        if handle.value is None:
            raise TargetError(f"{what}: ONNX Runtime returned no object from {name}")
        return handle.value

    def devices(self, environment: int) -> list[tuple[int, str]]:
        """(device, name of its execution provider) of an environment, which owns them."""
        devices, count = POINTER(c_void_p)(), c_size_t()
        self.call("GetEpDevices", environment, ctypes.byref(devices), ctypes.byref(count), what="execution providers")
        handles = [devices[index] for index in range(count.value)]
        return [(handle, self._ep_name(handle).decode()) for handle in handles]

    def provider_devices(self, environment: int, provider: str) -> list[int]:
        """The environment's devices of one execution provider."""
        return [device for device, name in self.devices(environment) if name == provider]

    def shared_memory_info(self, device: int, kind: int) -> int | None:
        """What a device says of a kind of memory (OrtDeviceMemoryType); the device owns it. None: it has none."""
        info: int | None = self._memory_info_of(device, kind)
        return info

    def release(self, kind: str, handle: int | None) -> None:
        """`release("Session", handle)`. Null is ignored."""
        if handle:
            self._release[f"Release{kind}"](handle)


def find_library(folder: str | Path | None = None) -> Path:
    """libonnxruntime.so in `folder` (None: of the installed onnxruntime package, found without importing it). Raises
    TargetError."""
    if folder is not None:
        for library in sorted(Path(folder).glob("libonnxruntime.so*")):
            return library
        raise TargetError(f"no libonnxruntime.so in {folder}", next_step="Put ONNX Runtime's library there")
    spec = importlib.util.find_spec("onnxruntime")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for library in sorted(Path(place, "capi").glob("libonnxruntime.so*")):
            return library
    raise TargetError(
        "libonnxruntime.so was not found: the onnxruntime package is not installed",
        next_step="Install onnxruntime, or give the library's path",
    )


@cache
def _load(library: Path) -> CApi:
    return CApi(library)


def load_capi(library: str | Path | None = None) -> CApi:
    """The API of `library` (None: the installed package's). Raises TargetError."""
    # ONNX Runtime's own builds write a device id and usage events to ~/.cache and upload them, unless told not to.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    path = Path(library) if library is not None else find_library()
    # A bare file name is left to the system's search path, as on a phone.
    return _load(path.resolve() if path.parent != Path() or path.exists() else path)
