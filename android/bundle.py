"""A bundle: the folder with all that is pushed to a phone besides models.

bundle.json     what it is made of; path, bytes, SHA-256 and mode of every other file
python/         Python and numpy, from Termux's packages, with the libraries that these need
lib/            ONNX Runtime, the QNN plugin, QAIRT
app/            the program that is started on the phone, and the run-time part of estream/
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from android import fitting, pieces
from android.downloads import Download, Downloads, Progress
from android.gather import Gathering
from android.pieces import ALL_PIECES, CPU_PIECES, NUMPY, ORT, PLUGIN, PYTHON, QAIRT
from android.problems import DAMAGED, BundleError, IncompleteError
from estream.errors import UsageError, brief
from estream.package.atomic import replacing
from estream.runtime.soc import Soc
from estream.small_file import JSON_BYTES, open_regular, read_small
from estream.version import __version__

MANIFEST = "bundle.json"
FORMAT, VERSION = "estream-bundle", 1
_AGAIN = "Build it again: estream device bundle"
_PATH = re.compile(r"[^/\\\x00-\x1f\x7f]+(/[^/\\\x00-\x1f\x7f]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BundleFile:
    """path: relative, with slashes. sha256: lower-case hexadecimal. mode: permission bits."""

    path: str
    bytes: int
    sha256: str
    mode: int


@dataclass(frozen=True)
class Bundle:
    """What bundle.json says.

    versions, known_from: of each piece (onnxruntime, plugin, qairt, python, numpy) and package of Termux that is in it.
    socs: names of those whose NPU it serves; none: for the CPU only.
    """

    path: Path
    estream: str
    versions: Mapping[str, str]
    known_from: Mapping[str, str]
    socs: tuple[str, ...]
    files: tuple[BundleFile, ...]

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Reads a bundle's manifest, and checks that every file is there and has its size.

        Raises BundleError naming what is wrong.
        """
        bundle = cls._read(path)
        for file in bundle.files:
            try:
                nbytes = os.stat(path / file.path).st_size
            except OSError as problem:
                raise _damaged(path / file.path, problem.strerror) from problem
            if nbytes != file.bytes:
                raise BundleError(
                    f"{path / file.path} has another size than {MANIFEST} says",
                    kind=DAMAGED,
                    asked=file.bytes,
                    had=nbytes,
                    next_step=_AGAIN,
                )
        return bundle

    @classmethod
    def _read(cls, path: Path) -> Bundle:
        name = path / MANIFEST
        try:
            raw = json.loads(read_small(name, JSON_BYTES))
        except FileNotFoundError:
            raise BundleError(f"{path} is not a bundle: it has no {MANIFEST}", next_step=_AGAIN) from None
        except OSError as problem:
            raise _damaged(name, problem.strerror) from problem
        except (ValueError, RecursionError) as problem:
            raise _damaged(name, f"it is not valid JSON: {problem}") from problem
        if not isinstance(raw, dict):
            raise _damaged(name, f"it is not an object but {brief(raw)}")
        for field, asked in (("format", FORMAT), ("version", VERSION)):
            if raw.get(field) != asked:
                had = brief(raw.get(field))
                raise BundleError(f"{name}: field {field}", asked=asked, had=had, next_step=_AGAIN)
        try:
            files = tuple(_file(entry) for entry in raw["files"])
            versions, known_from = (
                {str(piece): str(value) for piece, value in raw[field].items()} for field in ("versions", "known_from")
            )
            return cls(path, str(raw["estream"]), versions, known_from, tuple(map(str, raw["socs"])), files)
        except (TypeError, KeyError, AttributeError, ValueError) as problem:
            raise _damaged(name, f"a field is missing or wrong: {problem}") from problem

    def damaged(self, progress: Progress | None = None) -> list[str]:
        """What is wrong with the files' bytes; empty if nothing is. Reads all of them."""
        found, done, total = [], 0, sum(file.bytes for file in self.files)
        for file in self.files:
            try:
                with open(open_regular(self.path / file.path), "rb") as stream:
                    sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as problem:
                found.append(f"{self.path / file.path}: {problem.strerror}")
                continue
            if sha256 != file.sha256:
                found.append(f"{self.path / file.path} is damaged: it does not match its SHA-256")
            done += file.bytes
            if progress is not None:
                progress("checking bundle", done, total)
        return found

    def to_json(self) -> bytes:
        """bundle.json."""
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        del document["path"]
        return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode("ascii")


def _file(entry: Any) -> BundleFile:
    """Raises TypeError or ValueError: not a file below the bundle with its size, SHA-256 and mode."""
    file = BundleFile(**entry)
    numbers = type(file.bytes) is int and file.bytes >= 0 and type(file.mode) is int and 0 <= file.mode <= 0o777
    if not numbers or not _PATH.fullmatch(file.path) or {".", ".."} & set(file.path.split("/")):
        raise ValueError(f"file {brief(entry)}")
    if not _SHA256.fullmatch(file.sha256):
        raise ValueError(f"SHA-256 of {file.path}")
    return file


def _damaged(path: Path, reason: object) -> BundleError:
    return BundleError(f"{path} is damaged: {reason}", kind=DAMAGED, next_step=_AGAIN)


def is_bundle(path: Path) -> bool:
    """Whether `path` is a bundle of any version, whole or damaged: a folder whose bundle.json says so."""
    try:
        manifest = json.loads(read_small(path / MANIFEST, JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def build_bundle(
    downloads: Path,
    out: Path,
    *,
    package: Path | None = None,
    soc: str | None = None,
    cpu_only: bool = False,
    on_phone: Collection[str] = (),
    phone: Path | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Makes a bundle of a folder of downloads. A bundle that is at `out` already is replaced whole.

    package: its compiled contexts say which QAIRT and which SoCs. soc: this one only. cpu_only: without QNN.
    on_phone: names of libraries that this phone has and not every other.
    phone: folder of the program that is started there; None: EStream's own.

    Raises:
        UsageError: options that exclude each other, no such folder, `out` is there and no bundle.
        IncompleteError: with all that is missing, does not fit, or is damaged.
        PackageError: the package's contexts cannot be read, or `out` cannot be written.
    """
    if cpu_only and (package is not None or soc is not None):
        raise UsageError(
            "a bundle for the CPU only has no contexts and no SoC",
            next_step="Leave out --cpu-only, or --package and --soc",
        )
    _check_out(out)
    problems: list[BundleError] = []
    try:
        wish = fitting.wish(package, soc)
    except BundleError as problem:
        problems.append(problem)
        wish = fitting.Wish()
    found = Downloads(downloads, progress)
    wanted = CPU_PIECES if cpu_only else ALL_PIECES
    chosen = {piece: found.get(piece, wish.qairt if piece is QAIRT else None) for piece in wanted}
    gathering = Gathering()
    socs = _gather(gathering, chosen, wish)
    gathering.close([one for piece in (ORT, PLUGIN, QAIRT) if (one := chosen.get(piece))], found, on_phone)
    gathering.app(phone)
    problems += [*found.problems, *gathering.problems]
    if problems:
        raise IncompleteError(downloads, problems)
    with replacing(out) as build:
        files = _write(gathering, build, progress)
        used = sorted(gathering.used.values(), key=lambda download: download.name)
        versions = {_key(download): download.version for download in used}
        known_from = {_key(download): download.known_from for download in used}
        bundle = Bundle(out, __version__, versions, known_from, tuple(one.name for one in socs), tuple(files))
        (build / MANIFEST).write_bytes(bundle.to_json())
    return bundle


def _key(download: Download) -> str:
    return "numpy" if download.name == NUMPY.name else download.name


def _check_out(out: Path) -> None:
    """Nobody's own folder is ever replaced."""
    if not os.path.lexists(out) or is_bundle(out) or (out.is_dir() and not any(out.iterdir())):
        return
    raise UsageError(f"{out} exists and is not a bundle", next_step="Choose another name, or remove it yourself")


def _gather(gathering: Gathering, chosen: Mapping[pieces.Piece, Download | None], wish: fitting.Wish) -> list[Soc]:
    """Fills in the files, notes what does not fit, and returns the SoCs that are served."""
    ort, plugin, qairt, python, numpy = (chosen.get(piece) for piece in (ORT, PLUGIN, QAIRT, PYTHON, NUMPY))
    socs: list[Soc] = []
    if ort is not None:
        gathering.libraries(ort, [pieces.ORT_LIBRARY])
    if plugin is not None:
        gathering.libraries(plugin, [pieces.PLUGIN_LIBRARY])
    if ort is not None and plugin is not None:
        gathering.problems += fitting.check_runtime(ort, plugin)
    if qairt is not None:
        socs, lacking = fitting.serve(qairt, wish.socs)
        gathering.problems += lacking
        gathering.problems += fitting.check_qairt(qairt, wish.contexts)
        beside = [pieces.beside_skel(one.arch) for one in socs]
        gathering.libraries(qairt, pieces.qairt_libraries(socs), beside)
    if python is not None:
        gathering.python(python, *([numpy] if numpy is not None else []))
    if python is not None and numpy is not None:
        gathering.problems += fitting.check_python(python, numpy)
    return socs


def _write(gathering: Gathering, folder: Path, progress: Progress | None) -> list[BundleFile]:
    files = []
    for done, (path, planned) in enumerate(sorted(gathering.files.items()), 1):
        content = planned.read()
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(planned.mode)
        files.append(BundleFile(path, len(content), hashlib.sha256(content).hexdigest(), planned.mode))
        if progress is not None:
            progress("writing bundle", done, len(gathering.files))
    return files
