"""`estream device doctor`: what the phone has, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse

from estream.cli.console import Console
from estream.cli.device.options import add_device, device_from
from estream.cli.doctor import show
from estream.cli.options import add_json

NAME = "doctor"
HELP = "show what the phone has and lacks"
DESCRIPTION = (
    "Looks at the phone, the NPU's libraries, the storage, and the bundle and models on it. Exit status 1 when\n"
    "something is missing that a run needs; --backend cpu leaves out what only the NPU needs."
)
EXAMPLE = "  estream device doctor\n  estream device doctor --backend cpu --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the backend and the phone."""
    parser.add_argument("--backend", choices=("htp", "cpu"), default="htp", help="what is to run there (default htp)")
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Prints the findings as `estream doctor` does. Returns 1 if a run would fail."""
    from android.doctor import examine_phone

    device, layout = device_from(args)
    diagnosis = examine_phone(device, layout, args.backend)
    show(diagnosis.findings, console)
    works = "nothing stands in the way of" if diagnosis.ok else "something stands in the way of"
    console.result(f"{works} a run on {args.backend}")
    console.result_json(diagnosis.to_dict())
    return 0 if diagnosis.ok else 1
