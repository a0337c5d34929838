"""Which phone is meant: none, several, one that is not allowed, offline or unknown. Each has its own message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.cli import Estream, Said
from tests.device.phone import Adb, Phone
from tests.device.sandbox import Sandbox


@pytest.fixture
def own_adb(sandbox: Sandbox, tmp_path: Path) -> Iterator[Adb]:
    """A server that knows no phone yet."""
    (tmp_path / "adb").mkdir()
    with Adb.running(sandbox.adb, tmp_path / "adb") as adb:
        yield adb


def refused(said: Said) -> str:
    """The one line of the error."""
    assert (said.status, said.out) == (1, "")
    (line,) = said.err.splitlines()
    return line.removeprefix("estream: error: ")


def test_no_phone(own_adb: Adb) -> None:
    line = refused(Estream(own_adb)("doctor"))

    assert line.startswith("no phone is attached. On the phone: Settings, About phone, tap 'Build number' seven times")


def test_one_phone_needs_no_name_and_several_do(own_adb: Adb, tmp_path: Path) -> None:
    estream = Estream(own_adb)
    with Phone(tmp_path / "one") as one, Phone(tmp_path / "two") as two:
        own_adb.connect(one)
        alone = estream("clean", "--all")
        own_adb.connect(two)
        several = refused(estream("clean", "--all"))
        named = estream("clean", "--all", "--serial", two.serial)
        unknown = refused(estream("clean", "--all", "--serial", "1a2b3c4d"))

    assert alone.status == 0 and one.serial in alone.out
    assert several.startswith("several phones are attached (had ")
    assert one.serial in several and two.serial in several and "Name one: --serial 127.0.0.1:" in several
    assert named.status == 0 and two.serial in named.out
    assert unknown.startswith("no phone has this serial number (--serial) (asked 1a2b3c4d, had ")
    assert unknown.endswith("Name one of these")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("unauthorized", "has not allowed this computer. Unlock the phone, answer 'Allow USB debugging?' with yes"),
        ("offline", "is offline: it is attached but does not answer. Unplug the phone and plug it in again"),
    ],
)
def test_a_phone_that_cannot_be_used(own_adb: Adb, tmp_path: Path, state: str, words: str) -> None:
    with Phone(tmp_path / "phone") as phone:
        phone.set_state(state)
        own_adb.run("connect", phone.serial)
        end = time.monotonic() + 30
        while own_adb.state(phone) != state:
            assert time.monotonic() < end, own_adb.state(phone)
            time.sleep(0.05)

        line = refused(Estream(own_adb)("doctor"))

    assert line.startswith(f"the phone {phone.serial} {words}")
