"""What is pushed: the files of a packed model or of a bundle, with the size and SHA-256 that its manifest says."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from android.bundle import MANIFEST, Bundle
from android.layout import PhoneLayout
from estream.errors import PackageError, UsageError
from estream.package.contexts import FOLDER as CONTEXTS
from estream.package.contexts import MANIFEST as CONTEXT_MANIFEST
from estream.package.contexts import ContextManifest, context_folders
from estream.package.manifest import MODEL, Manifest
from estream.small_file import JSON_BYTES, read_small

_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]+")


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

    @property
    def repair(self) -> str:
        """What to do about a file that is damaged here."""
        if self.manifest.path == MANIFEST:
            return "Build the bundle again"
        return "Copy the package again, or pack the checkpoint again"

    @property
    def removal(self) -> str:
        """The command that removes it from the phone."""
        if self.manifest.path == MANIFEST:
            return "estream device clean --all (models, too)"
        return f"estream device clean {shlex.quote(self.label)}"


def package_contents(package: Path, layout: PhoneLayout, soc: str | None) -> Contents:
    """A packed model, under its own name, with compiled contexts for `soc` only (None: for all).

    Raises PackageError (no package, files missing, of another size), UsageError (a name that a phone cannot have).
    """
    name = package.resolve().name
    if not _NAME.fullmatch(name) or len(name.encode(errors="surrogateescape")) > 200:
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
    _check_sizes(files)
    own_manifest = _hashed(MODEL, package / MODEL)
    return Contents(name, f"{layout.models}/{name}", own_manifest, tuple(files), tuple(left_out))


def bundle_contents(path: Path, layout: PhoneLayout) -> Contents:
    """A bundle, as `estream device bundle` made it. Raises BundleError."""
    bundle = Bundle.open(path)
    files = [PhoneFile(file.path, path / file.path, file.bytes, file.sha256, file.mode) for file in bundle.files]
    return Contents("bundle", layout.root, _hashed(MANIFEST, path / MANIFEST), tuple(files))


def _hashed(path: str, local: Path) -> PhoneFile:
    content = read_small(local, JSON_BYTES)
    return PhoneFile(path, local, len(content), hashlib.sha256(content).hexdigest())


def _check_sizes(files: list[PhoneFile]) -> None:
    step = "Copy the package again, or pack the checkpoint again"
    for file in files:
        try:
            nbytes = file.local.stat().st_size
        except OSError as problem:
            raise PackageError(f"{file.local}: {problem.strerror}", next_step=step) from problem
        if nbytes != file.nbytes:
            raise PackageError(f"{file.local}: size in bytes", asked=file.nbytes, had=nbytes, next_step=step)
