"""What is pushed: the files of a packed model or of a bundle, with the size and SHA-256 that its manifest says."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from android.layout import PhoneLayout
from estream.errors import EStreamError, PackageError, UsageError
from estream.package.contexts import FOLDER as CONTEXTS
from estream.package.contexts import MANIFEST as CONTEXT_MANIFEST
from estream.package.contexts import ContextManifest, context_folders
from estream.package.manifest import MODEL, Manifest
from estream.small_file import JSON_BYTES, read_small

BUNDLE = "bundle.json"
_PATH = re.compile(r"[^/\\\x00-\x1f\x7f]+(/[^/\\\x00-\x1f\x7f]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PhoneFile:
    """One file: `path` under the folder it is pushed to, size in bytes, SHA-256, permissions."""

    path: str
    local: Path
    nbytes: int
    sha256: str
    mode: int = 0o644


@dataclass(frozen=True)
class Contents:
    """Files of one folder on the phone. The manifest is the last to be there: without it the rest is nothing.

    `left_out`: what the phone has no use for.
    """

    label: str
    folder: str
    manifest: PhoneFile
    files: tuple[PhoneFile, ...]
    left_out: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in (*self.files, self.manifest))


def package_contents(package: Path, layout: PhoneLayout, soc: str | None) -> Contents:
    """A packed model, under its own name, with compiled contexts for `soc` only (None: for all).

    Raises PackageError (no package, files missing, of another size), UsageError (a name that a phone cannot have).
    """
    name = package.resolve().name
    if not _PATH.fullmatch(name) or len(name.encode(errors="surrogateescape")) > 200:
        raise UsageError(f"{package}: no name for a folder on the phone", next_step="Rename the package")
    manifest = Manifest.read(package)
    files = [PhoneFile(path, package / path, entry.bytes, entry.sha256) for path, entry in manifest.files.items()]
    left_out = []
    for folder in context_folders(package):
        if soc is not None and folder.name != soc:
            left_out.append(f"{CONTEXTS}/{folder.name}")
            continue
        had = ContextManifest.read(folder)
        at = f"{CONTEXTS}/{folder.name}"
        for entry in had.graphs.values():
            files += [
                PhoneFile(f"{at}/{name}", folder / name, own.nbytes, own.sha256) for name, own in entry.files.items()
            ]
        files.append(_hashed(f"{at}/{CONTEXT_MANIFEST}", folder / CONTEXT_MANIFEST))
    _check_sizes(files, PackageError, "Copy the package again, or pack the checkpoint again")
    own_manifest = _hashed(MODEL, package / MODEL)
    return Contents(name, f"{layout.models}/{name}", own_manifest, tuple(files), tuple(left_out))


def bundle_contents(bundle: Path, layout: PhoneLayout) -> Contents:
    """A bundle, as `estream device bundle` made it. Raises PackageError."""
    document = read_bundle(bundle)
    files = [
        PhoneFile(entry["path"], bundle / entry["path"], entry["bytes"], entry["sha256"], entry["mode"] & 0o777)
        for entry in document["files"]
    ]
    _check_sizes(files, PackageError, _AGAIN)
    return Contents("bundle", layout.root, _hashed(BUNDLE, bundle / BUNDLE), tuple(files))


_AGAIN = "Make it again: estream device bundle"


def read_bundle(bundle: Path) -> dict[str, Any]:
    """bundle.json, with its files checked. Raises PackageError."""
    path = bundle / BUNDLE
    try:
        document = json.loads(read_small(path, JSON_BYTES))
    except OSError as problem:
        raise PackageError(f"{bundle} is not a bundle: {BUNDLE}: {problem.strerror}", next_step=_AGAIN) from problem
    except (ValueError, RecursionError) as problem:
        raise PackageError(f"{path} is not valid JSON: {problem}", next_step=_AGAIN) from problem
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, list) or not all(map(_is_entry, files)):
        raise PackageError(f"{path}: field files is not a list of path, bytes, sha256 and mode", next_step=_AGAIN)
    return dict(document)


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, Mapping)
        and isinstance(path := entry.get("path"), str)
        and _PATH.fullmatch(path) is not None
        and not {".", ".."} & set(path.split("/"))
        and type(entry.get("bytes")) is int
        and type(entry.get("mode")) is int
        and isinstance(entry.get("sha256"), str)
        and _SHA256.fullmatch(entry["sha256"]) is not None
    )


def _hashed(path: str, local: Path) -> PhoneFile:
    content = read_small(local, JSON_BYTES)
    return PhoneFile(path, local, len(content), hashlib.sha256(content).hexdigest())


def _check_sizes(files: list[PhoneFile], error: type[EStreamError], step: str) -> None:
    for file in files:
        try:
            nbytes = file.local.stat().st_size
        except OSError as problem:
            raise error(f"{file.local}: {problem.strerror}", next_step=step) from problem
        if nbytes != file.nbytes:
            raise error(f"{file.local}: size in bytes", asked=file.nbytes, had=nbytes, next_step=step)
