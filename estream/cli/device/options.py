"""Options that the commands of a phone share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from android.layout import ROOT, PhoneLayout
from estream.cli.options import folder
from estream.errors import UsageError

if TYPE_CHECKING:
    from android.adb import Device


def add_package(parser: argparse.ArgumentParser) -> None:
    """PACKAGE, of commands that run it there."""
    parser.add_argument(
        "package", metavar="PACKAGE", type=folder, help="a packed model here, of which the phone has a copy"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """--serial and --target."""
    parser.add_argument("--serial", help="serial number of the phone (default: $ANDROID_SERIAL, or the only one)")
    parser.add_argument("--target", metavar="DIR", type=phone_folder, help=f"folder on the phone (default {ROOT})")


def phone_folder(text: str) -> str:
    """An argparse type: an absolute folder on the phone."""
    from android.target import check_root

    try:
        return check_root(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def device_from(args: argparse.Namespace) -> tuple[Device, PhoneLayout]:
    """The phone that is meant, and where things lie on it. Raises DeviceError."""
    from android.adb import choose_device

    return choose_device(args.serial), PhoneLayout(args.target or ROOT)


def check_package(path: Path) -> None:
    """Raises UsageError where `path` cannot be meant for a packed model. What is wrong with one, its reader tells."""
    if (path / "model.json").is_file():
        return
    had = "no model.json in it" if path.is_dir() else "a file" if path.exists() else "no such folder"
    raise UsageError(f"{path} is not a packed model", had=had, next_step="Give the folder that estream pack wrote")
