"""The version of a QNN back end, asked of the library itself."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from estream.errors import TargetError


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("patch", ctypes.c_uint32))


class _Interface(ctypes.Structure):
    """The head of QnnInterface_t, up to the fifth function, backendGetBuildId."""

    _fields_ = (
        ("backend_id", ctypes.c_uint32),
        ("provider", ctypes.c_char_p),
        ("core_api", _Version),
        ("backend_api", _Version),
        ("functions", ctypes.c_void_p * 5),
    )


def qnn_build(library: Path) -> tuple[str, str]:
    """(build, which is QAIRT's version; version of its interface). Raises TargetError."""
    providers, count = ctypes.POINTER(ctypes.POINTER(_Interface))(), ctypes.c_uint32()
    try:
        status = ctypes.CDLL(str(library)).QnnInterface_getProviders(ctypes.byref(providers), ctypes.byref(count))
    except (OSError, AttributeError) as error:
        raise TargetError(f"QNN's library {library} cannot be loaded: {error}") from error
    if status or not count.value:
        raise TargetError(f"QnnInterface_getProviders gave status {status} and {count.value} providers")
    interface = providers[0].contents
    build = ctypes.c_char_p()
    prototype = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.POINTER(ctypes.c_char_p))
    if prototype(interface.functions[4])(ctypes.byref(build)) or build.value is None:
        raise TargetError("the back end does not tell its build")
    core = interface.core_api
    return build.value.decode(), f"{core.major}.{core.minor}.{core.patch}"


@cache
def qairt_version(library: Path) -> str:
    """QAIRT's version, as the compiler gives it in its log. Raises TargetError."""
    return qnn_build(library)[0].removeprefix("v")
