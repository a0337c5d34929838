"""Cleaning a fake phone: only what EStream put there, only where it may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from android.adb import DeviceError, choose_device
from android.clean import clean, models_on
from android.layout import PhoneLayout
from estream.cli.main import main
from estream.errors import UsageError
from tests.support.fake_phone import TARGET, FakePhone, plugged_in

HOSTILE = "a 'b'; $(touch oops) -rf ä.estream"


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePhone:
    made = plugged_in(tmp_path, monkeypatch)
    for name in (
        "models/x.estream/pool",
        f"models/{HOSTILE}/pool",
        "runs/1/log",
        "python/bin/python3",
        "lib/a.so",
        "app/b",
    ):
        made.file(f"{TARGET[1:]}/{name}", "x" * 100_000)
    made.file(f"{TARGET[1:]}/bundle.json", "{}")
    made.file(f"{TARGET[1:]}/mine.txt", "x")
    return made


def there(phone: FakePhone) -> set[str]:
    return {path.name for path in phone.at().iterdir()} | {path.name for path in phone.at("models").glob("*")}


def test_one_model_by_name(phone: FakePhone, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "clean", HOSTILE, "--dry-run"]) == 0
    assert f"would remove {TARGET}/models/{HOSTILE}" in capsys.readouterr().out
    assert HOSTILE in there(phone)
    assert main(["device", "clean", HOSTILE, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["paths"] == [f"{TARGET}/models/{HOSTILE}"] and answer["bytes"] >= 100_000
    assert there(phone) == {"models", "runs", "python", "lib", "app", "bundle.json", "mine.txt", "x.estream"}
    assert not list(phone.folder.rglob("oops"))


def test_runs_models_and_everything(phone: FakePhone) -> None:
    device = choose_device(None)
    assert clean(device, PhoneLayout(), runs=True).paths == (f"{TARGET}/runs",)
    assert clean(device, PhoneLayout(), runs=True).bytes == 0
    assert clean(device, PhoneLayout(), all_models=True).bytes >= 200_000
    assert there(phone) == {"python", "lib", "app", "bundle.json", "mine.txt"}
    clean(device, PhoneLayout(), everything=True)
    assert there(phone) == {"mine.txt"}  # somebody's own
    phone.at("mine.txt").unlink()
    clean(device, PhoneLayout(), everything=True)
    assert not phone.at().exists()


@pytest.mark.parametrize("root", ["/data/local/tmp", "/data/local", "/", "/sdcard/x", "/data/local/tmpx/y"])
def test_other_folders_are_not_touched(phone: FakePhone, root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "clean", "--all", "--target", root]) == 2
    assert "below /data/local/tmp only" in capsys.readouterr().err


def test_nor_by_way_of_a_link(phone: FakePhone) -> None:
    (phone.root / "sdcard/models").mkdir()
    (phone.root / "data/local/tmp/link").symlink_to(phone.root / "sdcard")
    with pytest.raises(UsageError, match=r"below /data/local/tmp only \(asked .*/sdcard\)"):
        clean(choose_device(None), PhoneLayout("/data/local/tmp/link"), everything=True)
    assert (phone.root / "sdcard/models").exists()


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/", ""])
def test_names_that_lead_elsewhere(phone: FakePhone, name: str) -> None:
    with pytest.raises(UsageError, match="no name of a model"):
        clean(choose_device(None), PhoneLayout(), models=[name])


def test_models_that_are_not_there(phone: FakePhone) -> None:
    device = choose_device(None)
    assert sorted(models_on(device, PhoneLayout())) == sorted([HOSTILE, "x.estream"])
    with pytest.raises(DeviceError, match=r"no such model on 1a2b3c4d \(asked y.estream, had .*x.estream"):
        clean(device, PhoneLayout(), models=["y.estream", "x.estream"])
    assert phone.at("models/x.estream").exists()


def test_nothing_is_removed_without_being_named(phone: FakePhone, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "clean"]) == 2
    assert "nothing to remove" in capsys.readouterr().err
    assert phone.calls() == []


@pytest.mark.parametrize("words", [["--all", "x.estream"], ["--all", "--models"], ["--models", "x.estream"]])
def test_what_is_named_beside_all_is_refused(
    phone: FakePhone, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["device", "clean", *words]) == 2
    assert "removes more than what is named beside it" in capsys.readouterr().err
    assert phone.calls() == [] and phone.at("models/x.estream").exists()


@pytest.mark.parametrize("target", ["estream", "/data/local/tmp/../x", ""])
def test_targets_that_are_no_folders_of_a_phone(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["device", "clean", "--all", "--target", target])
    assert left.value.code == 2
    assert "argument --target: must be an absolute path on the phone, without .. (asked" in capsys.readouterr().err
