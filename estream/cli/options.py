"""Option types and options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from estream.errors import UsageError
from estream.package.layout import DENSE_SCHEMES, SCHEMES
from estream.units import parse_size


def size(text: str) -> int:
    """An argparse type: '1.5GiB' → bytes."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def whole(text: str) -> int:
    """An argparse type: a whole number of at least 0, in decimal digits."""
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


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
    parser.add_argument("out", metavar="OUT.estream", type=Path, help="folder to write: complete or absent, never half")
    parser.add_argument("--force", action="store_true", help="replace OUT.estream if it exists")


def add_soc(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """--soc, of commands that run on htp."""
    parser.add_argument("--soc", help="htp: the phone whose contexts are run (default sm8650)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def check_can_write(path: Path, option: str) -> None:
    """Refuses an output file that cannot be written, before the work and not after it.

    Raises:
        UsageError: the folder does not exist, or `path` is a folder.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{option}: no folder {path.parent}", asked=path, next_step="Create the folder first.")
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder", next_step="Name a file.")
