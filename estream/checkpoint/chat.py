"""Chat templates: a user's message in the form that an instruction-tuned model was trained on.

A template is a program from the checkpoint: it runs in jinja2's sandbox, in a process of its own with little time and
memory, and sees nothing but the message and the tokenizer's special tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from estream.checkpoint.files import read_json
from estream.errors import EStreamError, UsageError
from estream.small_file import JSON_BYTES, read_small

CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"
SECONDS = 10.0  # for a message; templates take milliseconds
_PLAIN = "Give the text without --chat"
_ROOT = Path(__file__).resolve().parents[2]


class ChatTemplate:
    """The chat template of a package or a checkpoint."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        """special: bos_token, eos_token, ... as text. where: for messages."""
        self._source, self._special, self._where = source, special, where

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> ChatTemplate:
        """From chat_template.jinja, or from tokenizer_config.json. Raises UsageError when there is none, or no jinja2
        library, EStreamError when it cannot be read."""
        if find_spec("jinja2") is None:
            raise UsageError("chat templates need the jinja2 library", next_step=f"{_PLAIN}, or pip install jinja2")
        folder = Path(directory)
        config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        if (folder / FILE).is_file():
            where = folder / FILE
            source: Any = _source(where)
        else:
            where, source = folder / CONFIG, config.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
        if not isinstance(source, str) or not source:
            raise UsageError(f"{folder} has no chat template", next_step=_PLAIN)
        special = {name: _text(value) for name, value in config.items() if name.endswith("_token") and value}
        return cls(source, special, str(where))

    def render(self, message: str) -> str:
        """The text that a model continues with its answer: one message of the user, and the start of the assistant's.
        Raises EStreamError: the template fails, refuses, or does not end."""
        values = {"messages": [{"role": "user", "content": message}], "add_generation_prompt": True, **self._special}
        command = [sys.executable, "-m", "estream.checkpoint.chat_child"]
        asked = json.dumps({"source": self._source, "values": values})
        try:
            done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=_ROOT, timeout=SECONDS)
        except subprocess.TimeoutExpired as problem:
            raise self._failed(f"did not end within {SECONDS:g} s") from problem
        if done.returncode:
            raise self._failed("failed: it ran out of memory, or was killed")
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise self._failed(f"failed: {answer['error']}")
        return str(answer["text"])

    def _failed(self, how: str) -> EStreamError:
        return EStreamError(f"{self._where}: the chat template {how}", next_step=_PLAIN)


def _source(path: Path) -> str:
    try:
        return read_small(path, JSON_BYTES).decode()
    except (OSError, UnicodeDecodeError) as problem:
        raise EStreamError(f"{path}: cannot be read: {problem}", next_step=_PLAIN) from problem


def _text(token: Any) -> str:
    """A special token is written as text, or as an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
