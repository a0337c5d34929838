"""Processor, memory, limits of this process."""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path

from estream.doctor.finding import Finding
from estream.doctor.software import version
from estream.runtime.processor import integer_fault, integer_graphs, processor_flags
from estream.units import format_bytes

AREA = "machine"
_SHOWN_FLAGS = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "sve")
_LEAST_FILES = 256
_ROOT = Path("/")


def check_machine(root: Path = _ROOT) -> list[Finding]:
    """Findings of this area. root: where proc and sys lie."""
    return [_processor(root), _integers(), *_memory(root), _huge_pages(root), *_limits()]


def _processor(root: Path) -> Finding:
    text = _read(root / "proc/cpuinfo")
    model = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = [flag for flag in _SHOWN_FLAGS if listed and flag in listed[1].split()]
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    found = ", ".join([cores, *([model[1]] if model else []), *([" ".join(flags)] if flags else [])])
    return Finding(AREA, "processor", "ok", found)


def _integers() -> Finding:
    """Whether 8-bit products are right here; a package in f16 or f32 runs either way."""
    runtime = version("onnxruntime")
    fault = integer_fault(runtime or "0.0", platform.machine(), processor_flags())
    if fault is None:
        chosen = integer_graphs(platform.machine(), processor_flags())
        return Finding(AREA, "8-bit products", "ok", f"exact, by the graph set {chosen}")
    return Finding(AREA, "8-bit products", "warning", fault, next_step="Use packages in f16 or f32 on this machine")


def _memory(root: Path) -> list[Finding]:
    fields: dict[str, str] = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE))
    if "MemTotal" not in fields:
        return [Finding(AREA, "memory", "warning", "unknown", next_step="Give --memory: it cannot be checked here")]
    total = int(fields["MemTotal"]) << 10
    available = int(fields.get("MemAvailable", fields.get("MemFree", 0))) << 10
    swap = int(fields.get("SwapTotal", 0)) << 10
    found = f"{format_bytes(total)}, {format_bytes(available)} available, swap {format_bytes(swap)}"
    findings = [Finding(AREA, "memory", "ok", found)]
    limit = cgroup_limit(root)
    if limit is not None:
        told = f"{format_bytes(limit)} at most for this process and its siblings"
        findings.append(Finding(AREA, "cgroup", "ok", told))
    return findings


def cgroup_limit(root: Path = _ROOT) -> int | None:
    """The smallest memory limit, in bytes, of the control groups that hold this process; None: no limit is known."""
    groups = re.findall(r"^\d+:([^:]*):(/.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    limits = []
    for controllers, name in groups:
        if controllers == "":
            mount, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the name may lead nowhere, and the mount's own files are the container's.
        folder = mount / name.lstrip("/")
        for place in [folder, *folder.parents]:
            text = _read(place / file).strip()
            if text.isdecimal() and int(text) < 1 << 60:  # version 1 writes a huge number for none
                limits.append(int(text))
            if place == mount:
                break
    return min(limits, default=None)


def _huge_pages(root: Path) -> Finding:
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    name = "huge pages"
    if chosen and chosen[1] in ("always", "madvise"):
        return Finding(AREA, name, "ok", chosen[1])
    step = "Where the system allows: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding(
        AREA, name, "warning", f"{chosen[1] if chosen else 'unknown'}: dispatches may be slower", "cpu", step
    )


def _limits() -> list[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = files == resource.RLIM_INFINITY or files >= _LEAST_FILES
    opened = Finding(
        AREA,
        "open files",
        "ok" if enough else "warning",
        "no limit" if files == resource.RLIM_INFINITY else str(files),
        next_step=None if enough else f"Raise it: ulimit -n {_LEAST_FILES}",
    )
    told = "no limit" if locked == resource.RLIM_INFINITY else format_bytes(locked)
    return [opened, Finding(AREA, "locked memory", "ok", f"{told} (none is locked by EStream)")]


def _read(path: Path) -> str:
    """A file of proc or sys, or nothing where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
