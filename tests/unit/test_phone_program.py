"""The phone's program alone: where only numpy can be imported, what it answers to, and that it ends with its host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from android.session import ask
from estream.errors import UsageError
from tests.support.fake_device import FakeDevice

ABSENT = ("onnx", "rich", "onnxruntime", "psutil", "estream.cli")
TEXT: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}


@pytest.fixture
def phone(tmp_path: Path) -> FakeDevice:
    return FakeDevice(tmp_path / "phone")


def talk(phone: FakeDevice, command: str, request: object, *, more: bytes = b"") -> tuple[int, list[dict[str, Any]]]:
    """Sends a request, then the end of stdin only after the program has ended. (status, events)."""
    with phone.stream(
        str(phone.python), f"{phone.layout.app}/estream_phone.py", command, env=phone.layout.environment
    ) as program:
        program.send((request if isinstance(request, bytes) else json.dumps(request).encode()) + b"\n" + more)
        events = [json.loads(line) for line in program.lines()]
        return program.finish(), events


def test_its_python_has_numpy_only(phone: FakeDevice) -> None:
    code = f"import numpy, estream.engine\nfor name in {ABSENT}:\n"
    code += " try: __import__(name)\n except ModuleNotFoundError: print('no', name)\n"
    environment = {"PATH": os.environ["PATH"], **phone.layout.environment}
    done = subprocess.run([phone.python, "-c", code], env=environment, cwd=phone.layout.root, **TEXT)
    assert done.stdout.split() == [word for name in ABSENT for word in ("no", name)], done.stderr


def test_it_says_who_it_is_and_ends_when_nobody_asks(phone: FakeDevice) -> None:
    with phone.stream(
        str(phone.python), f"{phone.layout.app}/estream_phone.py", "run", env=phone.layout.environment
    ) as program:
        hello = json.loads(next(program.lines()))
    assert (hello["estream"], hello["event"], hello["pid"]) == (1, "hello", program.pid)
    assert program.status == 143 and not program.stopped_by_force
    assert b"Traceback" not in program.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_it(phone: FakeDevice, number: int) -> None:
    with phone.stream(
        str(phone.python), f"{phone.layout.app}/estream_phone.py", "run", env=phone.layout.environment
    ) as program:
        next(program.lines())
        os.kill(program.pid, number)
        assert program.finish() == 143
    assert b"Traceback" not in program.err


GOOD = {"estream": 1, "libraries": "/nowhere", "package": "/nowhere/x.estream", "options": {}, "out": "/nowhere/out"}


@pytest.mark.parametrize(
    ("command", "request_", "kind", "status", "words"),
    [
        ("walk", GOOD, "UsageError", 2, "unknown command"),
        ("run", b"{", "UsageError", 2, "the request is not JSON"),
        ("run", [1], "UsageError", 2, "another version of the protocol"),
        ("run", {**GOOD, "estream": 99}, "UsageError", 2, "another version of the protocol"),
        ("run", GOOD, "UsageError", 2, "the request's ids must be of type list"),
        ("run", {**GOOD, "ids": []}, "UsageError", 2, "the request's ids must be whole numbers"),
        ("run", {**GOOD, "ids": [1, True]}, "UsageError", 2, "the request's ids must be whole numbers"),
        ("run", {**GOOD, "ids": [1], "options": {"grup": 1}}, "UsageError", 2, "options that are not known"),
        ("run", {**GOOD, "ids": [1]}, "PackageError", 1, "x.estream is not on the phone"),
        ("calibrate", {**GOOD, "options": {"group": 1}}, "UsageError", 2, "options that are not known"),
        ("bench", {**GOOD, "tokens": [4]}, "UsageError", 2, "the request's rounds must be of type int"),
        ("probe", GOOD, "UsageError", 2, "the request's folder must be of type str"),
    ],
)
def test_refusals_are_events(
    phone: FakeDevice, command: str, request_: object, kind: str, status: int, words: str
) -> None:
    had, events = talk(phone, command, request_)
    assert had == status
    assert [event["event"] for event in events] == ["hello", "error"]
    assert (events[1]["class"], events[1]["exit_status"]) == (kind, status)
    assert words in events[1]["thing"]


def test_a_package_must_be_the_host_s(phone: FakeDevice, tmp_path: Path) -> None:
    package = tmp_path / "x.estream"
    package.mkdir()
    (package / "model.json").write_text("{}")
    _, events = talk(phone, "run", {**GOOD, "ids": [1], "package": str(package), "model": "0" * 64})
    assert events[1]["class"] == "PackageError" and events[1]["thing"] == "x.estream on the phone is not the host's"
    assert events[1]["next_step"] == "Push it: estream device push x.estream"


def test_what_is_missing_is_an_event(phone: FakeDevice) -> None:
    Path(phone.layout.app, "estream/engine.py").unlink()
    status, events = talk(phone, "run", {**GOOD, "ids": [1]})
    assert (status, events[-1]["class"]) == (1, "ModuleNotFoundError")
    assert "estream.engine" in events[-1]["thing"]
    assert b"Traceback" in phone.processes[-1].err  # for -v
    phone.write_python(f'exec {__import__("sys").executable} -S "$@"')
    status, events = talk(phone, "run", GOOD)
    assert (status, [event["event"] for event in events]) == (1, ["error"])
    assert "numpy" in events[0]["thing"]


def test_noise_does_not_break_the_lines(phone: FakeDevice) -> None:
    version = Path(phone.layout.app, "estream/version.py")
    version.write_text(
        f"{version.read_text()}\nimport os, sys\nos.write(1, b'noise of a library')\nprint('noise of Python')\n"
    )
    status, events = talk(phone, "run", {**GOOD, "ids": [1]})
    assert [event["event"] for event in events] == ["hello", "error"]
    assert status == 1
    assert b"noise of a library" in phone.processes[-1].err and b"noise of Python" in phone.processes[-1].err


def test_probe_finds_what_is_missing(phone: FakeDevice) -> None:
    folder = f"{phone.layout.models}/not/yet"
    status, events = talk(phone, "probe", {"estream": 1, "libraries": phone.layout.libraries, "folder": folder})
    assert (status, events[-1]["event"], events[-1]["ok"]) == (0, "result", False)
    found = {finding["name"]: finding for finding in events[-1]["findings"]}
    assert found["numpy"]["status"] == "ok"
    assert found["ONNX Runtime"]["status"] == "missing" and "no libonnxruntime.so in" in found["ONNX Runtime"]["found"]
    assert found["QNN provider"]["needed_for"] == "htp"
    assert phone.layout.models in found["folder"]["found"]
    assert "onnx" not in found  # that is for packing


@pytest.fixture(autouse=True)
def nothing_is_left(phone: FakeDevice) -> Iterator[None]:
    yield
    assert all(not process.stopped_by_force for process in phone.processes)


@pytest.mark.parametrize("damaged", ["**/*.pyc", "**/estream/engine*.pyc"], ids=["before hello", "after it"])
def test_what_a_full_phone_compiled_in_part_stops_no_run(
    phone: FakeDevice, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("android.session._log.warning", lambda text, *parts: told.append(text % parts))
    bytecode = Path(phone.layout.bytecode)
    with pytest.raises(UsageError, match="the request's ids"):  # as far as it comes without a package
        ask(phone, phone.layout, "run", {})  # type: ignore[arg-type]
    compiled = list(bytecode.glob(damaged))
    assert compiled
    for path in compiled:
        os.truncate(path, 40)  # whole header, no code
    with pytest.raises(UsageError, match="the request's ids"):
        ask(phone, phone.layout, "run", {})  # type: ignore[arg-type]
    assert told == [f"what Python compiled on the phone may be damaged: removed {bytecode}, trying once more"]
    assert not bytecode.exists()
