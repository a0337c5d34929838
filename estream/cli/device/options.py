"""Options of all commands that speak to a phone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from android.layout import ROOT, PhoneLayout

if TYPE_CHECKING:
    from android.adb import Device


def add_device(parser: argparse.ArgumentParser) -> None:
    """--serial and --target."""
    group = parser.add_argument_group("phone")
    group.add_argument("--serial", metavar="S", help="the phone, as adb devices names it (default: the only one)")
    group.add_argument("--target", metavar="DIR", default=ROOT, help=f"EStream's folder there (default {ROOT})")


def device_from(args: argparse.Namespace) -> tuple[Device, PhoneLayout]:
    """The phone and where things lie on it. Raises DeviceError: none, several, or one that does not answer."""
    from android.adb import choose_device

    return choose_device(args.serial), PhoneLayout(args.target)
