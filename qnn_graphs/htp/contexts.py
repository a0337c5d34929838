"""Compiles all HTP graphs of a packed model for one SoC, checks each in the simulator, and writes graphs/htp/<soc>/."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx

from estream.errors import TargetError, UsageError
from estream.package.atomic import replacing
from estream.package.contexts import MANIFEST, ContextEntry, ContextFile, ContextManifest, expected_manifest, file_names
from estream.package.reader import Package
from estream.runtime.soc import Soc
from qnn_graphs.htp.build import HtpPlan, build_graphs, default_plan
from qnn_graphs.htp.check import CHECKED, TOLERANCE
from qnn_graphs.htp.compiler import TIMEOUT_S, Compiled, compile_graph

_ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[str], None]


def package_plan(package: Package, chosen: Mapping[str, Any] | None = None) -> HtpPlan:
    """The default sizes for a package; `chosen`: fields of HtpPlan that differ, as a manifest's `plan` holds them."""
    manifest, panel = package.manifest, package.pool.panel
    plan = default_plan(package.architecture, experts=manifest.experts, dense=manifest.dense)
    plan = dataclasses.replace(plan, width=panel.width, chunks=panel.chunks)
    fields = dict(chosen or {})
    if "ladder" in fields:
        fields["ladder"] = tuple((slots, rows) for slots, rows in fields["ladder"])
    return dataclasses.replace(plan, **fields)


def package_graphs(package: Package, chosen: Mapping[str, Any] | None = None) -> dict[str, onnx.ModelProto]:
    """The package's graphs by name. chosen: as of `package_plan`.

    Raises UsageError: the package's schemes or sizes are not for the NPU.
    """
    experts, dense = package.manifest.experts, package.manifest.dense
    if "f32" in (experts, dense):
        raise UsageError(
            f"{package.path} has weights that the NPU does not take",
            asked="f16, int8 or int4",
            had=f"experts {experts}, dense {dense}",
            next_step="Pack the checkpoint again with another scheme, or use --backend cpu",
        )
    arch = package.architecture
    try:
        plan = package_plan(package, chosen)
        return build_graphs(arch, experts=experts, dense=dense, head_width=package.head_width, plan=plan)
    except (TypeError, ValueError) as problem:
        raise UsageError(
            f"{package.path} cannot run on the NPU: {problem}", next_step="Use --backend cpu for this model"
        ) from problem


def graph_hashes(graphs: Mapping[str, onnx.ModelProto]) -> dict[str, str]:
    """SHA-256 of the ONNX bytes by name."""
    return {name: hashlib.sha256(_bytes(model)).hexdigest() for name, model in graphs.items()}


def compile_contexts(
    package: Package, soc: Soc, folder: Path, *, chosen: Mapping[str, Any] | None = None, say: Say | None = None
) -> ContextManifest:
    """Writes `folder` in one step: it is complete, or what it was before. Every graph is compiled in a process of its
    own and run once against numpy before anything is written.

    Raises:
        UsageError: the package is not for the NPU.
        TargetError: a graph does not compile, or its numbers are wrong.
        PackageError: the folder cannot be written.
    """
    graphs = package_graphs(package, chosen)
    compiled: dict[str, Compiled] = {}
    for name, model in graphs.items():
        if say:
            say(f"compiling {name} for {soc.name}")
        compiled[name] = compile_graph(model, soc.name)
        check_context(model, compiled[name])
    versions = {one.qairt for one in compiled.values()}
    if len(versions) != 1:
        raise TargetError("the compiler's version changed between two graphs", had=", ".join(sorted(versions)))
    hashes = graph_hashes(graphs)
    entries = {}
    for name, one in compiled.items():
        contents = dict(zip(file_names(name), (one.wrapper, one.context), strict=True))
        files = {file: ContextFile.of(content) for file, content in contents.items()}
        entries[name] = ContextEntry(hashes[name], files, one.report.as_dict())
    plan = dataclasses.asdict(package_plan(package, chosen))
    del plan["width"], plan["chunks"]  # the package's
    manifest = dataclasses.replace(expected_manifest(package, soc, versions.pop()), plan=plan, graphs=entries)
    with replacing(folder) as build:
        for one in compiled.values():
            one.write(build)
        (build / MANIFEST).write_bytes(manifest.to_json())
    return manifest


def check_context(model: onnx.ModelProto, compiled: Compiled) -> float:
    """Runs a context once in the simulator with random inputs and returns its largest relative error.

    Raises TargetError: it does not run, or it is more than TOLERANCE from numpy.
    """
    what = f"graph {compiled.name} for {compiled.soc}"
    with tempfile.TemporaryDirectory(prefix="estream-htp-") as folder:
        source = Path(folder, "source.onnx")
        source.write_bytes(_bytes(model))
        wrapper = compiled.write(Path(folder))
        command = [sys.executable, "-m", "qnn_graphs.htp.check", str(source), compiled.soc, str(wrapper)]
        try:
            done = subprocess.run(
                command, cwd=_ROOT, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired as problem:
            raise TargetError(f"{what} did not run in the simulator in time", asked=f"{TIMEOUT_S:g} s") from problem
    lines = [line.removeprefix(CHECKED) for line in done.stdout.splitlines() if line.startswith(CHECKED)]
    if done.returncode or not lines:
        raise TargetError(f"{what} does not run in the simulator: {done.stderr.strip()[-400:]}")
    error = float(lines[-1])
    if not error <= TOLERANCE:
        raise TargetError(
            f"{what} computes something else than numpy", asked=f"a relative error of {TOLERANCE:g}", had=f"{error:.3g}"
        )
    return error


def _bytes(model: onnx.ModelProto) -> bytes:
    content: bytes = model.SerializeToString(deterministic=True)
    return content
