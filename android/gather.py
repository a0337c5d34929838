"""The files of a bundle, and the shared libraries that these need: no list says which, the files themselves do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from android import pieces
from android.archives import Read
from android.downloads import Download, Downloads
from android.elf import AARCH64, HEXAGON, read_elf
from android.problems import DAMAGED, MISSING, BundleError
from android.runtime_part import ROOT, runtime_files

PROGRAM = "estream_phone.py"  # what is started on the phone
PHONE = Path(__file__).parent / "phone"
_INTERPRETER = "python/bin/python3"


@dataclass(frozen=True)
class Planned:
    """A file of the bundle before it is written. mode: permission bits."""

    read: Read
    mode: int = 0o644


class Gathering:
    """`files`: what the bundle will hold, by path. `problems`: what was found on the way."""

    def __init__(self) -> None:
        self.files: dict[str, Planned] = {}
        self.problems: list[BundleError] = []
        self.used: dict[str, Download] = {}  # by name
        self._needed: list[tuple[str, str, Download]] = []  # library, path of the file that needs it, its download
        self._libraries: set[str] = set()  # names that the phone's linker will find

    def python(self, python: Download, *others: Download) -> None:
        """The interpreter, the standard library that a run needs, and packages for it."""
        for download in (python, *others):
            for path in sorted({*download.contents.files, *download.contents.links}):
                read = self._find(download, path) if re.match(r"bin/|lib/python3\.\d+/", path) else None
                if read is not None:
                    self._add(f"python/{path}", read, download, 0o755 if path.startswith("bin/") else 0o644)
        if _INTERPRETER not in self.files:
            self._lacks(python, "bin/python3")

    def libraries(self, download: Download, names: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Libraries of an .aar, into lib/. optional: taken where they are there."""
        wanted = list(names)
        for name in [*wanted, *optional]:
            read = download.contents.files.get(f"{pieces.JNI}/{name}")
            if read is not None:
                self._add(f"lib/{name}", read, download)
            elif name in wanted:
                self._lacks(download, f"{pieces.JNI}/{name}")

    def app(self, phone: Path | None = None) -> None:
        """The run-time part of EStream, and the program that is started on the phone."""
        folder = PHONE if phone is None else phone
        sources = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        if not (folder / PROGRAM).is_file():
            step = "Install EStream again"
            self.problems.append(BundleError(f"EStream's own {folder / PROGRAM}", kind=MISSING, next_step=step))
        for path in runtime_files().values():
            self.files[f"app/{path.relative_to(ROOT).as_posix()}"] = Planned(path.read_bytes)
        for path in sources:
            self.files[f"app/{path.name}"] = Planned(path.read_bytes)

    def close(self, archives: Sequence[Download], found: Downloads, on_phone: Collection[str] = ()) -> None:
        """Adds what is needed and not there yet, until nothing is.

        archives: the .aar files. on_phone: libraries that the phone has beside those that every phone has.
        """
        given = pieces.ANDROID_LIBRARIES.union(on_phone)
        packages = found.packages()
        missing: dict[str, tuple[str, Download]] = {}
        for name, needer, download in self._needed:  # grows meanwhile
            if name in self._libraries or name in given or name in missing:
                continue
            for_npu = pieces.is_for_npu(needer.rpartition("/")[2])  # what it needs beside this is on the phone
            if not self._add_library(name, needer, archives, {} if for_npu else packages) and not for_npu:
                missing[name] = needer, download
        for name, (needer, download) in missing.items():
            package = pieces.package_of(name, download.depends)
            if package is None or not found.has_refused(package):
                step = _where(name, package, download, packages)
                self.problems.append(BundleError(f"{name}, needed by {needer}", kind=MISSING, next_step=step))

    def _add_library(
        self, name: str, needer: str, archives: Sequence[Download], packages: Mapping[str, Download]
    ) -> bool:
        if needer.startswith("lib/"):
            for archive in archives:
                read = archive.contents.files.get(f"{pieces.JNI}/{name}")
                if read is not None:
                    self._add(f"lib/{name}", read, archive)
                    return True
        for package in packages.values():
            read = self._find(package, f"lib/{name}")
            if read is not None:
                self._add(f"python/lib/{name}", read, package)
                return True
        return False

    def _find(self, download: Download, path: str) -> Read | None:
        try:
            return download.contents.find(path)
        except BundleError as problem:
            self.problems.append(problem)
            return None

    def _lacks(self, download: Download, path: str) -> None:
        self.problems.append(BundleError(f"{path}, which should be in {download.file}", kind=MISSING, next_step=_AGAIN))

    def _add(self, path: str, read: Read, download: Download, mode: int = 0o644) -> None:
        name = path.rpartition("/")[2]
        self.files[path] = Planned(read, mode)
        self.used[download.name] = download
        if not path.startswith("python/bin/") and not re.search(r"\.so(\.[\w.]+)?$", name):
            return
        if re.match(r"lib/|python/lib/lib|.*\.libs/", path):
            self._libraries.add(name)
        try:
            content = read()
            if path.startswith("python/bin/") and content.startswith(b"#!"):
                return
            elf = read_elf(content)
        except ValueError as problem:
            self.problems.append(
                BundleError(f"{download.file}: {path} is damaged: {problem}", kind=DAMAGED, next_step=_AGAIN)
            )
            return
        except BundleError as problem:
            self.problems.append(problem)
            return
        asked = HEXAGON if pieces.is_for_npu(name) else AARCH64
        if elf.machine != asked:
            self.problems.append(
                BundleError(
                    f"{download.file}: {path} is for another processor",
                    asked="Hexagon" if asked == HEXAGON else "aarch64",
                    had=elf.processor,
                    next_step=_AGAIN,
                )
            )
        self._needed.extend((needed, path, download) for needed in elf.needed)


_AGAIN = "Fetch it again"


def _where(library: str, package: str | None, download: Download, packages: Mapping[str, Download]) -> str:
    """What to fetch for a library that a download needs, as far as its control file tells."""
    if package is not None and package not in packages:
        return pieces.fetch_package(package)
    lacking = [name for name in download.depends if name not in packages]
    if lacking:
        return f"Fetch the one of Termux's packages that holds it: {download.file} depends on {', '.join(lacking)}"
    return f"No package is known to hold it. If the phone has it itself, pass --on-phone {library}"
