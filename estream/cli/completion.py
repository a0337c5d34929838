"""`estream completion`: a completion script for the shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from estream.cli.console import Console
from estream.cli.options import file, folder

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

    parser = build_parser()
    for action in _actions(parser):
        if action.type in (file, folder):
            action.complete = shtab.FILE if action.type is file else shtab.DIRECTORY  # type: ignore[attr-defined]
    console.result(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of every command."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
