"""`estream device bundle`: the downloads become the folder that is pushed to a phone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from estream.cli.console import Console, table
from estream.cli.device.options import check_package
from estream.cli.options import add_json, folder
from estream.cli.progress import Progress
from estream.units import format_bytes

if TYPE_CHECKING:
    from android.bundle import Bundle
    from android.problems import BundleError

NAME = "bundle"
HELP = "make the phone's files from what was downloaded"
DESCRIPTION = (
    "Takes ONNX Runtime, the QNN plugin, QAIRT, Python and numpy out of a folder of .aar and .deb files, checks them\n"
    "against each other, and writes the folder that `estream device push` brings to the phone. What is missing is\n"
    "named with what to fetch. docs/phone_files.md says what each file is and where it comes from."
)
EXAMPLE = "  estream device bundle --from downloads --out phone-bundle --package olmoe.estream"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the folders and what the bundle is for."""
    parser.add_argument(
        "--from",
        dest="downloads",
        metavar="DOWNLOADS",
        type=folder,
        required=True,
        help="folder of .aar and .deb files",
    )
    parser.add_argument(
        "--out",
        metavar="BUNDLE",
        type=folder,
        required=True,
        help="folder to write; a bundle that is there is replaced",
    )
    parser.add_argument(
        "--package", metavar="PACKAGE", type=folder, help="the pieces must fit this packed model's compiled contexts"
    )
    parser.add_argument("--soc", metavar="SOC", help="for this phone only: sm8550, sm8650, sm8750, sm8850")
    parser.add_argument("--cpu-only", action="store_true", help="without QNN: the phone's CPU does all the work")
    parser.add_argument(
        "--on-phone", metavar="LIB[,LIB]", default="", help="libraries that this phone has itself, and not every other"
    )
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Builds, and prints what the bundle is made of. Returns 1 with every problem named where there are any."""
    from android.bundle import build_bundle
    from android.problems import IncompleteError

    if args.package is not None:
        check_package(args.package)
    try:
        with Progress(console) as progress:
            bundle = build_bundle(
                args.downloads,
                args.out,
                package=args.package,
                soc=args.soc,
                cpu_only=args.cpu_only,
                on_phone=[name.strip() for name in args.on_phone.split(",")],
                progress=progress,
            )
    except IncompleteError as error:
        for problem in error.problems:
            console.result(f"{problem.kind}: {problem}")
        console.result_json({"ok": False, "problems": [_problem(problem) for problem in error.problems]})
        console.error(f"error: {error.summary}")
        return error.exit_status
    nbytes = sum(file.bytes for file in bundle.files)
    console.detail(table(_rows(bundle)))
    console.result(f"{args.out}: {len(bundle.files)} files, {format_bytes(nbytes)}")
    console.result_json(
        {
            "ok": True,
            "path": bundle.path,
            "versions": bundle.versions,
            "known_from": bundle.known_from,
            "socs": bundle.socs,
            "files": len(bundle.files),
            "bytes": nbytes,
        }
    )
    return 0


def _rows(bundle: Bundle) -> list[tuple[str, str]]:
    rows = [(name, f"{version}, by {bundle.known_from[name]}") for name, version in bundle.versions.items()]
    return [*rows, ("serves", ", ".join(bundle.socs) or "the CPU only")]


def _problem(problem: BundleError) -> dict[str, Any]:
    return {
        "kind": problem.kind,
        "thing": problem.thing,
        "asked": problem.asked,
        "had": problem.had,
        "next_step": problem.next_step,
    }
