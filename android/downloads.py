"""Finds a bundle's pieces in a folder of downloads, by what is in the files and not by what they are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from android import pieces
from android.archives import Contents, read_aar, read_control, read_data
from android.pieces import NUMPY, ORT, PLUGIN, PYTHON, QAIRT, Piece
from android.problems import DAMAGED, MISSING, BundleError
from android.versions import at_least
from estream.errors import UsageError

Progress = Callable[[str, int, int], None]  # stage, done, total; in bytes


@dataclass(frozen=True)
class Download:
    """One archive, or what one piece takes of it.

    name: of a piece, or of a package of Termux. version: empty where nothing tells it. known_from: what told it.
    depends: names of the packages that a package needs.
    """

    name: str
    version: str
    known_from: str
    contents: Contents
    depends: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.contents.source.name


class Downloads:
    """What a folder holds, folders below it included. `problems`: what was found on the way.

    Raises UsageError where there is no folder.
    """

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is not a folder", next_step="Name the folder that holds the .aar and .deb files"
            )
        self.folder = folder
        self.problems: list[BundleError] = []
        self._refused: list[str] = []  # names of files
        found: dict[str, list[Download]] = {}
        named = sorted(path for path in folder.rglob("*") if path.suffix in (".aar", ".deb"))
        paths = [path for path in named if path.is_file()]
        for path in named:
            if not path.is_file():
                had = "a folder" if path.is_dir() else "a link that leads nowhere" if path.is_symlink() else None
                step = "Take it out of the folder, or fetch the file"
                self.problems.append(BundleError(f"{path.name} is no file", kind=DAMAGED, had=had, next_step=step))
                self._refused.append(path.name)
        sizes = [path.stat().st_size for path in paths]
        for index, path in enumerate(paths):
            try:
                for download in _aar(path) if path.suffix == ".aar" else _deb(path):
                    found.setdefault(download.name, []).append(download)
            except BundleError as problem:
                self.problems.append(problem)
                self._refused.append(path.name)
            if progress is not None:
                progress("reading downloads", sum(sizes[: index + 1]), sum(sizes))
        self._found = {name: same[0] for name, same in found.items()}
        for name, same in sorted(found.items()):
            if len(same) > 1:
                had = ", ".join(f"{download.file} ({download.version})" for download in same)
                self.problems.append(
                    BundleError(f"{name} is there {len(same)} times", had=had, next_step="Keep one of them")
                )

    def get(self, piece: Piece, version: str | None = None) -> Download | None:
        """The download of this piece. Where it is missing (None) or too old, a problem is noted.

        version: the only one that fits, where that is known; whether it does is the caller's to check.
        """
        download = self._found.get(piece.name)
        if download is None:
            if not self.has_refused(piece.artifact):
                self.problems.append(BundleError(piece.what, kind=MISSING, next_step=piece.fetch(version)))
        elif not download.version:
            step = f"Give it the name that it was published under, {piece.artifact}-VERSION.aar"
            self.problems.append(BundleError(f"the version of {download.file} cannot be told", next_step=step))
        elif not at_least(download.version, piece.least):
            self.problems.append(
                BundleError(
                    f"{download.file} is too old",
                    asked=f"{piece.what} {piece.least} or newer",
                    had=f"{download.version}, by {download.known_from}",
                    next_step=piece.fetch(version),
                )
            )
        return download

    def has_refused(self, artifact: str) -> bool:
        """Whether a file with the name of this download was refused: then it is not missing."""
        return any(re.match(rf"{re.escape(artifact)}[-_]\d", name) for name in self._refused)

    def packages(self) -> dict[str, Download]:
        """The packages of Termux, by name, in the order of their names."""
        return {name: one for name, one in sorted(self._found.items()) if one.file.endswith(".deb")}


def _aar(path: Path) -> Iterator[Download]:
    contents = read_aar(path)
    names = {name.removeprefix(f"{pieces.JNI}/") for name in contents.files if name.startswith(f"{pieces.JNI}/")}
    match = re.fullmatch(r"(.+?)-(\d+\.\d+[\w.-]*)\.aar", path.name)
    in_name = match[2] if match else None
    if pieces.PLUGIN_LIBRARY in names:
        yield _versioned(PLUGIN, contents, in_name)
    elif pieces.BACKEND_LIBRARY in names:
        yield _versioned(QAIRT, contents, in_name, pieces.BACKEND_LIBRARY, pieces.QAIRT_BUILD)
    elif pieces.ORT_LIBRARY in names:
        if match and match[1] == PLUGIN.artifact:
            raise BundleError(
                f"{path.name} is Microsoft's ONNX Runtime with QNN built in, not Qualcomm's plugin of the same name",
                asked=pieces.PLUGIN_LIBRARY,
                had=pieces.ORT_LIBRARY,
                next_step=PLUGIN.fetch(),
            )
        yield _versioned(ORT, contents, in_name, pieces.ORT_LIBRARY, pieces.ORT_VERSION)
    else:
        raise BundleError(
            f"{path.name} is no piece of a bundle",
            asked=f"{pieces.ORT_LIBRARY}, {pieces.PLUGIN_LIBRARY} or {pieces.BACKEND_LIBRARY} in {pieces.JNI}",
            had=", ".join(sorted(names)[:8]) or f"no {pieces.JNI}",
            next_step="Take it out of the folder",
        )


def _versioned(
    piece: Piece,
    contents: Contents,
    in_name: str | None,
    library: str | None = None,
    pattern: re.Pattern[bytes] | None = None,
) -> Download:
    """The version that the library tells, where it tells one; else the one in the file's name."""
    if library is not None and pattern is not None:
        told = set(pattern.findall(contents.files[f"{pieces.JNI}/{library}"]()))
        if len(told) == 1:
            return Download(piece.name, told.pop().decode(), library, contents)
    return Download(piece.name, in_name or "", "its file name", contents)


def _deb(path: Path) -> Iterator[Download]:
    control = read_control(path)
    name = control["package"]
    if control["architecture"] not in (pieces.MACHINE, "all"):
        raise BundleError(
            f"{path.name} is for another processor",
            asked=pieces.MACHINE,
            had=control["architecture"],
            next_step=pieces.fetch_package(name),
        )
    wanted = {PYTHON.name: pieces.of_python, NUMPY.name: pieces.of_numpy}.get(name, pieces.is_library)
    depends = tuple(re.findall(r"(?:^|[,|])\s*([^\s,|(]+)", control.get("depends", "")))
    yield Download(name, control["version"], "its control file", read_data(path, wanted), depends)
