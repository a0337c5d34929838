"""Renders a chat template: `python -m estream.checkpoint.chat_child`.

{"source", "values"} on stdin, {"text"} or {"error"} on stdout.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY = 1 << 30


class Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; here its content is all that counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def render(source: str, values: dict[str, Any]) -> str:
    """Raises whatever templates raise."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return str(environment.from_string(source).render(values))


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja2's own filter escapes for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)


def main() -> None:
    asked = json.loads(sys.stdin.read())
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        answer = {"text": render(asked["source"], asked["values"])}
    except Exception as problem:
        answer = {"error": str(problem).rstrip(".") or type(problem).__name__}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
