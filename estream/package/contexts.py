"""Compiled contexts beside a packed model: graphs/htp/<soc>/ with its own manifest, and the checks before loading.

    manifest.json           what was compiled, of what, for what, by what
    {name}.onnx             wrapper: what a session loads
    {name}_qnn.bin          context: what the NPU runs

model.json does not list them: contexts may be compiled again, for other phones, after the model was packed.
Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from estream.errors import PackageError, brief
from estream.package.chunks import head_groups
from estream.package.reader import Package
from estream.runtime.soc import Soc
from estream.small_file import JSON_BYTES, read_small

FOLDER = "graphs/htp"
MANIFEST = "manifest.json"
FORMAT, VERSION = "estream-contexts", 1
_AGAIN = "Compile again: estream compile {} --soc {}"


@dataclass(frozen=True)
class Contexts:
    """Contexts that were checked. `paths`: wrappers by graph name. `simulated`: they run in the simulator."""

    paths: Mapping[str, Path]
    soc: str
    qairt: str
    simulated: bool = False


@dataclass(frozen=True)
class ContextFile:
    """Size and lower-case hexadecimal SHA-256."""

    nbytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> ContextFile:
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class ContextEntry:
    """One graph. graph: SHA-256 of the ONNX bytes that were compiled. report: the compiler's own figures."""

    graph: str
    files: Mapping[str, ContextFile]
    report: Mapping[str, Any]


@dataclass(frozen=True)
class ContextManifest:
    """What graphs/htp/<soc>/manifest.json says."""

    qairt: str
    soc: str
    arch: int
    scheme: Mapping[str, str]
    shapes: Mapping[str, Any]
    plan: Mapping[str, Any] = field(default_factory=dict)  # fixed sizes that were chosen: rows, steps, ladder, ...
    graphs: Mapping[str, ContextEntry] = field(default_factory=dict)

    def to_json(self) -> bytes:
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode("ascii")

    @classmethod
    def read(cls, folder: Path) -> ContextManifest:
        """Raises PackageError naming what is wrong with the document."""
        path, step = folder / MANIFEST, _AGAIN.format(folder.parents[2], folder.name)
        try:
            raw = json.loads(read_small(path, JSON_BYTES))
        except OSError as problem:
            raise PackageError(f"{path}: {problem.strerror}", next_step=step) from problem
        except (ValueError, RecursionError) as problem:
            raise PackageError(f"{path} is not valid JSON: {problem}", next_step=step) from problem
        if not isinstance(raw, dict):
            raise PackageError(f"{path}: not an object", had=brief(raw), next_step=step)
        for name, value in (("format", FORMAT), ("version", VERSION)):
            if raw.pop(name, None) != value:
                raise PackageError(f"{path}: field {name} is not {value}", next_step=step)
        try:
            graphs = {
                name: ContextEntry(
                    entry["graph"],
                    {file: ContextFile(**facts) for file, facts in entry["files"].items()},
                    entry["report"],
                )
                for name, entry in raw.pop("graphs").items()
            }
            for name, entry in graphs.items():
                if set(entry.files) != set(file_names(name)) or not name.replace(".", "_").isidentifier():
                    raise ValueError(f"files of graph {name}")
            return cls(graphs=graphs, **raw)
        except (TypeError, KeyError, AttributeError, ValueError) as problem:
            raise PackageError(f"{path}: a field is missing or unknown: {problem}", next_step=step) from problem


def context_folders(package: Path) -> list[Path]:
    """A package's folders of compiled contexts, one per SoC."""
    return sorted(path for path in (package / FOLDER).glob("*") if path.is_dir() and not path.name.startswith("."))


def damaged_files(folder: Path, manifest: ContextManifest) -> list[str]:
    """What is wrong with the files of a folder of contexts; empty if nothing is."""
    found = []
    for entry in manifest.graphs.values():
        for name, facts in entry.files.items():
            try:
                content = read_small(folder / name)
            except OSError as problem:
                found.append(f"{folder / name}: {problem.strerror}")
                continue
            if ContextFile.of(content) != facts:
                found.append(f"{folder / name} is damaged: it does not match its SHA-256")
    return found


def file_names(graph: str) -> tuple[str, str]:
    """(wrapper, context) of a graph."""
    return f"{graph}.onnx", f"{graph}_qnn.bin"


def scheme_of(package: Package) -> dict[str, str]:
    return {"experts": package.manifest.experts, "dense": package.manifest.dense}


def shapes_of(package: Package) -> dict[str, Any]:
    """The package's sizes that its graphs depend on, as the manifest holds them."""
    arch, panel = package.architecture, package.pool.panel
    attention = asdict(arch.attention)
    del attention["rope"]  # tables are inputs
    return {
        "hidden": arch.hidden,
        "norm": arch.norm,
        "norm_eps": arch.norm_eps,
        "head_bias": arch.head_bias,
        "attention": attention,
        "head_groups": asdict(head_groups(arch.attention)),
        # Left out elsewhere: what was compiled for models without convolutions stays valid.
        **({"conv": {"kernel": arch.conv_kernel, "bias": arch.conv_bias}} if arch.conv_kernel else {}),
        **({"clamped": asdict(arch.clamped)} if arch.clamped is not None else {}),
        "router_width": max(arch.router_width, 1),
        "panel_width": panel.width,
        "chunks": panel.chunks,
        "head_width": package.head_width,
    }


def expected_manifest(package: Package, soc: Soc, qairt: str) -> ContextManifest:
    """What a manifest of contexts for this package, SoC and library says, without its plan and graphs."""
    return ContextManifest(qairt, soc.name, soc.arch, scheme_of(package), shapes_of(package))


def check_manifest(folder: Path, package: Package, soc: Soc, qairt: str) -> ContextManifest:
    """Reads a folder of contexts and compares it with what is asked, field by field, and every file's SHA-256.

    Raises PackageError naming the first field that differs, or the file that is damaged.
    """
    step = _AGAIN.format(package.path, soc.name)
    had = ContextManifest.read(folder)
    asked = asdict(expected_manifest(package, soc, qairt))
    del asked["graphs"], asked["plan"]  # the plan is whoever compiled's choice
    _compare(asked, {name: getattr(had, name) for name in asked}, f"{folder / MANIFEST}: field ", step)
    for problem in damaged_files(folder, had):
        raise PackageError(problem, next_step=step)
    return had


def check_graphs(folder: Path, had: ContextManifest, graphs: Mapping[str, str], next_step: str) -> None:
    """Compares what was compiled with the graphs of this version, SHA-256 of the ONNX bytes by name.

    Raises PackageError naming the first graph that differs.
    """
    compiled = {name: entry.graph for name, entry in had.graphs.items()}
    _compare(dict(graphs), compiled, f"{folder / MANIFEST}: hash of graph ", next_step)


def _compare(asked: Any, had: Any, at: str, step: str) -> None:
    if isinstance(asked, dict) and isinstance(had, dict):
        for name in [*asked, *(name for name in had if name not in asked)]:
            dot = "" if at.endswith(" ") else "."
            _compare(asked.get(name), had.get(name), f"{at}{dot}{name}", step)
    elif asked != had:
        raise PackageError(at, asked=brief(asked), had=brief(had), next_step=step)
