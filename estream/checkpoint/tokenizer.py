"""Text to token ids and back, through the `tokenizers` library and a tokenizer.json."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from estream.errors import EStreamError, UsageError

_IDS = "Give token ids instead of text (--ids or --ids-file)"


class Tokenizer:
    """The tokenizer.json of a package or a checkpoint."""

    def __init__(self, implementation: Any) -> None:
        self._implementation = implementation

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """Raises UsageError when there is no tokenizer.json or no `tokenizers` library, EStreamError when the file
        cannot be used; the messages name the way out (ids)."""
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{directory} has no tokenizer.json", next_step=_IDS)
        try:
            import tokenizers
        except ImportError as problem:
            raise UsageError(
                f"text needs the tokenizers library, which cannot be imported: {problem}",
                next_step=f"{_IDS}, or pip install tokenizers",
            ) from problem
        try:
            implementation = tokenizers.Tokenizer.from_file(str(path))
        except Exception as problem:  # the library raises plain Exception
            raise EStreamError(f"{path}: cannot be used: {problem}", next_step=_IDS) from problem
        # A saved tokenizer may carry training's truncation and padding; a prompt is never cut in silence.
        implementation.no_truncation()
        implementation.no_padding()
        return cls(implementation)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special`: with the tokens that the tokenizer itself adds (a BOS, for instance)."""
        return list(self._implementation.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens included."""
        return str(self._implementation.decode([int(token) for token in ids], skip_special_tokens=False))
