"""What the phone's program says, line by line, and its errors as the errors they were (docs/phone_protocol.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from android.client import SPACE
from estream.errors import EStreamError, MemoryBudgetError, brief
from estream.solver.profile import ProfileError  # an error that the phone may name, like those of estream.errors

PROTOCOL = 1
_MARK = b'{"estream": '
PUSH = "Push the bundle again: estream device bundle, then estream device push"


class PhoneError(EStreamError):
    """The phone's program is not there, ended without an answer, or failed in a way that nobody foresaw."""


class ProtocolError(EStreamError):
    """The phone's program says what this host does not understand."""

    usual_step = PUSH


@dataclass(frozen=True)
class Hello:
    """The first event. version: EStream's on the phone."""

    version: str
    python: str
    numpy: str
    machine: str
    pid: int


@dataclass(frozen=True)
class Opened:
    """The package is open. configuration: everything resolved, as `Engine.configuration`."""

    configuration: dict[str, Any]


@dataclass(frozen=True)
class Progressed:
    """As the `progress` of `Engine` is called."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Measurement:
    """One prefill of a bench. stats: as `PrefillStats.to_dict`. temperature: `before` and `after`, each `zone` and
    `celsius` or None."""

    tokens: int
    round: int
    stats: dict[str, Any]
    temperature: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The last event of a command that was done; what it holds depends on the command."""

    fields: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """The last event of a command that failed."""

    error: EStreamError


Event = Hello | Opened | Progressed | Measurement | Result | Failure
_KINDS: dict[str, type[Any]] = {
    "hello": Hello,
    "opened": Opened,
    "progress": Progressed,
    "measurement": Measurement,
}


def parse(line: bytes) -> Event | None:
    """The event of a line of the program's stdout; None: something else printed it.

    Raises ProtocolError: an event of another version, of a kind that is not known, or without a field.
    """
    if not line.startswith(_MARK):
        return None
    try:
        fields = json.loads(line)
        version, kind = fields.pop("estream"), fields.pop("event", None)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a damaged line came from the phone: {brief(line.decode(errors='replace'))}") from error
    if version != PROTOCOL:
        age = "older" if isinstance(version, int) and version < PROTOCOL else "newer"
        raise ProtocolError(
            f"EStream on the phone is {age} than on this host",
            asked=f"protocol {PROTOCOL}",
            had=f"protocol {brief(version)}",
        )
    try:
        if kind == "error":
            return Failure(_error(fields))
        return Result(fields) if kind == "result" else _KINDS[kind](**fields)
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"an event came from the phone that is not known: {brief(fields)}", had=kind) from error


def _error(fields: Mapping[str, Any]) -> EStreamError:
    """The error as it was raised: same class, words and exit status."""
    name, thing = fields["class"], str(fields["thing"])
    parts = {key: fields[key] for key in ("asked", "had", "next_step")}
    if name in _CLASSES:
        return _CLASSES[name](thing, **parts)
    if name == "MemoryError":
        return MemoryBudgetError("the phone has no memory left", next_step="Give a smaller --memory or prompt")
    if name.endswith("Error") and thing.startswith("[Errno "):
        step = SPACE if "No space left" in thing else None
        return PhoneError(f"on the phone: {thing.partition('] ')[2]}", next_step=step)
    step = "The phone's traceback is shown with -v. If the bundle is complete this is a bug in EStream"
    return PhoneError(f"on the phone: unexpected {name}: {thing}", next_step=step)


def _by_name(base: type[EStreamError]) -> dict[str, type[EStreamError]]:
    found = {base.__name__: base}
    for kind in base.__subclasses__():
        if kind.__module__ in (EStreamError.__module__, ProfileError.__module__):
            found |= _by_name(kind)
    return found


_CLASSES = _by_name(EStreamError)
