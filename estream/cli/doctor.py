"""`estream doctor`: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from estream.cli.console import Console
from estream.cli.options import add_json, folder

if TYPE_CHECKING:
    from estream.doctor.finding import Finding

NAME = "doctor"
HELP = "show what this machine has and lacks"
DESCRIPTION = (
    "Looks at software, NPU, machine and storage, and at a packed model where one is given. Native libraries and\n"
    "compiled contexts are tried in processes of their own. Exit status 1 when something is missing that target cpu\n"
    "needs; what only the NPU or packing needs is shown as missing and is no failure."
)
EXAMPLE = "  estream doctor\n  estream doctor olmoe.estream --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package."""
    parser.add_argument("package", metavar="PACKAGE", type=folder, nargs="?", help="a packed model (NAME.estream)")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Prints one line per finding, and under it the next step of what is not ok. Returns 1 if cpu lacks something."""
    from estream.doctor import examine

    diagnosis = examine(args.package)
    show(diagnosis.findings, console)
    missing = sorted({finding.needed_for for finding in diagnosis.findings if finding.status == "missing"})
    verdict = "target cpu works" if diagnosis.ok else "target cpu does not work"
    console.result(verdict + (f"; something is missing for: {', '.join(missing)}" if missing else ""))
    console.result_json(diagnosis.to_dict())
    return 0 if diagnosis.ok else 1


def show(findings: Sequence[Finding], console: Console) -> None:
    """One line per finding, by area, and under it the next step."""
    width = max(len(finding.name) for finding in findings)
    for area, members in groupby(findings, lambda finding: finding.area):
        console.result(area)
        for finding in members:
            purpose = f" [{finding.needed_for} only]" if finding.status != "ok" and finding.needed_for != "cpu" else ""
            console.result(f"  {finding.status:<7}  {finding.name:<{width}}  {finding.found}{purpose}")
            if finding.next_step:
                console.result(f"  {'':<7}  {'':<{width}}  -> {finding.next_step}")
