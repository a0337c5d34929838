"""A packed model: does it open, do its graphs load, are its compiled contexts whole?"""

from __future__ import annotations

from pathlib import Path

from estream.doctor.child import ask
from estream.doctor.finding import Finding, missing
from estream.errors import EStreamError, TargetError
from estream.package.reader import Package
from estream.units import format_bytes

AREA = "package"
_CONTEXT_NODE = b"EPContext"  # operator of the node that stands for a compiled context
_REFERENCE_STEP = "Pack again, or copy the whole package: selftest then compares every graph"


def check_package(path: Path) -> list[Finding]:
    """Findings of this area. Graphs and contexts are loaded in child processes."""
    try:
        package = Package.open(path)
    except EStreamError as error:
        return [missing(AREA, "package", error)]
    manifest, pool = package.manifest, package.pool
    told = f"{package.architecture.family}, experts {manifest.experts}, dense {manifest.dense}"
    found = [Finding(AREA, "package", "ok", f"{told}, pool {format_bytes(pool.pool_bytes)}")]
    try:
        loaded = ask("graphs", path / "graphs" / "cpu")["loaded"]
        found.append(_graphs("cpu graphs", loaded, package))
    except TargetError as error:
        found.append(missing(AREA, "cpu graphs", error))
    if not any(name.startswith("graphs/reference/") for name in manifest.files):
        found.append(Finding(AREA, "reference graphs", "missing", "none", "host", _REFERENCE_STEP))
    return [*found, *check_contexts(package)]


def _graphs(name: str, loaded: list[str], package: Package) -> Finding:
    listed = {Path(file).stem for file in package.manifest.files if file.startswith("graphs/cpu/")}
    if not listed or listed - set(loaded):
        told = ", ".join(sorted(listed - set(loaded))) or "all"
        return Finding(AREA, name, "missing", f"not there: {told}", next_step="Pack the checkpoint again")
    return Finding(AREA, name, "ok", f"{len(loaded)} load")


def contexts(package: Package) -> list[Path]:
    """ONNX files under graphs/htp that stand for a compiled context, in the order of their names."""
    files = sorted((package.path / "graphs" / "htp").rglob("*.onnx"))
    return [file for file in files if _CONTEXT_NODE in file.read_bytes()]


def check_contexts(package: Package) -> list[Finding]:
    """Loads every compiled context, each in a process of its own: native code does not survive all damaged ones."""
    files = contexts(package)
    if not files:
        step = "Nothing to do: the cpu target needs none, and prefill on the NPU is not part of this version"
        return [Finding(AREA, "contexts", "missing", "none compiled", "htp", step)]
    return [_context(file, package) for file in files]


def _context(file: Path, package: Package) -> Finding:
    name = f"context {file.relative_to(package.path / 'graphs' / 'htp').with_suffix('')}"
    try:
        answer = ask("context", file)
    except TargetError as error:
        step = error.next_step or "Remove the damaged files, or bring them from where they were compiled"
        return Finding(AREA, name, "missing", f"damaged, or for another device: {error.thing}", "htp", step)
    return Finding(AREA, name, "ok", f"loads: {answer['inputs']} inputs, {answer['outputs']} outputs", "htp")
