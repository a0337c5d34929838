"""`estream device bundle`, `doctor`, `push` and `clean` with the real adb client: what arrives, what is not sent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.device.cli import Estream
from tests.device.conftest import NewPhone
from tests.device.phone import Phone
from tests.device.ready import HOSTILE, LAYOUT, Ready
from tests.support.faults import make_package

MIB = 1 << 20
LARGEST = "lib/libonnxruntime.so"  # of the small bundle


@pytest.fixture(scope="module")
def small_bundle(ready: Ready, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one large file and a small one."""
    folder = tmp_path_factory.mktemp("small") / "bundle"
    document = json.loads((ready.bundle / "bundle.json").read_text())
    document["files"] = [
        entry for entry in document["files"] if entry["path"] in (LARGEST, "app/estream_phone.py", "python/bin/python3")
    ]
    for entry in document["files"]:
        target = folder / entry["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ready.bundle / entry["path"]).read_bytes())
    (folder / "bundle.json").write_text(json.dumps(document))
    return folder


def assert_pushed(phone: Phone, bundle: Path) -> None:
    """Every file is there with its bytes, and nothing half-sent."""
    root = phone.path(LAYOUT.root)
    for entry in json.loads((bundle / "bundle.json").read_text())["files"]:
        path = root / entry["path"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"], path
        assert path.stat().st_mode & 0o777 == entry["mode"], path
    assert (root / "bundle.json").read_bytes() == (bundle / "bundle.json").read_bytes()
    assert not [path for path in root.rglob("*.estream-*") if path.name != ".estream-pushed.json"]


def test_the_downloads_make_a_bundle(ready: Ready) -> None:
    answer = ready.bundled.json

    assert (ready.bundled.status, answer["ok"], answer["path"]) == (0, True, str(ready.bundle))
    assert set(answer["versions"]) == {"numpy", "onnxruntime", "plugin", "python", "qairt"}
    assert answer["socs"] == ["sm8550", "sm8650", "sm8750", "sm8850"]


def test_a_bundle_for_bionic_names_what_this_phone_lacks(ready: Ready, downloads: Path, tmp_path: Path) -> None:
    said = ready.estream.here("device", "bundle", "--from", downloads, "--out", tmp_path / "none")

    assert said.status == 1
    assert "missing: libc.so.6, needed by " in said.out
    assert not (tmp_path / "none").exists()


def test_doctor_says_what_a_new_phone_lacks(ready: Ready) -> None:
    before = ready.doctor_before

    assert (before.status, before.err) == (1, "")
    assert f"missing  bundle          none in {LAYOUT.root}" in before.out
    assert "-> Make one: estream device bundle. Push it: estream device push --bundle BUNDLE" in before.out
    assert before.out.endswith("something stands in the way of a run on cpu\n")


def test_doctor_after_the_push(ready: Ready) -> None:
    said = ready.estream("doctor", "--backend", "cpu", "--json")

    answer = said.json
    assert (said.status, said.err, answer["ok"]) == (0, "", True)
    found = {(one["area"], one["name"]): (one["status"], one["found"]) for one in answer["findings"]}
    assert found["estream", "Python"] == ("ok", "3.11.2, starts")
    assert found["estream", "files"][0] == "ok"
    assert found["software, as Python there sees it", "ONNX Runtime"][0] == "ok"
    assert found["npu, as Python there sees it", "libQnnHtp"][0] == "ok"  # loads, without an NPU
    assert found["npu, as Python there sees it", "libcdsprpc.so"][0] == "missing"
    assert found["storage, as Python there sees it", "direct reads"] == ("ok", "work")
    model = next(one for one in answer["findings"] if one["name"] == "model" and one["area"] == "estream")
    assert model["found"] == f"{HOSTILE}: no contexts for sm8650"
    ready.wait_for_silence()


def test_a_push_arrives_whole(ready: Ready) -> None:
    assert (ready.pushed.status, ready.bundled.err.count("error")) == (0, 0)
    assert_pushed(ready.phone, ready.bundle)
    there = ready.phone.path(LAYOUT.models) / HOSTILE
    here = {path.relative_to(ready.package): path for path in ready.package.rglob("*") if path.is_file()}
    assert {path.relative_to(there) for path in there.rglob("*") if path.is_file()} == {
        *here,
        Path(".estream-pushed.json"),
    }
    for name, path in here.items():
        assert (there / name).read_bytes() == path.read_bytes()
    assert [path.name for path in ready.phone.path("/data/local/tmp").iterdir()] == ["estream"]  # no name was a command


def test_a_second_push_sends_nothing(ready: Ready) -> None:
    ready.phone.clear_log()

    said = ready.estream("push", "--bundle", ready.bundle, ready.package, "--json")

    assert [(one["files_sent"], one["bytes_sent"]) for one in said.json["pushed"]] == [(0, 0), (0, 0)]
    assert ready.phone.sent() == 0
    assert not [line for line in ready.phone.log() if "sha256sum" in line]  # nor is anything hashed


def test_an_interrupted_push_goes_on_where_it_ended(ready: Ready, new_phone: NewPhone, small_bundle: Path) -> None:
    phone = new_phone()
    estream = Estream(ready.estream.adb, phone)
    size = (small_bundle / LARGEST).stat().st_size
    phone.drop_push_after(8 * MIB)

    broken = estream("push", "--bundle", small_bundle)

    assert broken.status == 1
    assert f"estream: error: sending {LARGEST}: " in broken.err
    assert not phone.path(f"{LAYOUT.root}/bundle.json").exists()
    phone.wait_for_no_process()
    there = phone.path(f"{LAYOUT.root}/{LARGEST}.estream-part").stat().st_size
    assert 8 * MIB <= there < size
    ready.estream.adb.connect(phone)
    phone.clear_log()

    resumed = estream("push", "--bundle", small_bundle, "--json").json["pushed"][0]

    assert resumed["bytes_resumed"] == there
    assert size - there <= phone.sent() < size - there + 64 * 1024
    assert_pushed(phone, small_bundle)


def test_a_push_whose_daemon_dies(ready: Ready, new_phone: NewPhone, small_bundle: Path) -> None:
    phone = new_phone()
    estream = Estream(ready.estream.adb, phone)
    part = phone.path(f"{LAYOUT.root}/{LARGEST}.estream-part")

    with estream.running("push", "--bundle", small_bundle) as pushing:
        pushing.wait_for(part.exists)
        phone.kill_daemon()
        broken = pushing.finish()

    assert broken.status == 1
    assert phone.serial in broken.err and "Traceback" not in broken.err
    phone.wait_for_no_process()
    assert estream.clients() == []
    phone.start_daemon()
    ready.estream.adb.connect(phone)
    assert estream("push", "--bundle", small_bundle).status == 0
    assert_pushed(phone, small_bundle)


def test_a_phone_without_room(ready: Ready, new_phone: NewPhone, small_bundle: Path) -> None:
    phone = new_phone(disk=48 * MIB)
    estream = Estream(ready.estream.adb, phone)
    phone.clear_log()

    said = estream("push", "--bundle", small_bundle)

    assert said.status == 1
    assert f"not enough free space on {phone.serial}: need " in said.err
    assert "estream device clean" in said.err
    assert phone.sent() == 0


def test_clean_frees_what_was_pushed(ready: Ready, new_phone: NewPhone, small_bundle: Path, tmp_path: Path) -> None:
    phone = new_phone()
    estream = Estream(ready.estream.adb, phone)
    others = make_package(tmp_path)
    assert estream("push", "--bundle", small_bundle, ready.package, others).status == 0
    root = phone.path(LAYOUT.root)
    (root / "runs/old").mkdir(parents=True)
    (root / "bytecode").mkdir()
    own = root / "own file"
    own.write_text("of the user")

    would = estream("clean", "--all", "--dry-run", "--json").json
    one = estream("clean", HOSTILE)
    left = sorted(path.name for path in (root / "models").iterdir())
    unknown = estream("clean", HOSTILE)
    everything = estream("clean", "--all", "--json").json

    size = (small_bundle / LARGEST).stat().st_size
    assert would["bytes"] > size and f"{LAYOUT.root}/models" in would["paths"]
    assert one.status == 0 and " freed on " in one.out
    assert left == [others.name]
    assert (unknown.status, unknown.out) == (1, "") and f"had {others.name}" in unknown.err
    assert size < everything["bytes"] < would["bytes"]
    assert list(root.iterdir()) == [own]
    own.unlink()
    assert estream("clean", "--all").status == 0
    assert not root.exists()
