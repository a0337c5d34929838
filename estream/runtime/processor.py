"""Which of the int8 graph sets of target `cpu` is exact on this host, if any.

ONNX Runtime's uint8 × int8 product is the fast one, and wrong on some processors.
"""

from __future__ import annotations

import platform
from pathlib import Path

_X86 = ("x86_64", "AMD64")

# Dot-product instructions that sum into 32 bits. Without them the x86 kernel of uint8 × int8 adds pairs of products in
# 16 bits and saturates at large values; that of uint8 × uint8 does not.
_DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})

# With AMX, 1.24 gives wrong sums where a width is not a multiple of 16; this is the oldest release seen to be right.
_OLDEST_WITH_AMX = (1, 32)


def processor_flags() -> frozenset[str]:
    """Instruction set flags of an x86 processor under Linux; empty where they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def integer_graphs(machine: str, flags: frozenset[str]) -> str:
    """The graph set with exact 8-bit products: `cpu` or `cpu-u8`. `machine` as `platform.machine()`; flags that are not
    known are taken to hold dot products."""
    return "cpu-u8" if machine in _X86 and flags and not flags & _DOT_PRODUCTS else "cpu"


def integer_fault(version: str, machine: str, flags: frozenset[str]) -> str | None:
    """Why 8-bit products would be wrong in `integer_graphs` too, or None. `version` of ONNX Runtime."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if machine in _X86 and "amx_int8" in flags and release < _OLDEST_WITH_AMX:
        return f"int8 products of ONNX Runtime {version} are wrong on a processor with AMX"
    return None


def host_integer_graphs() -> str:
    """`integer_graphs` of this host."""
    return integer_graphs(platform.machine(), processor_flags())


def host_integer_fault(version: str) -> str | None:
    """`integer_fault` of this host."""
    return integer_fault(version, platform.machine(), processor_flags())
