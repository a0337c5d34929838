"""Options of strategy npumoe, of the commands that run it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from estream.cli.options import file, positive
from estream.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--calibration and what goes with it."""
    group = parser.add_argument_group("strategy npumoe")
    group.add_argument("--calibration", metavar="F.json", type=file, help="what `estream calibrate-experts` wrote")
    group.add_argument("--tiers", metavar="N", type=positive, help="sizes of static graphs (default 4)")
    capacity = group.add_mutually_exclusive_group()
    capacity.add_argument(
        "--capacity-quantile",
        metavar="Q",
        type=share,
        help="an expert's capacity holds its load in this share of the calibration's windows (default 0.9)",
    )
    capacity.add_argument(
        "--capacity", choices=("unlimited",), help="compute what exceeds a capacity in further calls: drop nothing"
    )
    group.add_argument("--group-experts", metavar="N", type=positive, help="cpu: experts in one call (default 4)")
    group.add_argument(
        "--cold-below",
        metavar="SHARE",
        type=share,
        help="experts chosen for less than this share of the tokens run on the processor (default 0: none)",
    )


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def chosen(args: argparse.Namespace, strategies: Sequence[str]) -> dict[str, Any] | None:
    """`npumoe` of Engine; None where it is not among `strategies`. Raises UsageError: it without --calibration, or an
    option of it without it."""
    options = {
        "calibration": None if args.calibration is None else str(args.calibration),
        "tiers": args.tiers,
        "capacity_quantile": args.capacity_quantile,
        "unlimited": args.capacity == "unlimited" or None,
        "group_experts": args.group_experts,
        "cold_below": args.cold_below,
    }
    if "npumoe" in strategies:
        if args.calibration is None:
            next_step = "estream calibrate-experts PACKAGE --text F"
            raise UsageError("--strategy npumoe needs --calibration", next_step=next_step)
        return options
    given = [name for name, value in options.items() if value is not None]
    if given:
        name = "capacity" if given[0] == "unlimited" else given[0].replace("_", "-")
        raise UsageError(
            f"--{name} is of --strategy npumoe",
            asked=f"--strategy {','.join(strategies)}",
            next_step="Leave it out, or choose that strategy",
        )
    return None
