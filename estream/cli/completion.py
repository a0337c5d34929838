"""`estream completion`: a completion script for the shell."""

from __future__ import annotations

import argparse

from estream.cli.console import Console

NAME = "completion"
HELP = "print a shell completion script"
DESCRIPTION = "Prints a script that completes estream's commands and options in the shell."
EXAMPLE = '  eval "$(estream completion bash)"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the shell's name."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell to complete in")


def run(args: argparse.Namespace, console: Console) -> int:
    """Prints the script."""
    import shtab

    from estream.cli.main import build_parser

    console.result(shtab.complete(build_parser(), args.shell))
    return 0
