"""Whether ONNX Runtime's uint8 × int8 product, which the int8 graphs of target `cpu` use, is exact on this host."""

from __future__ import annotations

import platform
from pathlib import Path

# Dot-product instructions that sum into 32 bits. Without them the x86 kernels add pairs of products in 16 bits and
# saturate at large values.
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


def integer_fault(version: str, machine: str, flags: frozenset[str]) -> str | None:
    """Why the product would be wrong, or None. `version` of ONNX Runtime, `machine` as `platform.machine()`."""
    if machine not in ("x86_64", "AMD64") or not flags:
        return None
    if not flags & _DOT_PRODUCTS:
        return "this processor has no VNNI instructions, so ONNX Runtime's int8 products saturate"
    release = tuple(int(part) for part in version.split(".")[:2])
    if "amx_int8" in flags and release < _OLDEST_WITH_AMX:
        return f"int8 products of ONNX Runtime {version} are wrong on a processor with AMX"
    return None


def host_integer_fault(version: str) -> str | None:
    """`integer_fault` of this host."""
    return integer_fault(version, platform.machine(), processor_flags())
