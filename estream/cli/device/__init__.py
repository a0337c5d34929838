"""`estream device …`: EStream on a phone that hangs on a cable."""

from __future__ import annotations

from types import ModuleType

from estream.cli.device import bench, bundle, calibrate, clean, doctor, push, run

NAME = "device"
HELP = "run on a phone, through adb"
DESCRIPTION = "Puts EStream and packed models on a phone, runs prefills there and brings the results back."
EXAMPLE = "  estream device doctor"
COMMANDS: tuple[ModuleType, ...] = (doctor, bundle, push, run, calibrate, bench, clean)
