"""`estream synth`: a packed model of random weights in the shape of a public model."""

from __future__ import annotations

import argparse

from estream.cli import summary
from estream.cli.console import Console
from estream.cli.options import add_json, add_output, add_schemes, positive, whole
from estream.cli.progress import Progress

NAME = "synth"
HELP = "make a packed model of random weights"
DESCRIPTION = (
    "Writes a packed model of seeded random weights in the shape of a public model: for measurements, where the\n"
    "answers do not matter. No checkpoint is needed or made."
)
EXAMPLE = "  estream synth olmoe-1b-7b olmoe-random.estream --experts int8 --layers 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the preset, the output and the schemes."""
    from estream.package.presets import PRESETS

    parser.add_argument("preset", metavar="PRESET", choices=tuple(PRESETS), help=f"the shape: {', '.join(PRESETS)}")
    add_output(parser)
    add_schemes(parser, experts="int8")
    parser.add_argument("--layers", metavar="N", type=positive, help="only the first N layers")
    parser.add_argument("--seed", metavar="S", type=whole, default=0, help="seed of the weights (default 0)")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Writes the package, and says what was written."""
    from estream.package.synth import synthesize

    with Progress(console) as progress:
        result = synthesize(
            args.preset,
            args.out,
            experts=args.experts,
            dense=args.dense,
            layers=args.layers,
            seed=args.seed,
            force=args.force,
            progress=progress,
        )
    summary.written(console, args.out, result)
    return 0
