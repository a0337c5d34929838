"""`estream device push`: a bundle and packed models onto the phone."""

from __future__ import annotations

import argparse
from pathlib import Path

from estream.cli.console import Console
from estream.cli.device.options import add_device, check_package, device_from
from estream.cli.options import add_json, folder
from estream.cli.progress import Progress
from estream.errors import UsageError
from estream.units import format_bytes, format_rate, format_seconds

NAME = "push"
HELP = "put a bundle or a packed model on the phone"
DESCRIPTION = (
    "Sends what is not there yet. Every file is verified on the phone by its SHA-256 before it has its name, and is\n"
    "not sent or hashed again while its size and time stay the same. An interrupted push goes on where it ended.\n"
    "Of compiled contexts only those for this phone are sent."
)
EXAMPLE = (
    "  estream device push --bundle bundle/\n  estream device push olmoe.estream\n"
    "  estream device push --bundle bundle/ olmoe.estream --serial 1a2b3c4d"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what to push, and the phone."""
    parser.add_argument("package", metavar="PACKAGE", type=folder, nargs="*", help="packed models (NAME.estream)")
    parser.add_argument("--bundle", metavar="BUNDLE", type=folder, help="a folder that estream device bundle made")
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Pushes the bundle first."""
    if not args.package and args.bundle is None:
        raise UsageError("nothing to push", next_step="Name a packed model, or a bundle with --bundle")
    from android.contents import bundle_contents, package_contents
    from android.layout import ROOT, PhoneLayout
    from android.properties import find_phone_soc, read_properties
    from android.push import push

    # What is wrong here is said before a phone is looked for.
    layout = PhoneLayout(args.target or ROOT)
    for package in args.package:
        check_package(package)
    everything = [package_contents(package, layout, None) for package in args.package]
    places: dict[str, Path] = {}
    for contents, package in zip(everything, args.package, strict=True):
        other = places.setdefault(contents.label, package)
        if other is not package:
            if other.resolve() == package.resolve():
                raise UsageError(f"{package} is named twice", next_step="Name it once")
            raise UsageError("two packages have the same name", had=f"{other}, {package}", next_step="Rename one")
    bundle = None if args.bundle is None else bundle_contents(args.bundle, layout)
    device, _ = device_from(args)
    soc = find_phone_soc(read_properties(device)) if args.package else None
    wanted = [] if bundle is None else [bundle]
    wanted += [package_contents(package, layout, soc.name if soc else None) for package in args.package]
    reports = []
    for contents in wanted:
        with Progress(console) as progress:
            report = push(device, layout.root, contents, progress)
        reports.append(report)
        if report.files_sent:
            said = f"{format_bytes(report.bytes_sent)} sent in {format_seconds(report.seconds)}"
            if report.seconds > 0:
                said += f", {format_rate(report.bytes_sent / report.seconds)}"
        else:
            said = "nothing sent"
        kept = report.bytes_skipped + report.bytes_resumed
        console.result(f"{report.label}: {said}; {format_bytes(kept)} were there ({report.folder} on {device.serial})")
        if report.removed:
            console.detail(f"  removed: {report.removed} files of an earlier push")
        if report.left_out:
            console.detail(f"  left out: {', '.join(report.left_out)}")
    console.result_json({"serial": device.serial, "pushed": [report.to_dict() for report in reports]})
    return 0
