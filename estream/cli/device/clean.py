"""`estream device clean`: removes from the phone what EStream put there."""

from __future__ import annotations

import argparse

from estream.cli.console import Console
from estream.cli.device.options import add_device, device_from
from estream.cli.options import add_json
from estream.errors import UsageError
from estream.units import format_bytes

NAME = "clean"
HELP = "remove what EStream put on the phone"
DESCRIPTION = (
    "Removes models by name, all models, what runs left, or everything, without asking. Only below /data/local/tmp,\n"
    "and only EStream's own folders."
)
EXAMPLE = "  estream device clean olmoe.estream\n  estream device clean --runs\n  estream device clean --all --dry-run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what to remove, and the phone."""
    parser.add_argument("model", metavar="MODEL", nargs="*", help="name of a model on the phone (NAME.estream)")
    parser.add_argument("--models", action="store_true", help="all models")
    parser.add_argument("--runs", action="store_true", help="what runs left")
    parser.add_argument("--all", action="store_true", help="everything: models, runs and the bundle")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Removes, and says what was freed."""
    if not (args.model or args.models or args.runs or args.all):
        raise UsageError("nothing to remove", next_step="Name a model, or give --runs, --models or --all")
    if (args.all and (args.model or args.models or args.runs)) or (args.models and args.model):
        more = "--all" if args.all else "--models"
        step = f"Leave out {more}, or the rest"
        raise UsageError(f"{more} removes more than what is named beside it", next_step=step)
    from android.clean import clean

    device, layout = device_from(args)
    removed = clean(
        device,
        layout,
        models=args.model,
        all_models=args.models,
        runs=args.runs,
        everything=args.all,
        dry_run=args.dry_run,
    )
    for path in removed.paths:
        console.detail(f"{'would remove' if args.dry_run else 'removed'} {path}")
    verb = "would be freed" if args.dry_run else "freed"
    console.result(f"{format_bytes(removed.bytes)} {verb} on {device.serial}")
    console.result_json({"serial": device.serial, **removed.to_dict()})
    return 0
