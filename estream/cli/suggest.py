"""Near names: for a misspelt command, option, choice or file."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from estream.cli.options import OutputError

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


def hint(word: str, known: Iterable[str]) -> str:
    """'Did you mean --group?', or nothing where no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def choice_hint(message: str) -> str:
    """The hint for argparse's message about a value that is not among the choices."""
    found = _CHOICE.search(message)
    return hint(found[1], re.findall(r"'([^']*)'", found[2])) if found else ""


def missing_path_hint(arguments: Mapping[str, object], message: str, error: BaseException) -> str:
    """Near names for an argument that `message` is about and that does not exist, to follow `message`; or nothing.

    error: what `message` tells. Where the system had another reason than a missing file, nothing was misspelt; nor is
    an output, which is new.
    """
    reason = error if isinstance(error, OSError) else error.__cause__
    if isinstance(error, OutputError) or (isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError)):
        return ""
    for path in arguments.values():
        if isinstance(path, Path) and str(path) in message and not os.path.exists(path):
            try:
                names = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
            except OSError:
                continue
            near = hint(path.name, names)
            if near:
                return f" {near}" if message.endswith(".") else f". {near}"
    return ""
