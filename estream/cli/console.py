"""Where a command's words go: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Console:
    """`quiet`: results only. `verbose`: 0, 1, 2. `json`: stdout holds one JSON object and nothing else."""

    def __init__(self, *, quiet: bool = False, verbose: int = 0, json: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.json = json

    def result(self, text: str) -> None:
        """A result, for people."""
        if not self.json:
            print(text)

    def detail(self, text: str) -> None:
        """Something beside the result (the plan, the statistics), for people who did not ask for quiet."""
        if not self.json and not self.quiet:
            print(text, flush=True)

    def more(self, text: str) -> None:
        """What only --verbose shows."""
        if not self.json and self.verbose:
            print(text)

    def result_json(self, value: Any) -> None:
        """The result as JSON, where --json was given."""
        if self.json:
            print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))

    def error(self, text: str) -> None:
        """A line on stderr. A result that was printed before stays before it."""
        with contextlib.suppress(OSError):  # the error is still worth saying
            sys.stdout.flush()
        print(f"estream: {text}", file=sys.stderr)


def plain(value: Any) -> Any:
    """Dataclasses, numpy numbers and paths as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return value


def table(rows: list[tuple[str, str]], indent: str = "  ") -> str:
    """Two aligned columns: names and values."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{indent}{name:<{width}}  {value}" for name, value in rows)
