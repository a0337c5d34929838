"""The compiled contexts that an engine on htp runs: the package's own, or the cache's, compiled when first needed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from dataclasses import asdict
from pathlib import Path

from estream.cache import cache_folder
from estream.errors import PackageError, TargetError
from estream.package.contexts import (
    FOLDER,
    ContextManifest,
    Contexts,
    check_graphs,
    check_manifest,
    expected_manifest,
    file_names,
)
from estream.package.reader import Package
from estream.runtime.htp import QnnLibraries, simulated
from estream.runtime.qairt import qairt_version
from estream.runtime.soc import DEFAULT_SOC, Soc, find_soc

_log = logging.getLogger("estream.contexts")


def find_contexts(package: Package, soc: str | None = None, libraries: str | Path | None = None) -> Contexts:
    """Checked contexts of a package. Without compiled ones: on x86-64 compiles into the user's cache and says so.

    Graph hashes are compared where graphs can be built (onnx is installed), which is not the case on a phone.
    libraries: the folder of the QNN libraries; None: the installed package.

    Raises:
        UsageError: an unknown SoC, or a package that is not for the NPU.
        PackageError: compiled contexts that do not fit, or are damaged.
        TargetError: there are none, and this machine cannot compile; or the compiler fails.
    """
    chosen = find_soc(soc or DEFAULT_SOC)
    qairt = qairt_version(QnnLibraries.find(libraries).backend)
    folder = package.path / FOLDER / chosen.name
    if folder.is_dir():
        had = check_manifest(folder, package, chosen, qairt)
        if _can_build():
            _check_graphs(folder, had, package, chosen)
    elif simulated() and _can_build():
        folder, had = _cached(package, chosen, qairt)
    else:
        raise TargetError(
            f"{package.path} has no contexts for {chosen.name}",
            had=", ".join(sorted(path.name for path in (package.path / FOLDER).glob("sm*"))) or "none",
            next_step=f"On x86-64: estream compile {package.path} --soc {chosen.name}",
        )
    paths = {name: folder / file_names(name)[0] for name in had.graphs}
    return Contexts(paths, chosen.name, qairt, simulated())


def _can_build() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "qnn_graphs"))


def _check_graphs(folder: Path, had: ContextManifest, package: Package, soc: Soc) -> None:
    from qnn_graphs.htp.contexts import graph_hashes, package_graphs

    step = f"Compile again: estream compile {package.path} --soc {soc.name}"
    check_graphs(folder, had, graph_hashes(package_graphs(package, had.plan)), step)


def _cached(package: Package, soc: Soc, qairt: str) -> tuple[Path, ContextManifest]:
    """Contexts in the cache, under a name that follows from everything they depend on."""
    from qnn_graphs.htp.contexts import compile_contexts, graph_hashes, package_graphs

    facts = [asdict(expected_manifest(package, soc, qairt)), graph_hashes(package_graphs(package))]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "contexts" / key
    if folder.is_dir():
        try:
            return folder, check_manifest(folder, package, soc, qairt)
        except PackageError as problem:
            _log.warning("compiling again, the cache is damaged: %s", problem)
    _log.warning("no compiled contexts in %s: compiling for %s into the cache, once", package.path, soc.name)
    return folder, compile_contexts(package, soc, folder, say=_log.info)
