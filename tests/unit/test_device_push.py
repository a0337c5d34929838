"""Pushing to a fake phone: what is sent and what is not, interruptions, damage, space, names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from android import push as push_module
from android import transfer
from android.adb import Device, DeviceError, choose_device
from android.contents import Contents, bundle_contents, package_contents
from android.layout import PhoneLayout
from android.push import PushReport, push
from android.record import RECORD
from estream.cli.main import main
from estream.errors import EStreamError, PackageError, UsageError
from estream.package.contexts import ContextEntry, ContextFile, expected_manifest, file_names
from estream.package.reader import Package
from estream.runtime.soc import find_soc
from tests.support.fake_phone import SERIAL, TARGET, FakePhone, plugged_in
from tests.support.faults import make_package

LAYOUT = PhoneLayout()


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePhone:
    made = plugged_in(tmp_path / "phone", monkeypatch)
    monkeypatch.setattr(transfer, "SMALL", 4096)
    monkeypatch.setattr(push_module, "SMALL", 4096)
    return made


@pytest.fixture
def device(phone: FakePhone) -> Device:
    return choose_device(None)


def write_bundle(folder: Path, files: dict[str, bytes], estream: str = "0.1.0") -> Path:
    entries = []
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        mode = 0o755 if "bin/" in name else 0o644
        entries.append({"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "mode": mode})
    made = {"versions": {}, "known_from": {}, "socs": []}
    (folder / "bundle.json").write_text(
        json.dumps({"format": "estream-bundle", "version": 1, "estream": estream, **made, "files": entries})
    )
    return folder


FILES = {
    "python/bin/python3": b"#!/bin/sh\n",
    "python/lib/a 'quoted'; $(touch oops) ä.py": b"x = 1\n",
    "python/lib/" + "deep/" * 30 + "end.py": b"",
    "lib/libbig.so": os.urandom(300_000),
    "app/estream_phone.py": b"print()\n",
}


@pytest.fixture
def bundle(tmp_path: Path) -> Contents:
    return bundle_contents(write_bundle(tmp_path / "bundle", FILES), LAYOUT)


def assert_same(phone: FakePhone, contents: Contents) -> None:
    place = phone.root / contents.folder.lstrip("/")
    for file in (*contents.files, contents.manifest):
        assert (place / file.path).read_bytes() == file.local.read_bytes(), file.path
        assert (place / file.path).stat().st_mode & 0o777 == file.mode
    own = {file.path for file in (*contents.files, contents.manifest)} | {RECORD}
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == own


def sent(report: PushReport) -> tuple[int, int, int]:
    return report.files_sent, report.bytes_sent, report.bytes_resumed


def test_everything_is_sent_once(phone: FakePhone, device: Device, bundle: Contents) -> None:
    told: list[tuple[str, int, int]] = []
    report = push(device, TARGET, bundle, lambda *step: told.append(step))
    assert sent(report) == (len(FILES) + 1, bundle.nbytes, 0)
    assert told[0] == ("bundle", 0, bundle.nbytes) and told[-1] == ("bundle", bundle.nbytes, bundle.nbytes)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert_same(phone, bundle)
    assert not list(phone.root.rglob("oops"))
    before = len(phone.calls())
    again = push(device, TARGET, bundle)
    assert sent(again) == (0, 0, 0)
    assert (again.files_skipped, again.bytes_skipped) == (len(FILES) + 1, bundle.nbytes)
    new = [" ".join(call) for call in phone.calls()[before:]]
    assert len(new) <= 4 and not any("sha256sum" in call or "cat >" in call for call in new)


@pytest.mark.parametrize("how", ["touched", "changed", "removed", "record lost", "record damaged"])
def test_what_changed_on_the_phone_is_seen(phone: FakePhone, device: Device, bundle: Contents, how: str) -> None:
    push(device, TARGET, bundle)
    place = phone.at("lib/libbig.so")
    if how == "touched":
        os.utime(place, (1, 1))
    elif how == "changed":
        place.write_bytes(b"y" + place.read_bytes()[1:])
        os.utime(place, (1, 1))
    elif how == "removed":
        place.unlink()
    elif how == "record lost":
        phone.at(RECORD).unlink()
    else:
        phone.at(RECORD).write_text('{"version": 1, "files": {"lib": 3}}')
    report = push(device, TARGET, bundle)
    # The manifest goes with what it vouches for.
    expected = bundle.manifest.nbytes + 300_000 if how in ("changed", "removed") else 0
    assert report.bytes_sent == expected
    assert_same(phone, bundle)
    assert sent(push(device, TARGET, bundle)) == (0, 0, 0)


@pytest.mark.parametrize("cut", [1, 70_000, 299_999])
def test_an_interrupted_push_goes_on(phone: FakePhone, device: Device, bundle: Contents, cut: int) -> None:
    phone.fail("exec cat >>", "cut", cut)
    with pytest.raises(DeviceError, match=r"sending lib/libbig\.so: the connection to 1a2b3c4d broke") as caught:
        push(device, TARGET, bundle)
    assert "run the command again: a push goes on where it ended" in str(caught.value.next_step)
    assert not phone.at("lib/libbig.so").exists() and not phone.at("bundle.json").exists()
    assert phone.at("lib/libbig.so.estream-part").stat().st_size == cut
    report = push(device, TARGET, bundle)
    assert sent(report) == (2, 300_000 - cut + bundle.manifest.nbytes, cut)
    assert_same(phone, bundle)


def test_the_beginning_of_another_file_is_not_continued(phone: FakePhone, device: Device, bundle: Contents) -> None:
    part = phone.at("lib/libbig.so.estream-part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"other" * 1000)
    phone.at("lib/gone.so.estream-part").write_bytes(b"x")
    assert push(device, TARGET, bundle).bytes_resumed == 0
    assert_same(phone, bundle)


def test_a_connection_that_breaks_in_a_batch(phone: FakePhone, device: Device, bundle: Contents) -> None:
    phone.fail("tar -x", "kill", 2000)
    with pytest.raises(DeviceError, match="broke"):
        push(device, TARGET, bundle)
    assert not phone.at("app").exists()
    push(device, TARGET, bundle)
    assert_same(phone, bundle)


def test_damage_on_the_way(phone: FakePhone, device: Device, bundle: Contents) -> None:
    phone.fail("exec cat >>", "damage")
    with pytest.raises(DeviceError, match=r"lib/libbig.so arrived damaged. Push again"):
        push(device, TARGET, bundle)
    assert not list(phone.at("lib").glob("*"))
    push(device, TARGET, bundle)
    assert_same(phone, bundle)


@pytest.mark.parametrize("name", ["lib/libbig.so", "app/estream_phone.py"])
def test_damage_here(phone: FakePhone, device: Device, bundle: Contents, tmp_path: Path, name: str) -> None:
    path = tmp_path / "bundle" / name
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(PackageError, match=f"{name} is damaged: it does not match its SHA-256") as caught:
        push(device, TARGET, bundle)
    step = "Build the bundle again, and push again. Or remove what was sent: estream device clean --all"
    assert str(caught.value.next_step).startswith(step)
    assert not [path for path in phone.at().rglob("*") if "estream-incoming" in path.name]
    assert not phone.at(name).exists() and not phone.at("bundle.json").exists()


def test_too_little_space_is_seen_before_anything_is_sent(phone: FakePhone, device: Device, bundle: Contents) -> None:
    phone.free(64 << 20)
    with pytest.raises(
        DeviceError, match=r"not enough free space on 1a2b3c4d: need 64.3 MiB .* have 64.0 MiB"
    ) as caught:
        push(device, TARGET, bundle)
    assert "device clean" in str(caught.value.next_step)
    assert not phone.at().exists()


def test_a_phone_that_is_full_after_all(phone: FakePhone, device: Device, bundle: Contents) -> None:
    phone.fail("exec cat >>", "full", 1000)
    with pytest.raises(DeviceError, match=r"status 1 \(had cat: write error: No space left on device\). Free space"):
        push(device, TARGET, bundle)


def test_a_phone_that_takes_no_more_bytes(
    phone: FakePhone, device: Device, bundle: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALL_S", 0.5)
    phone.fail("exec cat >>", "hang")
    with pytest.raises(DeviceError, match=r"lib/libbig.so: the phone takes no more bytes since 0.5 s"):
        push(device, TARGET, bundle)


@pytest.mark.parametrize(
    ("root", "words"), [("/sdcard/estream", "fuse on /sdcard is shared storage"), ("/x", "read-only")]
)
def test_folders_that_are_not_fit(phone: FakePhone, device: Device, bundle: Contents, root: str, words: str) -> None:
    with pytest.raises(DeviceError, match=words) as caught:
        push(device, root, bundle)
    assert "Leave --target out" in str(caught.value.next_step)
    assert not (phone.root / root.lstrip("/")).exists()


def test_files_of_earlier_pushes_go_and_others_stay(
    phone: FakePhone, device: Device, bundle: Contents, tmp_path: Path
) -> None:
    push(device, TARGET, bundle)
    phone.at("mine.txt").write_text("x")
    smaller = {name: data for name, data in FILES.items() if not name.startswith("lib/")}
    shutil.rmtree(tmp_path / "bundle")
    other = bundle_contents(write_bundle(tmp_path / "bundle", smaller | {"lib/new.so": b"n"}), LAYOUT)
    report = push(device, TARGET, other)
    assert (report.removed, report.files_sent) == (1, 2)
    assert not phone.at("lib/libbig.so").exists()
    assert phone.at("mine.txt").read_text() == "x"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with (made up) contexts for two SoCs."""
    path = make_package(tmp_path).rename(tmp_path / "a 'b'; $(touch oops).estream")
    for name in ("sm8550", "sm8650"):
        files = dict.fromkeys(file_names("expert"), name.encode())
        entry = ContextEntry("0" * 64, {file: ContextFile.of(data) for file, data in files.items()}, {})
        manifest = dataclasses.replace(
            expected_manifest(Package.open(path), find_soc(name), "1"), graphs={"expert": entry}
        )
        folder = path / "graphs/htp" / name
        folder.mkdir(parents=True)
        for file, data in {**files, "manifest.json": manifest.to_json()}.items():
            (folder / file).write_bytes(data)
    return path


def test_a_package_with_a_hostile_name(
    phone: FakePhone, package: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["device", "push", str(package), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (pushed,) = answer["pushed"]
    assert (answer["serial"], pushed["label"], pushed["left_out"]) == (SERIAL, package.name, ["graphs/htp/sm8550"])
    assert_same(phone, package_contents(package, LAYOUT, "sm8650"))
    assert Package.open(phone.at("models") / package.name).manifest.files
    assert main(["device", "push", str(package)]) == 0
    out = capsys.readouterr().out
    assert f"{package.name}: nothing sent" in out and "left out: graphs/htp/sm8550" in out
    assert not list(tmp_path.rglob("oops"))


def test_what_is_wrong_here_is_said_before_a_phone_is_looked_for(
    phone: FakePhone, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other" / package.name
    shutil.copytree(package, other)
    cases: Sequence[tuple[list[str], int, str]] = [
        ([], 2, "nothing to push"),
        ([str(tmp_path / "none")], 2, "none is not a packed model (had no such folder). Give the folder"),
        ([__file__], 2, "test_device_push.py is not a packed model (had a file). Give the folder"),
        (["--bundle", str(tmp_path)], 1, "is not a bundle"),
        ([str(package), f"{package}/."], 2, "is named twice. Name it once"),
        ([str(package), str(other)], 2, "two packages have the same name"),
    ]
    for arguments, status, words in cases:
        assert main(["device", "push", *arguments]) == status
        assert words in capsys.readouterr().err
    os.truncate(package / "experts.safetensors", 10)
    assert main(["device", "push", str(package)]) == 1
    assert "size in bytes" in capsys.readouterr().err
    assert phone.calls() == []


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "a/../b", ".", "a\nb", "a\\b", ""])
def test_files_outside_of_the_bundle_are_refused(tmp_path: Path, path: str) -> None:
    entry = {"path": path, "bytes": 0, "sha256": "0" * 64, "mode": 0o644}
    made = json.loads((write_bundle(tmp_path, {}) / "bundle.json").read_text())
    (tmp_path / "bundle.json").write_text(json.dumps({**made, "files": [entry]}))
    with pytest.raises(EStreamError, match="a field is missing or wrong: file"):
        bundle_contents(tmp_path, LAYOUT)


def test_names_that_a_phone_cannot_have(tmp_path: Path) -> None:
    path = make_package(tmp_path).rename(tmp_path / "a\nb.estream")
    with pytest.raises(UsageError, match="no name for a folder on the phone"):
        package_contents(path, LAYOUT, None)


def test_what_python_compiled_goes_with_a_push_of_the_bundle(
    phone: FakePhone, device: Device, bundle: Contents
) -> None:
    push(device, TARGET, bundle)
    phone.file(f"{TARGET[1:]}/bytecode/x.pyc", "")
    assert sent(push(device, TARGET, bundle)) == (0, 0, 0)
    assert not phone.at("bytecode").exists()


def test_no_message_names_sh(phone: FakePhone, device: Device, bundle: Contents) -> None:
    phone.fail("find . -type f -exec stat", "closed")
    with pytest.raises(DeviceError, match=f"^the connection to {SERIAL} broke .had error: closed"):
        push(device, TARGET, bundle)


def test_one_wording_for_what_is_no_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = str(tmp_path / "none.estream")
    for words in (
        ["run", none, "--ids", "1"],
        ["bench", none],
        ["calibrate", none],
        ["push", none],
        ["bundle", "--from", str(tmp_path), "--out", str(tmp_path / "out"), "--package", none],
    ):
        assert main(["device", *words]) == 2
        expected = "is not a packed model (had no such folder). Give the folder that estream pack wrote\n"
        assert capsys.readouterr().err == f"estream: error: {none} {expected}"
