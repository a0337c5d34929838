"""A conversation with the phone's program: one request, events until its result, and how it ended."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from android.client import SPACE
from android.events import (
    PROTOCOL,
    PUSH,
    Failure,
    Hello,
    Measurement,
    Opened,
    PhoneError,
    Progressed,
    ProtocolError,
    Result,
    parse,
)
from android.layout import PhoneLayout
from estream.errors import EStreamError, FlashError, PackageError

if TYPE_CHECKING:
    from android.adb import Device

_log = logging.getLogger("estream.device")
_NO_PYTHON = (126, 127)  # what a shell says of a program that is not there, or not to be run
# What Python says of a module that was compiled and then written in part.
_BYTECODE = re.compile(r"\bEOFError\b|marshal data|Non-code object")
_FRAMES = re.compile(r"^(?:Traceback|Current thread) .*\n(?:[ \t].*\n?)*", re.MULTILINE)
_ANEW = (
    "Run estream device doctor. If it finds nothing, put all there anew: estream device clean --all, then"
    " estream device push --bundle BUNDLE PACKAGE"
)
_KILLED = {
    signal.SIGSEGV: ("crashed", "A library on the phone crashed: estream device doctor tries them one by one"),
    signal.SIGABRT: ("gave up", "A library on the phone gave up: estream device doctor tries them one by one"),
    signal.SIGBUS: ("crashed", "A file shrank while it was read, or storage failed: push the package again"),
    signal.SIGILL: ("crashed", "The libraries are for another processor: build the bundle again"),
    signal.SIGKILL: (
        "was killed, probably by Android's low-memory killer",
        "Close apps on the phone, or give a smaller --memory",
    ),
    signal.SIGTERM: ("was ended", "Something on the phone ended it: run the command again"),
}


@dataclass(frozen=True)
class Listener:
    """What is told while the phone works. Each may be None."""

    progress: Callable[[str, int, int], None] | None = None
    opened: Callable[[dict[str, Any]], None] | None = None
    measured: Callable[[Measurement], None] | None = None


@dataclass(frozen=True)
class Answer:
    """hello: what runs there. fields: of the result."""

    hello: Hello
    fields: dict[str, Any]

    def device(self, serial: str) -> dict[str, Any]:
        """What reports say of the phone beside the figures."""
        facts = {key: getattr(self.hello, key) for key in ("version", "python", "numpy", "machine")}
        return {
            "serial": serial,
            "estream": facts.pop("version"),
            **facts,
            "onnxruntime": self.fields.get("onnxruntime"),
            "temperature": self.fields.get("temperature"),
        }


def request_of(layout: PhoneLayout, package: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """What every command about a package says: the phone's copy, which packing it must be, what an engine is asked for.

    options: those that are None are left to the phone.
    """
    return {
        "package": f"{layout.models}/{package.resolve().name}",
        "model": hashlib.sha256((package / "model.json").read_bytes()).hexdigest(),
        "options": {name: value for name, value in options.items() if value is not None},
    }


def ask(
    device: Device, layout: PhoneLayout, command: str, request: Mapping[str, Any], listener: Listener | None = None
) -> Answer:
    """Runs one command of the phone's program. Whatever ends this function ends the program, too.

    Where what Python compiled there may be damaged, as a full phone leaves it, that is removed, and the program is
    started once more.

    Raises EStreamError: the phone's own error, as it was raised there; PhoneError where the program is missing, was
    killed or said nothing; ProtocolError where it is of another version; DeviceError where the connection broke.
    """
    line = json.dumps({"estream": PROTOCOL, "libraries": layout.libraries, **request}).encode()
    heard = _converse(device, layout, layout.environment, command, line, listener)
    if heard.may_be_bytecode and _remove_bytecode(device, layout):
        _log.warning("what Python compiled on the phone may be damaged: removed %s, trying once more", layout.bytecode)
        heard = _converse(device, layout, layout.fresh_environment, command, line, listener)
    if heard.failure is not None:
        raise _of_the_copy(heard.failure, request.get("package"))
    if heard.hello is None or heard.result is None:
        raise _ended(heard.status, heard.noise, heard.hello is not None)
    if heard.status:
        _log.warning("the phone's program had its result, and then %s", _how(heard.status))
    return Answer(heard.hello, heard.result)


def _converse(
    device: Device,
    layout: PhoneLayout,
    environment: Mapping[str, str],
    command: str,
    request: bytes,
    listener: Listener | None,
) -> _Heard:
    program = (f"{layout.python}/bin/python3", f"{layout.app}/estream_phone.py", command)
    heard = _Heard(listener or Listener())
    with device.stream(*program, env=environment, label="the phone's program") as process:
        try:
            process.send(request + b"\n")
            for said in process.lines():
                heard.line(said)
            heard.status = process.finish()
        finally:
            for text in process.err.decode(errors="replace").splitlines():
                _log.info("phone: %s", text)
        heard.noise += process.err.decode(errors="replace")
    return heard


def _remove_bytecode(device: Device, layout: PhoneLayout) -> bool:
    """Whether there was any."""
    remove = '[ -d "$1" ] && rm -rf "$1"'
    return device.shell("sh", "-c", remove, "sh", layout.bytecode, check=False).status == 0


class _Heard:
    """What was said so far. noise: lines that are no events, and in the end stderr. status: how the program ended."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.hello: Hello | None = None
        self.result: dict[str, Any] | None = None
        self.failure: EStreamError | None = None
        self.noise = ""
        self.status = 0

    @property
    def may_be_bytecode(self) -> bool:
        """Whether it ended as a program does whose compiled modules are damaged."""
        if self.failure is not None:
            return isinstance(self.failure, PhoneError) and _BYTECODE.search(self.failure.thing) is not None
        return self.hello is None and self.status not in _NO_PYTHON

    def line(self, line: bytes) -> None:
        listener, event = self._listener, parse(line)
        if event is None:
            text = line.decode(errors="replace")
            _log.info("phone: %s", text)
            self.noise = f"{self.noise}{text}\n"[-4000:]
        elif isinstance(event, Failure):
            self.failure = event.error
        elif isinstance(event, Hello):
            self.hello = event
        elif self.hello is None:
            raise ProtocolError("the phone's program did not say which one it is")
        elif isinstance(event, Progressed):
            if listener.progress is not None:
                listener.progress(event.stage, event.done, event.total)
        elif isinstance(event, Opened):
            if listener.opened is not None:
                listener.opened(event.configuration)
        elif isinstance(event, Measurement):
            if listener.measured is not None:
                listener.measured(event)
        elif isinstance(event, Result):
            self.result = event.fields


def _of_the_copy(error: EStreamError, package: object) -> EStreamError:
    """An error about the phone's copy of a package, with what is to be done about a copy; others as they are.

    package: its folder on the phone.
    """
    step, told = error.next_step or "", f"{error.thing} {error.asked} {error.had} {error.next_step}"
    if not isinstance(package, str) or not isinstance(error, PackageError | FlashError | PhoneError):
        return error
    if (package not in told and "estream verify" not in told) or "device push" in step or "--no-direct-io" in step:
        return error
    name = shlex.quote(PurePosixPath(package).name)
    if "estream compile" in step:
        step = f"{step.replace(package, name)}, then estream device push {name}"
    else:
        step = f"Push it again: estream device push {name}. If that sends nothing: estream device clean {name} first"
    return type(error)(error.thing, asked=error.asked, had=error.had, next_step=step)


def _ended(status: int, said: str, began: bool) -> PhoneError:
    """Why there is no answer. said: what the program printed beside events."""
    lines = [line.strip() for line in _FRAMES.sub("", said).splitlines() if line.strip()]
    tail = " | ".join(lines[-3:])[-600:] or None
    if not began and status in _NO_PYTHON:
        return PhoneError("EStream is not on the phone, or does not start there", had=tail, next_step=PUSH)
    known = _KILLED.get(_signal(status))  # type: ignore[arg-type]
    if "No space left" in said:
        step = SPACE
    elif known:
        step = known[1]
    else:
        step = "Run it again with -v to see all that was printed" if began else _ANEW
    return PhoneError(f"the phone's program {_how(status)} before it had an answer", had=tail, next_step=step)


def _how(status: int) -> str:
    number = _signal(status)
    if number is None:
        return f"ended with status {status}"
    return f"{_KILLED.get(number, ('was killed',))[0]} ({number.name}, status {status})"


def _signal(status: int) -> signal.Signals | None:
    try:
        return signal.Signals(status - 128)
    except ValueError:
        return None
