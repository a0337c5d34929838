"""`estream verify`: is every byte of a package what was packed?"""

from __future__ import annotations

import argparse

from estream.cli.console import Console
from estream.cli.options import add_json, folder
from estream.cli.progress import Progress
from estream.units import format_bytes, format_rate, format_seconds

NAME = "verify"
HELP = "check a packed model for damage"
DESCRIPTION = "Reads a whole package against its checksums and names each damaged record. Exit status 1 when damaged."
EXAMPLE = "  estream verify olmoe.estream"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package."""
    parser.add_argument("package", metavar="PACKAGE", type=folder, help="a packed model (NAME.estream)")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Verifies, and names what is damaged or cannot be read. Returns 1 if anything is."""
    from estream.package.verify import verify

    with Progress(console) as progress:
        report = verify(args.package, progress=progress)
    for name in report.damaged:
        console.result(f"damaged: {name}")
    for name in report.unreadable:
        console.result(f"cannot be read: {name}")
    read = f"{format_bytes(report.bytes)} read in {format_seconds(report.seconds)}"
    if report.seconds > 0:
        read += f", {format_rate(report.bytes / report.seconds)}"
    verdicts = ((len(report.damaged), "damaged"), (len(report.unreadable), "cannot be read"))
    verdict = ", ".join(f"{count} {what}" for count, what in verdicts if count) or "whole"
    console.result(f"{args.package}: {verdict} ({report.files} files, {read})")
    console.result_json(report.to_dict())
    if report.ok:
        return 0
    if report.damaged:
        console.error(f"error: {args.package} is damaged. Copy it again, or pack the checkpoint again with --force.")
    else:
        console.error(f"error: {args.package} cannot be read. Check the permissions of its files.")
    return 1
