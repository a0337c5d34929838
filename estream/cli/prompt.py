"""The four ways to give a prompt, and the tokenizer of a package."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from pathlib import Path
from typing import Any

from estream.cli.options import file
from estream.errors import EStreamError, PackageError, UsageError

_SEPARATORS = re.compile(r"[\s,]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--prompt, --prompt-file, --ids, --ids-file: exactly one of them; --chat."""
    group = parser.add_argument_group("prompt (exactly one)").add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt", metavar="TEXT", help="text, tokenized with the package's tokenizer")
    group.add_argument("--prompt-file", metavar="F", type=file, help="UTF-8 text from a file (- for stdin)")
    group.add_argument("--ids", metavar='"1 2 3"', help="token ids, separated by spaces or commas")
    group.add_argument("--ids-file", metavar="F", type=file, help="token ids from a file (- for stdin)")
    parser.add_argument("--chat", action="store_true", help="the text is a user's message: apply the chat template")


def parse_ids(text: str, where: str) -> list[int]:
    """'1 2, 3' → [1, 2, 3], and so is '[1, 2, 3]'.

    Raises:
        UsageError: no ids, or a word that is not a whole number.
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):  # as JSON writes a list
        text = text[1:-1]
    words = [word for word in _SEPARATORS.split(text) if word]
    if not words:
        raise UsageError(f"{where}: no token ids", next_step='Give ids like "1 2 3".')
    for word in words:
        if not (word.isascii() and word.isdecimal()) or len(word) > 18:
            raise UsageError(f"{where}: {word[:40]!r} is not a token id", next_step='Give ids like "1 2 3".')
    return [int(word) for word in words]


def read_text(path: Path, option: str) -> str:
    """A file's text, or stdin's for '-', unchanged but for a byte order mark: a final newline is part of a prompt.

    Raises:
        UsageError: not UTF-8.
        OSError: the file cannot be read.
    """
    raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path}: not UTF-8 text", had=f"byte {error.start}: {error.reason}") from None


def load_tokenizer(package: Path) -> Any | None:
    """The package's tokenizer, or None where it has no tokenizer.json (synthetic packages)."""
    if not (package / "tokenizer.json").is_file():
        return None
    from estream.checkpoint.tokenizer import Tokenizer

    return Tokenizer.open(package)


def tokenizer_for(args: argparse.Namespace) -> Any | None:
    """The package's tokenizer, or None. A damaged one is an error only where it is needed for the prompt."""
    try:
        return load_tokenizer(args.package)
    except EStreamError as error:
        if args.ids is None and args.ids_file is None:
            raise
        logging.getLogger("estream.cli").warning("%s: tokens are shown by id only", error.thing)
        return None


def prompt_ids(args: argparse.Namespace, tokenizer: Any | None) -> list[int]:
    """The token ids that the arguments mean.

    Raises:
        UsageError: no ids, or something else than ids; --chat with ids, or without a chat template.
        PackageError: a text, and the package has no tokenizer.
        EStreamError: the chat template fails.
    """
    if args.chat and (args.ids is not None or args.ids_file is not None):
        raise UsageError("--chat goes with a text", next_step="Give --prompt or --prompt-file")
    if args.ids is not None:
        return parse_ids(args.ids, "--ids")
    if args.ids_file is not None:
        return parse_ids(read_text(args.ids_file, "--ids-file"), f"--ids-file {args.ids_file}")
    text = args.prompt if args.prompt is not None else read_text(args.prompt_file, "--prompt-file")
    if tokenizer is None:
        raise PackageError(f"{args.package} has no tokenizer", next_step="Give token ids with --ids or --ids-file.")
    if not args.chat:
        return list(tokenizer.encode(text))
    from estream.checkpoint.chat import ChatTemplate

    # The template writes the special tokens itself.
    return list(tokenizer.encode(ChatTemplate.open(args.package).render(text), special=False))
