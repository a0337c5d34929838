"""The wrapped adb against a fake one: which phone, quoting, exit statuses, what breaks, and that no client stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from android.adb import Device, DeviceError, choose_device, parse_devices
from android.device import command_line
from android.process import split_status
from estream.errors import UsageError
from tests.support.fake_phone import SERIAL, FakePhone, plugged_in

HOSTILE = [
    "a b",
    "'",
    '"',
    ";",
    "$(touch oops)",
    "`touch oops`",
    "$HOME",
    "a\nb",
    "-n",
    "--",
    "",
    "\\",
    "*",
    "~",
    "ä€ 漢",
    "&& touch oops",
    "\t",
    "!x",
    "{a,b}",
    "#no",
]


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePhone:
    return plugged_in(tmp_path, monkeypatch)


@pytest.fixture
def device(phone: FakePhone) -> Device:
    return choose_device(None)


def clients(phone: FakePhone) -> list[str]:
    """Processes of the fake adb that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(phone.folder) in line and int(entry.name) != os.getpid():
                found.append(line)
    return found


def test_the_only_phone_is_chosen(device: Device) -> None:
    assert (device.serial, device.details["model"], device.details["transport_id"]) == (SERIAL, "Phone_1", "7")


@pytest.mark.parametrize(
    ("lines", "serial", "words", "step"),
    [
        ((), None, "no phone is attached", "USB debugging"),
        ((), "x", "no phone is attached (asked x)", "USB debugging"),
        (("a unauthorized usb:1-4 transport_id:1",), None, "a has not allowed this computer", "Allow USB debugging"),
        (("a offline usb:1-4",), None, "a is offline", "adb kill-server"),
        (("a authorizing usb:1-4",), None, "not allowed this computer yet", "Allow USB"),
        (
            ("a no permissions (user u is not in the plugdev group); see [http://x] usb:1-4",),
            None,
            "no permissions",
            "udev",
        ),
        (("a recovery usb:1-4",), None, "state 'recovery'", "Start Android"),
        (
            ("a device model:M", "b offline"),
            None,
            "several phones are attached (had a (M, device), b (offline))",
            "--serial a",
        ),
        (("a offline", "b device"), "a", "a is offline", "adb kill-server"),
        (
            ("a device", "b device"),
            "c",
            "no phone has this serial number (--serial) (asked c, had a (device), b",
            "one of these",
        ),
    ],
)
def test_each_state_has_its_message(
    phone: FakePhone, lines: tuple[str, ...], serial: str | None, words: str, step: str
) -> None:
    phone.attached(*lines)
    with pytest.raises(DeviceError) as caught:
        choose_device(serial)
    assert words in str(caught.value) and step in str(caught.value.next_step)


def test_a_named_phone_among_several(phone: FakePhone, monkeypatch: pytest.MonkeyPatch) -> None:
    phone.attached("other device usb:1-1", f"{SERIAL} device usb:1-2")
    assert choose_device(SERIAL).serial == SERIAL
    monkeypatch.setenv("ANDROID_SERIAL", SERIAL)
    assert choose_device(None).serial == SERIAL
    monkeypatch.setenv("ANDROID_SERIAL", "none")
    with pytest.raises(DeviceError, match="ANDROID_SERIAL"):
        choose_device(None)


def test_serial_numbers_with_spaces() -> None:
    text = "List of devices attached\nadb-1 (2)._adb-tls-connect._tcp device product:x\n(no serial number) offline\n\n"
    assert [(one.serial, one.state) for one in parse_devices(text)] == [
        ("adb-1 (2)._adb-tls-connect._tcp", "device"),
        ("(no serial number)", "offline"),
    ]


def test_adb_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ESTREAM_ADB", "ANDROID_HOME", "ANDROID_SDK_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match=r"adb was not found.*platform tools"):
        choose_device(None)
    monkeypatch.setenv("ESTREAM_ADB", str(tmp_path / "none"))
    with pytest.raises(DeviceError, match="ESTREAM_ADB names no program"):
        choose_device(None)


def test_a_server_that_does_not_start(phone: FakePhone) -> None:
    phone.state["server_error"] = "error: cannot bind listener: Address already in use"
    phone.write_state()
    with pytest.raises(DeviceError, match=r"server does not start \(had error: cannot bind listener") as caught:
        choose_device(None)
    assert "daemon" not in str(caught.value)


def test_arguments_arrive_as_they_are(device: Device, phone: FakePhone) -> None:
    show = "import sys, os; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    done = device.shell(sys.executable, "-c", show, *HOSTILE)
    assert done.out.decode().split("\0") == HOSTILE
    folder = "a 'b\"; $(touch oops)\n-ä"
    (phone.root / "data/local/tmp" / folder).mkdir()
    done = device.shell(
        "sh", "-c", 'pwd; printf "%s" "$X"', cwd=f"/data/local/tmp/{folder}", env={"X": "'; touch oops"}
    )
    assert done.out.decode() == f"/data/local/tmp/{folder}\n'; touch oops"
    assert not list(phone.root.rglob("oops"))


@given(words=st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])), max_size=5))
def test_quoting_against_a_real_shell(words: list[str]) -> None:
    line = command_line(["printf", "%s\\0", *words], "/", {"A": "x y"}, "mark")
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, timeout=60)
    expected = b"".join(word.encode() + b"\0" for word in words) if words else b"\0"
    assert (done.stdout, done.stderr) == (expected, b"mark 0\n")


def test_what_cannot_be_said() -> None:
    with pytest.raises(UsageError, match="NUL"):
        command_line(["a\0b"], None, None, "m")
    with pytest.raises(UsageError, match="environment"):
        command_line(["a"], None, {"A B": "c"}, "m")


def test_exit_statuses_and_both_outputs(device: Device, phone: FakePhone) -> None:
    phone.state["noise"] = True
    phone.write_state()
    done = device.shell("sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (done.status, done.out, done.err) == (7, b"out\n", b"err\n")
    for status in (1, 255):
        with pytest.raises(DeviceError, match=f"a command on {SERIAL}: status {status} .had error: closed") as caught:
            device.shell("sh", "-c", f"echo error: closed >&2; exit {status}")
        assert caught.value.status == status
    assert device.shell("sh", "-c", "kill -9 $$", check=False).status == 137
    with pytest.raises(DeviceError, match="status 127"):
        device.shell("no-such-program")
    with pytest.raises(DeviceError, match="killed, most likely for memory"):
        device.shell("sh", "-c", "kill -9 $$")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("gone", "no longer attached"),
        ("closed", "the connection to 1a2b3c4d broke .had error: closed"),
        ("kill", "broke"),
    ],
)
def test_failures_of_adb_are_not_those_of_the_command(device: Device, phone: FakePhone, how: str, words: str) -> None:
    phone.fail("sleep|true", how)
    with pytest.raises(DeviceError, match=words) as caught:
        device.shell("true", check=False)
    assert caught.value.status is None
    phone.fail("cat", how)
    with device.stream("cat") as process, pytest.raises(DeviceError, match=words):
        process.send(b"x\n")
        assert list(process.lines()) == []
        process.finish()


def test_no_answer_in_time(device: Device, phone: FakePhone) -> None:
    with pytest.raises(DeviceError, match=r"sleep on 1a2b3c4d: no answer \(asked within 0.5 s\)"):
        device.shell("sleep", "600", timeout_s=0.5)


def test_stdin_of_a_command(device: Device) -> None:
    assert device.shell("cat", stdin=b"a\0b" * 100_000).out == b"a\0b" * 100_000
    assert device.shell("cat").out == b""
    assert device.shell("true", stdin=b"x" * 1_000_000).status == 0


def test_a_program_is_talked_to(device: Device, phone: FakePhone) -> None:
    with device.stream("sh", "-c", 'read x; echo "got $x"; echo note >&2; read y; echo "$y"; exit 3') as process:
        process.send(b"one\n")
        lines = process.lines()
        assert next(lines) == b"got one"
        process.send(b"two\n")
        assert list(lines) == [b"two"]
        assert (process.finish(), process.err) == (3, b"note\n")
    assert clients(phone) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_leaving_early_ends_the_program_and_the_client(
    device: Device, phone: FakePhone, error: type[BaseException]
) -> None:
    left = phone.root / "left"
    with (
        pytest.raises(error),
        device.stream("sh", "-c", f"echo $$; cat >/dev/null; echo > {left}; exit 143") as process,
    ):
        assert next(process.lines())
        raise error
    assert left.exists()
    assert clients(phone) == []


def test_a_program_that_ignores_the_end_of_its_stdin(
    device: Device, phone: FakePhone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("android.device.PATIENCE_S", 0.2)
    with device.stream("sh", "-c", "echo started; exec sleep 5") as process:
        assert next(process.lines()) == b"started"
        started = time.monotonic()
    assert time.monotonic() - started < 4
    assert not [line for line in clients(phone) if "fake_adb.py" in line]


def test_an_interrupt_in_the_middle_leaves_no_client(device: Device, phone: FakePhone) -> None:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        device.shell("sleep", "5")
    assert not [line for line in clients(phone) if "fake_adb.py" in line]


def test_files_are_copied_whole_or_not_at_all(device: Device, phone: FakePhone, tmp_path: Path) -> None:
    name = "a 'b'; $(touch oops).txt"
    (tmp_path / name).write_bytes(b"x" * 1000)
    device.push(tmp_path / name, f"/data/local/tmp/{name}")
    assert (phone.root / "data/local/tmp" / name).read_bytes() == b"x" * 1000
    target = tmp_path / "back"
    device.pull(f"/data/local/tmp/{name}", target)
    assert target.read_bytes() == b"x" * 1000
    target.write_bytes(b"before")
    phone.fail("pull", "cut", 10)
    with pytest.raises(DeviceError, match="broke"):
        device.pull(f"/data/local/tmp/{name}", target)
    with pytest.raises(DeviceError, match="failed to copy"):
        device.pull("/data/local/tmp/none", target)
    assert target.read_bytes() == b"before"
    assert not list(tmp_path.glob(".estream-*"))
    with pytest.raises(FileNotFoundError):
        device.push(tmp_path / "none", "/data/local/tmp/x")


def test_status_is_found_behind_whatever_was_said() -> None:
    assert split_status(b"a mark 1 b\nmark 22\n", b"mark") == (b"a mark 1 b\n", 22)
    assert split_status(b"mark", b"mark") == (b"mark", None)
    assert split_status(b"error: closed", b"mark") == (b"error: closed", None)
