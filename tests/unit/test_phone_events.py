"""What the phone says, and how it ends: events, errors as they were raised, words for every way to die."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from android.events import Failure, Hello, Measurement, Opened, PhoneError, Progressed, ProtocolError, Result, parse
from android.layout import PhoneLayout
from android.session import Listener, ask
from estream import errors
from estream.errors import EStreamError
from estream.solver.profile import ProfileError
from estream.telemetry.thermal import hottest

HELLO = {"version": "0.1.0", "python": "3.12.1", "numpy": "2.2", "machine": "aarch64", "pid": 7}


def line(event: str, protocol: object = 1, /, **fields: object) -> bytes:
    return json.dumps({"estream": protocol, "event": event, **fields}).encode()


def test_every_event() -> None:
    assert parse(line("hello", **HELLO)) == Hello("0.1.0", "3.12.1", "2.2", "aarch64", 7)
    assert parse(line("opened", configuration={"group": 1})) == Opened({"group": 1})
    assert parse(line("progress", stage="prefill", done=1, total=2)) == Progressed("prefill", 1, 2)
    measured = {"tokens": 4, "round": 0, "stats": {}, "temperature": {"before": None, "after": None}}
    assert parse(line("measurement", **measured)) == Measurement(4, 0, {}, {"before": None, "after": None})
    assert parse(line("result", tokens=4)) == Result({"tokens": 4})


@pytest.mark.parametrize("noise", [b"", b"WARNING: linker: unused DT entry", b'{"other": 1}', b"\xff\xfe", b"[1]"])
def test_what_others_print_is_no_event(noise: bytes) -> None:
    assert parse(noise) is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            line("hello", 2, **HELLO),
            "newer than on this host (asked protocol 1, had protocol 2). Push the bundle again",
        ),
        (
            line("hello", 0, **HELLO),
            "older than on this host (asked protocol 1, had protocol 0). Push the bundle again",
        ),
        (b'{"estream": 1, "event": "resu', "a damaged line"),
        (line("goodbye"), "an event came from the phone that is not known"),
        (line("hello"), "an event came from the phone that is not known"),
        (line("error", thing="x"), "an event came from the phone that is not known"),
    ],
)
def test_what_is_not_understood(said: bytes, words: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        parse(said)
    assert words in str(raised.value)


def crossed(error: EStreamError) -> EStreamError:
    fields = {"thing": error.thing, "asked": error.asked, "had": error.had, "next_step": error.next_step}
    event = parse(line("error", **{"class": type(error).__name__}, **fields, exit_status=error.exit_status))
    assert isinstance(event, Failure)
    return event.error


@pytest.mark.parametrize(
    "error",
    [
        *(
            kind("the thing", asked="1", had="2", next_step="Do this")
            for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, EStreamError)
        ),
        ProfileError("no figures"),
        errors.PackageError("no next step of its own"),
        errors.FlashError("a name\nof two lines"),
    ],
    ids=lambda error: f"{type(error).__name__}: {error.thing}",
)
def test_errors_cross_as_they_are(error: EStreamError) -> None:
    again = crossed(error)
    assert (type(again), str(again), again.exit_status) == (type(error), str(error), error.exit_status)
    assert again.next_step == error.next_step


@pytest.mark.parametrize(
    ("kind", "thing", "words"),
    [
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory: '/x'",
            "on the phone: No such file or directory: '/x'",
        ),
        (
            "OSError",
            "[Errno 28] No space left on device: '/x'",
            "on the phone: No space left on device: '/x'. Free space on the phone: estream device clean",
        ),
        ("MemoryError", "", "the phone has no memory left. Give a smaller --memory or prompt"),
        ("ZeroDivisionError", "division by zero", "on the phone: unexpected ZeroDivisionError: division by zero"),
        ("DeviceError", "x", "on the phone: unexpected DeviceError: x"),
    ],
)
def test_errors_that_are_not_ours(kind: str, thing: str, words: str) -> None:
    event = parse(line("error", **{"class": kind}, thing=thing, asked=None, had=None, next_step=None, exit_status=1))
    assert isinstance(event, Failure)
    assert str(event.error).startswith(words) and event.error.exit_status == 1


class Scripted:
    """A device whose program says some lines and ends, and where Python has compiled nothing."""

    serial = "FAKE:1"

    def __init__(self, said: list[bytes], status: int = 0, err: bytes = b"") -> None:
        self.said, self.status, self.err, self.sent = said, status, err, b""

    @contextlib.contextmanager
    def stream(self, *argv: str, env: dict[str, str], label: str) -> Iterator[Any]:
        self.argv, self.env = argv, env
        yield self

    def shell(self, *argv: str, check: bool) -> Any:
        return SimpleNamespace(status=1)

    def send(self, data: bytes) -> None:
        self.sent += data

    def lines(self) -> Iterator[bytes]:
        return iter(self.said)

    def finish(self) -> int:
        return self.status


def asked(device: Scripted, listener: Listener | None = None) -> Any:
    return ask(device, PhoneLayout("/root"), "run", {"ids": [1]}, listener)  # type: ignore[arg-type]


def test_a_conversation() -> None:
    told: list[object] = []
    said = [
        b"linker: noise",
        line("hello", **HELLO),
        line("progress", stage="prefill", done=1, total=2),
        line("opened", configuration={"group": 3}),
        line("measurement", tokens=4, round=0, stats={}, temperature={}),
        line("result", tokens=4, onnxruntime="1.32.0", temperature=None),
    ]
    device = Scripted(said)
    answer = asked(device, Listener(lambda *step: told.append(step), told.append, told.append))
    assert told == [("prefill", 1, 2), {"group": 3}, Measurement(4, 0, {}, {})]
    assert json.loads(device.sent) == {"estream": 1, "libraries": "/root/lib", "ids": [1]}
    assert device.sent.count(b"\n") == 1
    assert device.argv == ("/root/python/bin/python3", "/root/app/estream_phone.py", "run")
    assert device.env == PhoneLayout("/root").environment
    assert answer.device("FAKE:1") == {
        "serial": "FAKE:1",
        "estream": "0.1.0",
        "python": "3.12.1",
        "numpy": "2.2",
        "machine": "aarch64",
        "onnxruntime": "1.32.0",
        "temperature": None,
    }


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ([], 127, "EStream is not on the phone, or does not start there (had sh: python3: not found). Push the bundle"),
        ([], 2, "ended with status 2 before it had an answer (had sh: python3: not found). Run estream device doctor"),
        ([line("hello", **HELLO)], 0, "ended with status 0 before it had an answer"),
        ([line("hello", **HELLO)], 139, "crashed (SIGSEGV, status 139) before it had an answer"),
        ([line("hello", **HELLO)], 137, "was killed, probably by Android's low-memory killer (SIGKILL, status 137)"),
        ([line("hello", **HELLO)], 129, "was killed (SIGHUP, status 129)"),
        ([line("hello", **HELLO)], 255, "ended with status 255"),
    ],
)
def test_no_answer(said: list[bytes], status: int, words: str) -> None:
    with pytest.raises(PhoneError) as raised:
        asked(Scripted(said, status, b"\nsh: python3: not found\n"))
    assert words in str(raised.value)
    assert raised.value.next_step and raised.value.exit_status == 1


TRACEBACK = b"""Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding
Traceback (most recent call last):
  File "<frozen importlib._bootstrap>", line 1360, in _find_and_load
  File "<frozen importlib._bootstrap_external>", line 784, in get_code
EOFError: marshal data too short
"""


@pytest.mark.parametrize(
    ("err", "words"),
    [
        (
            TRACEBACK,
            "encoding | EOFError: marshal data too short). Run estream device doctor. If it finds nothing, put",
        ),
        (b"OSError: [Errno 28] No space left on device\n", "No space left on device). Free space on the phone: est"),
    ],
)
def test_a_program_that_does_not_start_has_a_remedy(err: bytes, words: str) -> None:
    with pytest.raises(PhoneError) as raised:
        asked(Scripted([], 1, err))
    assert words in str(raised.value) and "importlib" not in str(raised.value)


COPY = "/data/local/tmp/estream/models/a b.estream"


@pytest.mark.parametrize(
    ("kind", "thing", "step", "expected"),
    [
        ("PackageError", f"{COPY}/dense.safetensors: size in bytes", "Copy the package again", "device push 'a b.est"),
        ("PackageError", f"{COPY} is not a packed model", "Give the folder that estream pack wrote", "device push 'a"),
        (
            "FlashError",
            "layer 1: other bytes",
            "Run `estream verify` to see",
            "estream device clean 'a b.estream' first",
        ),
        ("FileNotFoundError", f"[Errno 2] No such file or directory: '{COPY}/x'", None, "device push 'a b.estream'"),
        (
            "PackageError",
            f"{COPY}/graphs/htp/sm8650/manifest.json: field qairt",
            f"Compile again: estream compile {COPY} --soc sm8650",
            "Compile again: estream compile 'a b.estream' --soc sm8650, then estream device push 'a b.estream'",
        ),
        ("FlashError", f"{COPY}/x", "try again with --no-direct-io.", "try again with --no-direct-io."),
        ("PackageError", f"{COPY}: other", "Push it: estream device push x", "Push it: estream device push x"),
        ("MemoryBudgetError", f"{COPY}: no room", "Give more", "Give more"),
    ],
)
def test_the_next_step_about_a_copy_is_to_push_it(kind: str, thing: str, step: str | None, expected: str) -> None:
    parts = {"asked": None, "had": None, "next_step": step, "exit_status": 1}
    said = [line("hello", **HELLO), line("error", **{"class": kind}, thing=thing, **parts)]
    with pytest.raises(EStreamError) as raised:
        ask(Scripted(said, 1), PhoneLayout(), "run", {"package": COPY})  # type: ignore[arg-type]
    found = raised.value.next_step or ""
    assert expected in found and "verify" not in found and COPY not in found


def test_the_end_of_what_was_printed_is_quoted() -> None:
    device = Scripted([b"first", *(f"line {n}".encode() for n in range(2000))], 134, b"abort: message\n")
    with pytest.raises(PhoneError) as raised:
        asked(device)
    assert raised.value.had == "line 1998 | line 1999 | abort: message"


def test_a_crash_after_the_result_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("estream"), "propagate", True)  # which the command line ends
    said = [line("hello", **HELLO), line("result", tokens=4)]
    with caplog.at_level(logging.WARNING, "estream"):
        assert asked(Scripted(said, 139)).fields == {"tokens": 4}
    assert "had its result, and then crashed (SIGSEGV, status 139)" in caplog.text


def test_who_does_not_say_hello_is_not_understood() -> None:
    with pytest.raises(ProtocolError, match="did not say which one it is"):
        asked(Scripted([line("result", tokens=4)]))


def test_hottest_zone(tmp_path: Path) -> None:
    assert hottest(tmp_path) is None
    for number, (name, told) in enumerate({"cpu": "41500", "off": "-273000", "wild": "999000", "no": "x"}.items()):
        zone = tmp_path / f"thermal_zone{number}"
        zone.mkdir()
        (zone / "type").write_text(f"{name}\n")
        (zone / "temp").write_text(told)
    (tmp_path / "thermal_zone9").mkdir()  # may be listed and not read
    assert hottest(tmp_path) == {"zone": "cpu", "celsius": 41.5}
