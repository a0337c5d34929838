"""Option types and options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from estream.errors import UsageError
from estream.package.layout import DENSE_SCHEMES, SCHEMES
from estream.units import parse_size
from estream.whole_file import output_target


class OutputError(UsageError):
    """An output that cannot, or must not, be written."""


def size(text: str) -> int:
    """An argparse type: '1.5GiB' → bytes."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return whole(text, 1)


def whole(text: str, least: int = 0) -> int:
    """An argparse type: a whole number of at least `least`, in decimal digits."""
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
    return int(text)


def file(text: str) -> Path:
    """An argparse type: the name of a file, which the shell completes."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def folder(text: str) -> Path:
    """An argparse type: the name of a folder, which the shell completes."""
    return file(text)


def add_schemes(parser: argparse.ArgumentParser, *, experts: str) -> None:
    """--experts and --dense; `experts` is the default scheme of experts."""
    parser.add_argument(
        "--experts", choices=SCHEMES, default=experts, help=f"weight scheme of the experts (default {experts})"
    )
    parser.add_argument(
        "--dense",
        choices=DENSE_SCHEMES,
        help="weight scheme of attention and head (default: as the experts; int8 beside int4)",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """OUT.estream and --force."""
    parser.add_argument(
        "out", metavar="OUT.estream", type=folder, help="folder to write: complete or absent, never half"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT.estream if it exists")


def add_soc(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """--soc, of commands that run on htp."""
    parser.add_argument("--soc", help="htp: the phone whose contexts are run (default sm8650)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def check_outputs(outputs: Mapping[str, Path | None], package: Path) -> None:
    """Refuses output files that cannot or must not be written, before the work and not after it.

    outputs: option to path, None where the option was not given.

    Raises:
        OutputError: no such folder, not a regular file, inside the package, or the file of another option.
    """
    targets: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        try:
            target = output_target(path)
        except UsageError as error:
            raise OutputError(f"{option}: {error.thing}", next_step=error.next_step) from None
        if not target.parent.is_dir():
            raise OutputError(f"{option}: no folder {path.parent}", asked=path, next_step="Create the folder first")
        if target.is_relative_to(os.path.realpath(package)):
            raise OutputError(f"{option}: {path} is inside the package {package}", next_step="Name a file elsewhere")
        if target in targets:
            raise OutputError(f"{targets[target]} and {option} name the same file", asked=path, next_step="Name two")
        targets[target] = option
