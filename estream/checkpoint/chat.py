"""Chat templates: a user's message in the form that an instruction-tuned model was trained on.

A template is a program from the checkpoint: it runs in jinja2's sandbox and sees nothing but the message and the
tokenizer's special tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from estream.errors import EStreamError, UsageError, brief

CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"
_PLAIN = "Give the text without --chat"


class ChatTemplate:
    """The chat template of a package or a checkpoint."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        """special: bos_token, eos_token, ... as text. where: for messages. Raises UsageError, EStreamError."""
        self._special, self._where = special, where
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as problem:
            raise UsageError(
                f"chat templates need the jinja2 library, which cannot be imported: {problem}",
                next_step=f"{_PLAIN}, or pip install jinja2",
            ) from problem
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as problem:
            raise EStreamError(f"{where}: is no jinja template: {problem}", next_step=_PLAIN) from problem

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> ChatTemplate:
        """From chat_template.jinja, or from tokenizer_config.json. Raises UsageError when there is none, EStreamError
        when it cannot be used."""
        folder = Path(directory)
        config = _config(folder / CONFIG)
        if (folder / FILE).is_file():
            where = folder / FILE
            source: Any = where.read_text("utf-8")
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
        Raises EStreamError: the template fails or refuses."""
        messages = [{"role": "user", "content": message}]
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=True, **self._special))
        except Exception as problem:  # templates raise whatever Python does
            raise EStreamError(f"{self._where}: the chat template failed: {problem}", next_step=_PLAIN) from problem


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as problem:
        raise EStreamError(f"{path}: cannot be read: {problem}", next_step=_PLAIN) from problem
    if not isinstance(found, dict):
        raise EStreamError(f"{path}: is not a JSON object", had=brief(type(found).__name__), next_step=_PLAIN)
    return found


def _text(token: Any) -> str:
    """A special token is written as text, or as an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja2's own filter escapes for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)
