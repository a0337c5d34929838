"""`estream device bench`: how long prefills of several lengths take on the phone, again and again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from estream.cli import report
from estream.cli.configuration import add_paging, add_target, engine_options
from estream.cli.console import Console
from estream.cli.device.engine import BACKEND, phone_options
from estream.cli.device.options import add_device, add_package, check_package, device_from
from estream.cli.options import add_json, positive
from estream.cli.progress import Progress
from estream.units import format_seconds

if TYPE_CHECKING:
    from android.bench import Cell

NAME = "bench"
HELP = "time prefills of several lengths on the phone"
DESCRIPTION = (
    "Opens the phone's copy of a packed model once and prefills random prompts, one of each length per round. Prints\n"
    "medians, the shortest and the longest, and how warm the phone was where it tells. A first prefill is not counted."
)
EXAMPLE = "  estream device bench olmoe.estream --tokens 128,512 --rounds 5 --json"


def lengths(text: str) -> list[int]:
    """An argparse type: '128,512' → [128, 512]."""
    return [positive(word.strip()) for word in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, what is measured, the phone and the configuration."""
    add_package(parser)
    parser.add_argument(
        "--tokens", metavar="N,N", type=lengths, default=[128, 512], help="lengths of prompts (default 128,512)"
    )
    parser.add_argument("--rounds", metavar="N", type=positive, default=5, help="prefills of each length (default 5)")
    add_device(parser)
    add_target(parser, default=BACKEND)
    add_paging(parser, phone=True)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures and prints a table."""
    from android.bench import bench
    from android.session import Listener
    from estream.package.reader import Package
    from estream.prompt import longest_prompt

    check_package(args.package)
    package = Package.open(args.package)
    longest_prompt(max(args.tokens), package.architecture.context, "--tokens")
    device, layout = device_from(args)
    options = phone_options(engine_options(args), device)
    with Progress(console) as progress:

        def opened(configuration: dict[str, Any]) -> None:
            progress.close()
            console.detail(report.plan(package, max(args.tokens), configuration))

        told = Listener(progress, opened)
        cells, configuration, ran_on = bench(device, layout, args.package, args.tokens, args.rounds, options, told)
    console.result(table(cells))
    console.detail(f"medians of {args.rounds} rounds on {device.serial}")
    console.result_json({"cells": [cell.to_dict() for cell in cells], "configuration": configuration, "device": ran_on})
    return 0


def table(cells: list[Cell]) -> str:
    """One line per length."""
    lines = [f"{'tokens':>7} {'median':>9} {'shortest':>9} {'longest':>9} {'tokens/s':>9} {'bubble':>7}  temperature"]
    for cell in cells:
        times = " ".join(f"{format_seconds(seconds):>9}" for seconds in (cell.ttft_s, cell.least_s, cell.most_s))
        bubble = "-" if cell.bubble_rate is None else f"{100 * cell.bubble_rate:.1f} %"
        warm = " to ".join(f"{degrees:.1f} °C" for degrees in cell.temperature_c if degrees is not None) or "unknown"
        lines.append(f"{cell.tokens:>7} {times} {cell.tokens_per_s:>9.1f} {bubble:>7}  {warm}")
    return "\n".join(lines)
