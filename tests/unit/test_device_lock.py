"""Two pushes to one fake phone: the second is told, and whoever was killed is in nobody's way."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from android.adb import Device, DeviceError, choose_device
from android.contents import Contents, bundle_contents
from android.layout import PhoneLayout
from android.lock import LOCK, push_lock
from android.push import push
from tests.support.fake_phone import SERIAL, TARGET, FakePhone, plugged_in
from tests.unit.test_device_push import assert_same, write_bundle

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePhone:
    return plugged_in(tmp_path / "phone", monkeypatch)


@pytest.fixture
def device(phone: FakePhone) -> Device:
    return choose_device(None)


@pytest.fixture
def bundle(tmp_path: Path) -> Contents:
    return bundle_contents(write_bundle(tmp_path / "bundle", {"app/estream_phone.py": b"print()\n"}), PhoneLayout())


def test_two_pushes_at_once(phone: FakePhone, device: Device, bundle: Contents) -> None:
    with push_lock(device, TARGET), pytest.raises(DeviceError) as caught:
        push(device, TARGET, bundle)
    assert str(caught.value) == (
        f"another push to {TARGET} on {SERIAL} is going on. Wait for its end. If there is none: "
        f"adb -s {SERIAL} shell rm -r {TARGET}/{LOCK}"
    )
    assert not phone.at().exists()
    push(device, TARGET, bundle)
    assert_same(phone, bundle)


@pytest.mark.parametrize("pid", ["", "4194305"])  # of no process: the most that there can be, and one more
def test_a_lock_that_a_restart_left(phone: FakePhone, device: Device, bundle: Contents, pid: str) -> None:
    phone.file(f"{TARGET[1:]}/{LOCK}/pid", pid)
    push(device, TARGET, bundle)
    assert_same(phone, bundle)


def test_a_killed_push_does_not_keep_the_lock(phone: FakePhone, device: Device, bundle: Contents) -> None:
    hold = f"import time\nwith push_lock(choose_device(None), {TARGET!r}): print(1, flush=True), time.sleep(60)"
    code = f"from android.adb import choose_device\nfrom android.lock import push_lock\n{hold}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=CHECKOUT) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert phone.at(LOCK).is_dir()
        process.kill()
    end = time.monotonic() + 10
    while phone.at(LOCK).exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    push(device, TARGET, bundle)
    assert_same(phone, bundle)


def test_a_lock_that_cannot_be_made(phone: FakePhone, device: Device, bundle: Contents) -> None:
    phone.command("mkdir", 'echo "mkdir: $2: No space left on device" >&2; exit 1')
    with pytest.raises(DeviceError, match=r"push on 1a2b3c4d: status 1 \(had mkdir: .*No space left.*\). Free space"):
        push(device, TARGET, bundle)
