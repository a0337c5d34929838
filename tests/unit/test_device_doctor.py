"""The phone's doctor on a fake phone, whole and with one thing wrong at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from android.adb import Device, DeviceError, choose_device
from android.contents import Contents, PhoneFile, bundle_contents
from android.doctor import PhoneDiagnosis, examine_phone
from android.layout import PhoneLayout
from android.properties import find_phone_soc
from android.push import push
from android.record import RECORD
from estream.cli.main import main
from estream.version import __version__
from tests.support.fake_phone import TARGET, FakePhone, plugged_in
from tests.unit.test_device_push import write_bundle

HELLO = {
    "estream": 1,
    "event": "hello",
    "version": "0.1.0",
    "python": "3.12.1",
    "numpy": "2.1",
    "machine": "x",
    "pid": 1,
}
# What the phone's Python answers: its version, or what its own look found.
PYTHON = f"""#!/bin/sh
case "$2" in
*sys.version*) echo 3.12.1;;
probe) read request; echo noise; echo '{json.dumps(HELLO)}'; echo "$request" > "$HOME/request"; ANSWER;;
esac
"""
FOUND = {"area": "software", "name": "numpy", "status": "ok", "found": "2.1", "needed_for": "cpu", "next_step": None}
ANSWER = f"echo '{json.dumps({'estream': 1, 'event': 'result', 'ok': True, 'findings': [FOUND]})}'"
LIBRARIES = ("libQnnHtp.so", "libQnnSystem.so", "libQnnHtpV75Stub.so", "libQnnHtpV75Skel.so")


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePhone:
    return plugged_in(tmp_path / "phone", monkeypatch)


@pytest.fixture
def device(phone: FakePhone) -> Device:
    return choose_device(None)


def with_bundle(
    tmp_path: Path, device: Device, estream: str = __version__, python: str = PYTHON.replace("ANSWER", ANSWER)
) -> None:
    files = {"python/bin/python3": python.encode(), **{f"lib/{name}": b"so" for name in LIBRARIES}}
    push(device, TARGET, bundle_contents(write_bundle(tmp_path / "bundle", files, estream), PhoneLayout()))


def push_model(tmp_path: Path, device: Device, name: str, soc: str) -> None:
    """Two files and a manifest."""
    files = []
    for path in ("experts.bin", f"graphs/htp/{soc}/expert.bin", "model.json"):
        local = tmp_path / name / path
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(path.encode())
        files.append(PhoneFile(path, local, len(path), hashlib.sha256(path.encode()).hexdigest()))
    *most, manifest = files
    push(device, TARGET, Contents(name, f"{TARGET}/models/{name}", manifest, tuple(most)))


def look(device: Device, backend: str = "htp") -> tuple[PhoneDiagnosis, dict[str, tuple[str, str]]]:
    diagnosis = examine_phone(device, PhoneLayout(), backend)
    for finding in diagnosis.findings:
        assert finding.status == "ok" or finding.next_step, finding
    return diagnosis, {finding.name: (finding.status, finding.found) for finding in diagnosis.findings}


def test_a_phone_that_lacks_nothing(
    phone: FakePhone, device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_bundle(tmp_path, device)
    push_model(tmp_path, device, "whole.estream", "sm8650")
    push_model(tmp_path, device, "no contexts.estream", "sm8550")
    phone.at("models/half.estream").mkdir()
    diagnosis, found = look(device)
    assert diagnosis.ok
    assert found["model"] is not None
    assert found["Android"] == ("ok", "15 (API 35), arm64-v8a")
    assert found["SoC"] == ("ok", "SM8650 (pineapple), Hexagon v75")
    assert found["memory"] == ("ok", "11.4 GiB, 6.68 GiB available")
    assert found["swap"] == ("ok", "3.81 GiB, 2.86 GiB free (zram: it takes memory itself)")
    assert found["heat"] == ("ok", "throttling none, CPU 31 °C, battery 30 °C")
    assert found["SELinux"] == ("ok", "Enforcing")
    assert found["libcdsprpc.so"] == ("ok", "/vendor/lib64/libcdsprpc.so")
    assert found["FastRPC device"] == ("ok", "/dev/fastrpc-cdsp")
    assert found["unsigned PD"] == ("ok", "/vendor/dsp/cdsp/fastrpc_shell_unsigned_3")
    assert found["QNN libraries"] == ("ok", f"for Hexagon v75, in {TARGET}/lib")
    assert found["folder"] == ("ok", f"{TARGET}, f2fs on /data")
    assert found["direct reads"] == ("ok", "work")
    assert found["bundle"] == ("ok", f"EStream {__version__}")
    assert found["files"] == ("ok", "6, as they were pushed")
    assert found["Python"] == ("ok", "3.12.1, starts")
    assert found["numpy"] == ("ok", "2.1")
    request = {"estream": 1, "libraries": f"{TARGET}/lib", "folder": TARGET}
    assert json.loads(phone.at("request").read_text().replace(str(phone.root), "")) == request
    models = {finding.found for finding in diagnosis.findings if finding.name == "model" and finding.area == "estream"}
    assert models == {
        "whole.estream",
        "no contexts.estream: no contexts for sm8650",
        "half.estream: not completely pushed",
    }
    assert not list(phone.at().glob(".estream-doctor*"))
    assert main(["device", "doctor"]) == 0
    assert capsys.readouterr().out.endswith("nothing stands in the way of a run on htp\n")


def test_a_phone_with_nothing_on_it(phone: FakePhone, device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    phone.free(100 << 20)
    diagnosis, found = look(device)
    assert not diagnosis.ok
    assert found["bundle"] == ("missing", f"none in {TARGET}")
    assert found["free space"][0] == "warning"
    assert not phone.at().exists()
    assert main(["device", "doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and answer["backend"] == "htp" and len(answer["findings"]) == len(diagnosis.findings)


def remove(path: str) -> Callable[[FakePhone], None]:
    return lambda phone: (phone.root / path).unlink()


def says(program: str, script: str) -> Callable[[FakePhone], None]:
    return lambda phone: phone.command(program, script)


def direct(answer: str) -> Callable[[FakePhone], None]:
    """What dd answers to direct reads."""
    return says("dd", f'case "$*" in *iflag*) {answer};; *) exec /bin/dd "$@";; esac')


def soc(model: str, abi: str = "arm64-v8a") -> Callable[[FakePhone], None]:
    return says("getprop", f"echo '[ro.product.cpu.abi]: [{abi}]'; echo '[ro.soc.model]: [{model}]'")


def little(phone: FakePhone) -> None:
    phone.file("proc/meminfo", "MemTotal: 4000000 kB\nMemAvailable: 500000 kB\n")


UNSIGNED = "fastrpc_shell_unsigned_3"
DENIED = 'echo "$0: Permission denied" >&2; exit 1'
# What is wrong, the finding, whether a run on htp and one on cpu work all the same.
WRONG: list[tuple[Callable[[FakePhone], None], str, str, str, bool, bool]] = [
    (soc("SM8650", "armeabi-v7a"), "Android", "missing", "armeabi-v7a", False, False),
    (soc("SM7450"), "SoC", "missing", "SM7450, which EStream does not know", False, True),
    (remove("vendor/lib64/libcdsprpc.so"), "libcdsprpc.so", "missing", "not in /vendor/lib64", False, True),
    (remove(f"vendor/dsp/cdsp/{UNSIGNED}"), "unsigned PD", "missing", f"no {UNSIGNED}", False, True),
    (remove("dev/fastrpc-cdsp"), "FastRPC device", "warning", "none of", True, True),
    (says("ls", DENIED), "DSP files", "warning", "SELinux", True, True),
    (says("ls", DENIED), "libcdsprpc.so", "warning", "SELinux", True, True),
    (says("dumpsys", "echo Thermal Status: 3"), "heat", "warning", "throttling severe", True, True),
    (says("dumpsys", "exit 1"), "heat", "warning", "not told", True, True),
    (little, "memory", "warning", "488 MiB available", True, True),
    (
        direct("echo 'dd: read: Invalid argument' >&2; exit 1"),
        "direct reads",
        "warning",
        "Invalid argument",
        True,
        True,
    ),
    (direct("echo other"), "direct reads", "warning", "other bytes", True, True),
    (direct("echo 'dd: bad iflag direct' >&2; exit 1"), "direct reads", "ok", "not tried", True, True),
    (says("dd", DENIED), "folder", "missing", "cannot be written to", False, False),
    (says("chmod", "exit 1"), "folder", "missing", "holds no programs", False, False),
]


@pytest.mark.parametrize(("wrong", "name", "status", "words", "htp", "cpu"), WRONG)
def test_one_thing_wrong(
    phone: FakePhone,
    device: Device,
    tmp_path: Path,
    wrong: Callable[[FakePhone], None],
    name: str,
    status: str,
    words: str,
    htp: bool,
    cpu: bool,
) -> None:
    with_bundle(tmp_path, device)
    wrong(phone)
    diagnosis, found = look(device)
    assert found[name][0] == status and words in found[name][1], found[name]
    assert (diagnosis.ok, dataclasses.replace(diagnosis, backend="cpu").ok) == (htp, cpu)


def test_libraries_of_another_hexagon(phone: FakePhone, device: Device, tmp_path: Path) -> None:
    with_bundle(tmp_path, device)
    phone.at("lib/libQnnHtpV75Skel.so").unlink()
    _, found = look(device)
    assert found["QNN libraries"] == ("missing", "not in the bundle: libQnnHtpV75Skel.so")
    assert found["files"] == ("missing", "1 of 6 are missing, or not as they were pushed: lib/libQnnHtpV75Skel.so")


def test_a_bundle_of_another_version(phone: FakePhone, device: Device, tmp_path: Path) -> None:
    with_bundle(tmp_path, device, estream="0.0.9")
    diagnosis, found = look(device)
    assert not diagnosis.ok and found["bundle"] == ("missing", f"EStream 0.0.9; this is EStream {__version__}")
    phone.at("bundle.json").write_text("{")
    assert look(device)[1]["bundle"] == ("missing", f"{TARGET}/bundle.json is damaged")


@pytest.mark.parametrize(
    ("python", "words", "step"),
    [
        (
            "echo 'CANNOT LINK EXECUTABLE: library \"libz.so.1\" not found' >&2; exit 1",
            "libz.so.1",
            "A library is missing",
        ),
        ("echo 'sh: python3: Permission denied' >&2; exit 126", "permissions or SELinux", "Leave --target out"),
        ("kill -SEGV $$", "crashed (status 139)", "Make a bundle"),
        ("exit 3", "status 3", "Push it"),
    ],
)
def test_a_python_that_does_not_start(
    phone: FakePhone, device: Device, tmp_path: Path, python: str, words: str, step: str
) -> None:
    with_bundle(tmp_path, device, python=f"#!/bin/sh\n{python}\n")
    diagnosis, _ = look(device, "cpu")
    (finding,) = [finding for finding in diagnosis.findings if finding.name == "Python"]
    assert finding.status == "missing" and words in finding.found and step in str(finding.next_step)
    assert not diagnosis.ok


ERROR = {"estream": 1, "event": "error", "class": "UsageError", "thing": "another version", "exit_status": 2}
ERROR |= {"asked": None, "had": 1, "next_step": "Push it"}
NO_ANSWER = "before it had an answer: noise"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            "echo 'ImportError: no numpy' >&2; exit 1",
            f"the phone's program ended with status 1 {NO_ANSWER} | ImportError: no numpy",
        ),
        ("exit 0", f"the phone's program ended with status 0 {NO_ANSWER}"),
        (f"echo '{json.dumps(ERROR)}'; exit 2", "another version: 1"),
        ('echo \'{"estream": 1, "event": "result", "findings": [{"x": 1}]}\'', "its findings cannot be read"),
    ],
)
def test_a_program_that_fails(phone: FakePhone, device: Device, tmp_path: Path, answer: str, words: str) -> None:
    with_bundle(tmp_path, device, python=PYTHON.replace("ANSWER", answer))
    assert look(device)[1]["program"] == ("missing", words)


@pytest.mark.parametrize(("root", "words"), [("/sdcard/estream", "shared storage"), ("/x", "read-only")])
def test_folders_that_are_not_fit(phone: FakePhone, device: Device, root: str, words: str) -> None:
    found = {finding.name: finding for finding in examine_phone(device, PhoneLayout(root)).findings}
    assert found["folder"].status == "missing" and words in found["folder"].found
    assert "direct reads" not in found
    assert os.listdir(phone.root / "sdcard") == []


def test_a_connection_that_breaks_is_no_finding(phone: FakePhone, device: Device) -> None:
    phone.fail("thermalservice", "gone")
    with pytest.raises(DeviceError, match="no longer attached"):
        examine_phone(device, PhoneLayout())


@pytest.mark.parametrize(
    ("model", "platform", "name"),
    [
        ("SM8650-AC", "", "sm8650"),
        ("SM8550P", "kalama", "sm8550"),
        ("", "sun", "sm8750"),
        ("QCOM", "canoe", "sm8850"),
        ("SM7450", "taro", None),
        ("", "", None),
    ],
)
def test_socs(model: str, platform: str, name: str | None) -> None:
    soc = find_phone_soc({"ro.soc.model": model, "ro.board.platform": platform})
    assert (soc and soc.name) == name


def test_models_that_are_not_as_they_were_pushed(phone: FakePhone, device: Device, tmp_path: Path) -> None:
    with_bundle(tmp_path, device)
    for name in ("removed", "changed", "forgotten"):
        push_model(tmp_path, device, name, "sm8650")
    phone.at("models/removed/experts.bin").unlink()
    phone.at("models/changed/experts.bin").write_bytes(b"experts.bim")
    os.utime(phone.at("models/changed/experts.bin"), (1, 1))
    phone.at(f"models/forgotten/{RECORD}").unlink()
    diagnosis, _ = look(device)
    models = {one.found: one for one in diagnosis.findings if one.name == "model" and one.area == "estream"}
    assert set(models) == {
        "removed: 1 of 3 are missing, or not as they were pushed: experts.bin",
        "changed: 1 of 3 are missing, or not as they were pushed: experts.bin",
        "forgotten: 1 of 1 are missing, or not as they were pushed: model.json",
    }
    for finding in models.values():
        name = finding.found.partition(":")[0]
        assert (finding.status, finding.next_step) == ("warning", f"Push it again: estream device push {name}")
