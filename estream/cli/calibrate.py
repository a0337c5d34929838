"""`estream calibrate`: what this machine can do, for `plan` and for automatic configurations."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from estream.cli.console import Console
from estream.cli.options import add_json, check_outputs
from estream.cli.progress import Progress
from estream.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from estream.solver.profile import DeviceProfile

NAME = "calibrate"
HELP = "measure what this machine's flash and processor can do"
DESCRIPTION = (
    "Measures direct reads by size and number of threads, compute times of a package's shape, and what reading and\n"
    "computing cost each other. Takes less than a minute; nothing else should run. The profile is kept in the user's\n"
    "cache, where `plan` and `prefill` find it. Without a package, a small random one is made and removed again."
)
EXAMPLE = "  estream calibrate olmoe.estream\n  estream calibrate --path /mnt/fast --out fast.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package and where to read and write."""
    parser.add_argument("package", metavar="PACKAGE", type=Path, nargs="?", help="a packed model (NAME.estream)")
    parser.add_argument("--backend", choices=("cpu", "htp"), default="cpu", help="the target to measure (default cpu)")
    parser.add_argument("--threads", metavar="N", type=int, help="compute threads (default: all cores)")
    parser.add_argument(
        "--path", metavar="DIR", type=Path, help="without PACKAGE: the folder whose flash is read (default: the cache)"
    )
    parser.add_argument("--out", metavar="F", type=Path, help="write the profile here instead of the cache")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures, writes the profile, prints it."""
    import tempfile

    from estream.cache import cache_folder
    from estream.calibrate import calibrate
    from estream.errors import UsageError
    from estream.package.synth import synthesize_small
    from estream.solver.profile import keep_profile

    if args.package is not None and args.path is not None:
        raise UsageError("--path goes without PACKAGE", asked=f"{args.package} and {args.path}", next_step="Give one")
    if args.path is not None and not args.path.is_dir():
        raise UsageError(f"--path: no folder {args.path}", next_step="Create the folder first")
    check_outputs({"--out": args.out}, args.package or Path("-"))
    started = time.monotonic()
    with Progress(console) as progress:
        if args.package is not None:
            profile = calibrate(args.package, args.backend, threads=args.threads, progress=progress)
        else:
            folder = args.path or cache_folder()
            if args.path is None:
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="estream-calibrate-", dir=folder) as made:
                package = Path(made, "small.estream")
                synthesize_small(package)
                profile = calibrate(package, args.backend, threads=args.threads, progress=progress)
    out = args.out
    if out is None:
        profile, out = keep_profile(profile, cache_folder())
    else:
        profile.write(out)
    console.detail(report(profile))
    console.result(f"{out}: measured in {format_seconds(time.monotonic() - started)}")
    console.result_json({"profile": str(out), "seconds": time.monotonic() - started, **profile.to_dict()})
    return 0


def report(profile: DeviceProfile) -> str:
    """The figures, for people."""
    lanes = sorted({rate.lanes for rate in profile.rates})
    lines = [f"{'direct reads of':<20}" + "".join(f"{f'{count} at a time':>16}" for count in lanes)]
    for nbytes in sorted({rate.nbytes for rate in profile.rates}):
        rates = {rate.lanes: rate.bytes_per_s for rate in profile.rates if rate.nbytes == nbytes}
        lines.append(f"{format_bytes(nbytes):<20}" + "".join(f"{format_rate(rates[count]):>16}" for count in lanes))
    lines.append(f"reads at a time: {profile.lanes}, the fewest that reach 95 % of the best rate")
    lines.append(
        f"beside each other: computing takes {profile.compute_slowdown:.2f} times as long, reading "
        f"{profile.flash_slowdown:.2f} times"
    )
    for key, shape in profile.shapes.items():
        lines.append(f"shape {key}")
        panel = ", ".join(f"{rows:g}: {format_seconds(seconds)}" for rows, seconds in shape.panel)
        dense = ", ".join(f"{tokens:g}: {format_seconds(seconds)}" for tokens, seconds in shape.dense)
        lines.append(f"  a panel by rows       {panel}")
        lines.append(f"  dense layer by tokens {dense}")
        head, group = format_seconds(shape.head_slice_s), format_seconds(shape.group_s)
        lines.append(f"  head {head} a slice; a group costs {group}")
    return "\n".join(lines)
