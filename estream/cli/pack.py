"""`estream pack`: a Hugging Face checkpoint becomes a packed model."""

from __future__ import annotations

import argparse

from estream.cli import summary
from estream.cli.console import Console
from estream.cli.options import add_json, add_output, add_schemes, folder, positive
from estream.cli.progress import Progress

NAME = "pack"
HELP = "pack a checkpoint"
DESCRIPTION = (
    "Packs a Hugging Face checkpoint (a folder with config.json and safetensors) into the form that prefill reads.\n"
    "Streams: memory is bounded by the largest tensor, not by the checkpoint."
)
EXAMPLE = "  estream pack OLMoE-1B-7B-0924/ olmoe.estream --experts int8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the checkpoint, the output and the schemes."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=folder, help="folder of the checkpoint")
    add_output(parser)
    add_schemes(parser, experts="f16")
    parser.add_argument(
        "--panel", metavar="Ip", type=positive, help="panel width (default: what the NPU's memory holds)"
    )
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Packs, and says what was written."""
    from estream.package.pack import pack

    with Progress(console) as progress:
        result = pack(
            args.checkpoint,
            args.out,
            experts=args.experts,
            dense=args.dense,
            panel=args.panel,
            force=args.force,
            progress=progress,
        )
    summary.written(console, args.out, result)
    return 0
