"""Sub-parsers from command modules: NAME, HELP, DESCRIPTION, EXAMPLE, add_arguments(parser), run(args, console).

A module with COMMANDS is a group of further commands instead of one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType


def add_commands(parser: argparse.ArgumentParser, modules: Sequence[ModuleType], dest: str) -> None:
    """One sub-parser per module; the chosen one's `run` becomes an attribute of the parsed arguments."""
    kind = type(parser)
    commands = parser.add_subparsers(dest=dest, required=True, metavar="COMMAND", parser_class=kind)
    for module in modules:
        group: Sequence[ModuleType] | None = getattr(module, "COMMANDS", None)
        sub = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=f"example:\n{module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if group is not None:
            add_commands(sub, group, f"{module.NAME}_command")
            continue
        talk = sub.add_mutually_exclusive_group()
        talk.add_argument("-q", "--quiet", action="store_true", help="results only: no plan, no progress, no warnings")
        talk.add_argument("-v", "--verbose", action="count", default=0, help="more detail; twice: tracebacks too")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
