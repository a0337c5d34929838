"""`estream device calibrate`: what the phone can do, for `plan --profile` and for the phone's own configurations."""

from __future__ import annotations

import argparse
import shlex
import time

from estream.cli.calibrate import report
from estream.cli.console import Console
from estream.cli.device.engine import BACKEND, phone_options
from estream.cli.device.options import add_device, add_package, check_package, device_from
from estream.cli.options import add_json, add_soc, check_outputs, file, positive
from estream.cli.progress import Progress
from estream.units import format_seconds

NAME = "calibrate"
HELP = "measure what the phone's flash, NPU or CPU can do"
DESCRIPTION = (
    "Measures on the phone what `estream calibrate` measures here, with the phone's copy of a packed model. Takes a\n"
    "minute. The profile is kept on the phone, for its automatic configurations, and here, for `plan --profile`."
)
EXAMPLE = "  estream device calibrate olmoe.estream --backend cpu --out phone-cpu.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, the phone, the target and the output."""
    add_package(parser)
    add_device(parser)
    parser.add_argument(
        "--backend", choices=("cpu", "htp"), default=BACKEND, help=f"the target to measure (default {BACKEND})"
    )
    add_soc(parser)
    parser.add_argument("--threads", metavar="N", type=positive, help="compute threads (default: all cores)")
    parser.add_argument("--out", metavar="F", type=file, help="write the profile here instead of the cache")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures, writes the profile, prints it."""
    from android.calibrate import calibrate, profile_path
    from android.session import Listener
    from estream.cache import cache_folder
    from estream.package.reader import Package

    check_package(args.package)
    check_outputs({"--out": args.out}, args.package)
    Package.open(args.package)
    device, layout = device_from(args)
    options = phone_options({"backend": args.backend, "soc": args.soc, "threads": args.threads}, device)
    started = time.monotonic()
    with Progress(console) as progress:
        profile, ran_on = calibrate(device, layout, args.package, options, Listener(progress))
    out = args.out or profile_path(device.serial, args.backend, cache_folder())
    profile.write(out)
    seconds = time.monotonic() - started
    console.detail(report(profile))
    words = ["estream", "plan", str(args.package), "--tokens", "512", "--profile", str(out)]
    console.result(f"{out}: measured on {device.serial} in {format_seconds(seconds)}")
    console.detail(f"Use it: {shlex.join(words)}")
    console.result_json({"profile": str(out), "seconds": seconds, "device": ran_on, **profile.to_dict()})
    return 0
