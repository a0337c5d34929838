"""A packed model: does it open, do its graphs load, are its compiled contexts whole?"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from estream.doctor.child import ask
from estream.doctor.finding import Finding, missing
from estream.errors import EStreamError, PackageError, TargetError, UsageError
from estream.package.contexts import check_manifest, context_folders, file_names
from estream.package.reader import Package
from estream.runtime.htp import QnnLibraries
from estream.runtime.qairt import qairt_version
from estream.runtime.soc import find_soc
from estream.units import format_bytes

AREA = "package"
_REFERENCE_STEP = "Pack again, or copy the whole package: selftest then compares every graph"


def check_package(path: Path, libraries: Path | None = None) -> list[Finding]:
    """Findings of this area. Graphs and contexts are loaded in child processes. libraries: their folder on a phone."""
    try:
        package = Package.open(path)
    except EStreamError as error:
        return [missing(AREA, "package", error)]
    manifest, pool = package.manifest, package.pool
    told = f"{package.architecture.family}, experts {manifest.experts}, dense {manifest.dense}"
    found = [Finding(AREA, "package", "ok", f"{told}, pool {format_bytes(pool.pool_bytes)}")]
    try:
        answer = ask("graphs", path / "graphs", *filter(None, [libraries]))
        found.append(_graphs(answer["set"], answer["loaded"], package))
    except TargetError as error:
        found.append(missing(AREA, "cpu graphs", error))
    if libraries is None and not any(name.startswith("graphs/reference/") for name in manifest.files):
        found.append(Finding(AREA, "reference graphs", "missing", "none", "host", _REFERENCE_STEP))
    return [*found, *check_contexts(package, libraries)]


def _graphs(chosen: str, loaded: list[str], package: Package) -> Finding:
    """Whether the graphs of the set that target cpu takes here are those that the package lists."""
    name = "cpu graphs"
    listed = {Path(file).stem for file in package.manifest.files if file.startswith(f"graphs/{chosen}/")}
    if not listed or listed - set(loaded):
        told = ", ".join(sorted(listed - set(loaded))) or "all"
        return Finding(AREA, name, "missing", f"not there: {told}", next_step="Pack the checkpoint again")
    return Finding(AREA, name, "ok", f"{len(loaded)} load")


def check_contexts(package: Package, libraries: Path | None = None) -> list[Finding]:
    """One finding per SoC: the manifest fits package and library, files are whole, and every context loads.

    They load one by one in processes of their own: native code does not survive all damaged ones."""
    folders = context_folders(package.path)
    if not folders:
        step = f"estream compile {package.path} --soc sm8650"
        return [Finding(AREA, "contexts", "missing", "none compiled", "htp", step)]
    return [_contexts(folder, package, libraries) for folder in folders]


def _contexts(folder: Path, package: Package, libraries: Path | None) -> Finding:
    name, step = f"contexts {folder.name}", f"Compile again: estream compile {package.path} --soc {folder.name}"
    try:
        soc = find_soc(folder.name)
        manifest = check_manifest(folder, package, soc, qairt_version(QnnLibraries.find(libraries).backend))
        for graph in manifest.graphs:
            ask("context", folder / file_names(graph)[0], soc.name, *filter(None, [libraries]))
    except (PackageError, TargetError, UsageError) as error:
        return dataclasses.replace(missing(AREA, name, error, "htp"), next_step=error.next_step or step)
    nbytes = sum(facts.nbytes for entry in manifest.graphs.values() for facts in entry.files.values())
    said = f"{len(manifest.graphs)} load, {format_bytes(nbytes)}, QAIRT {manifest.qairt}"
    return Finding(AREA, name, "ok", said, "htp")
