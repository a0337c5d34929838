"""`estream verify`: is every byte of a package what was packed?"""

from __future__ import annotations

import argparse
from pathlib import Path

from estream.cli.console import Console
from estream.cli.options import add_json
from estream.cli.progress import Progress
from estream.units import format_bytes, format_rate, format_seconds

NAME = "verify"
HELP = "check a packed model for damage"
DESCRIPTION = "Reads a whole package against its checksums and names each damaged record. Exit status 1 when damaged."
EXAMPLE = "  estream verify olmoe.estream"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package."""
    parser.add_argument("package", metavar="PACKAGE", type=Path, help="a packed model (NAME.estream)")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Verifies, and names what is damaged. Returns 1 if anything is."""
    from estream.package.verify import verify

    with Progress(console) as progress:
        report = verify(args.package, progress=progress)
    for name in report.damaged:
        console.result(f"damaged: {name}")
    read = f"{format_bytes(report.bytes)} read in {format_seconds(report.seconds)}"
    if report.seconds > 0:
        read += f", {format_rate(report.bytes / report.seconds)}"
    verdict = "whole" if report.ok else f"{len(report.damaged)} damaged"
    console.result(f"{args.package}: {verdict} ({report.files} files, {read})")
    console.result_json(report.to_dict())
    if report.ok:
        return 0
    console.error(f"error: {args.package} is damaged. Copy it again, or pack the checkpoint again with --force.")
    return 1
