"""What a bundle is for, and whether the pieces fit it and each other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from android import pieces
from android.downloads import Download
from android.pieces import ORT, QAIRT
from android.problems import MISSING, BundleError
from android.versions import at_least, numbers, same_build
from estream.errors import UsageError
from estream.package.atomic import is_package
from estream.package.contexts import ContextManifest, context_folders
from estream.runtime.soc import SOCS, Soc, find_soc


@dataclass(frozen=True)
class Wish:
    """socs: that must be served; none: all that QAIRT's download serves. contexts: of the package, of these SoCs."""

    socs: tuple[Soc, ...] = ()
    contexts: tuple[ContextManifest, ...] = ()

    @property
    def qairt(self) -> str | None:
        """The only version that fits, as a release is named: three numbers."""
        return ".".join(self.contexts[0].qairt.split(".")[:3]) if self.contexts else None


def wish(package: Path | None, soc: str | None) -> Wish:
    """What a package and a SoC ask for. Raises UsageError, PackageError, and BundleError for missing contexts."""
    socs = (find_soc(soc),) if soc is not None else ()
    if package is None:
        return Wish(socs)
    if not is_package(package):
        raise UsageError(f"{package} is not a packed model", next_step="Name a folder that estream pack wrote")
    folders = {folder.name: folder for folder in context_folders(package)}
    names = [one.name for one in socs] or sorted(folders)
    lacking = [name for name in names if name not in folders]
    if lacking or not names:
        raise BundleError(
            f"{package} has no contexts" + (f" for {lacking[0]}" if lacking else ""),
            kind=MISSING,
            had=", ".join(sorted(folders)) or None,
            next_step=f"Compile them first: estream compile {package} --soc {lacking[0] if lacking else 'SOC'}",
        )
    return Wish(tuple(map(find_soc, names)), tuple(ContextManifest.read(folders[name]) for name in names))


def check_runtime(ort: Download, plugin: Download) -> Iterable[BundleError]:
    """ONNX Runtime must be as new as the plugin wants it; one that is too old for EStream was told of already."""
    for version, least in pieces.PLUGIN_NEEDS:
        if at_least(plugin.version, version):
            if at_least(ort.version, ORT.least) and not at_least(ort.version, least):
                yield BundleError(
                    f"{ort.file} is too old for {plugin.file}",
                    asked=f"{ORT.what} {least} or newer",
                    had=f"{ort.version}, by {ort.known_from}",
                    next_step=ORT.fetch(least=least),
                )
            return


def check_python(python: Download, numpy: Download) -> Iterable[BundleError]:
    """numpy's extension modules are built for one minor version of Python."""
    asked, had = python_minor(python), python_minor(numpy)
    for download, minor in ((python, asked), (numpy, had)):
        if minor is None:
            yield BundleError(f"{download.file} holds no files below lib/python3", kind=MISSING, next_step=_AGAIN)
    if asked is not None and had is not None and asked != had:
        yield BundleError(
            f"{numpy.file} is built for another Python than {python.file}",
            asked=f"Python {asked}",
            had=f"Python {had}",
            next_step="Fetch the two packages of Termux anew, on the same day",
        )


def check_qairt(qairt: Download, contexts: Iterable[ContextManifest]) -> Iterable[BundleError]:
    """Contexts run on the QAIRT that compiled them, and on no other."""
    for manifest in contexts:
        if not same_build(manifest.qairt, qairt.version):
            release = ".".join(map(str, numbers(manifest.qairt)[:3]))
            yield BundleError(
                f"{qairt.file} is not the QAIRT that compiled the package's contexts for {manifest.soc}",
                asked=manifest.qairt,
                had=f"{qairt.version}, by {qairt.known_from}",
                next_step=f"{QAIRT.fetch(release)}, or compile again with a host package that has this QAIRT",
            )


def serve(qairt: Download, socs: tuple[Soc, ...]) -> tuple[list[Soc], list[BundleError]]:
    """The SoCs that a download of QAIRT serves (of those asked for, if any are), and what it lacks for the others."""
    there, problems = [], []
    for soc in socs or SOCS.values():
        names = (pieces.stub(soc.arch), pieces.skel(soc.arch))
        lacking = [name for name in names if f"{pieces.JNI}/{name}" not in qairt.contents.files]
        if not lacking:
            there.append(soc)
        elif socs:
            problems.append(
                BundleError(
                    f"{qairt.file} lacks {' and '.join(lacking)} for {soc.name}", kind=MISSING, next_step=QAIRT.fetch()
                )
            )
    if not there and not problems:
        asked = ", ".join(SOCS)
        problems.append(BundleError(f"{qairt.file} serves no known SoC", asked=asked, next_step=QAIRT.fetch()))
    return there, problems


def python_minor(download: Download) -> str | None:
    """'3.13', by the folder that the files are in."""
    for path in sorted(download.contents.files):
        match = re.match(r"lib/python(3\.\d+)/", path)
        if match is not None:
            return match[1]
    return None


_AGAIN = "Fetch it again"
