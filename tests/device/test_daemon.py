"""The real adb client against the stand-in daemon."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.device.conftest import NewPhone
from tests.device.phone import Adb, Phone

TMP = "/data/local/tmp"
AWKWARD = [
    "two words",
    "it's",
    'a "quoted" one',
    "semi;colon",
    "$(touch gone)",
    "`id`",
    "a&b|c>d",
    "*?[x]",
    "-rf",
    "ü→",
]


def test_shell_keeps_output_errors_and_status_apart(adb: Adb, phone: Phone) -> None:
    done = adb.run("shell", "echo out; echo err >&2; exit 7", serial=phone.serial)

    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_shell_status_of_a_signal(adb: Adb, phone: Phone) -> None:
    assert adb.run("shell", "kill -9 $$", serial=phone.serial).returncode == 128 + signal.SIGKILL


def test_shell_version_1_joins_errors_to_the_output(adb: Adb, phone: Phone) -> None:
    done = adb.run("shell", "-x", "echo out; echo err >&2; exit 7", serial=phone.serial)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\nerr\n", b"")


@pytest.mark.parametrize("data", [b"", b"line\n", bytes(range(256)) * 5000], ids=["empty", "line", "binary"])
def test_stdin_reaches_the_command_to_its_end(adb: Adb, phone: Phone, data: bytes) -> None:
    done = adb.run("shell", "-T", "sha256sum; echo end", serial=phone.serial, stdin=data)

    assert done.stdout.decode() == f"{hashlib.sha256(data).hexdigest()}  -\nend\n"


def test_exec_out_is_raw(adb: Adb, phone: Phone) -> None:
    done = adb.run("exec-out", "head -c 300000 /dev/zero | tr '\\0' '\\r'", serial=phone.serial)

    assert done.stdout == b"\r" * 300000


def test_exec_in_is_raw(adb: Adb, phone: Phone) -> None:
    data = bytes(range(256)) * 4000

    assert adb.run("exec-in", f"cat > {TMP}/raw; touch {TMP}/raw.done", serial=phone.serial, stdin=data).returncode == 0

    done = phone.path(f"{TMP}/raw.done")
    deadline = time.monotonic() + 30  # the client does not wait for the command, nor for its start
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert done.exists()
    assert phone.path(f"{TMP}/raw").read_bytes() == data


def test_a_command_whose_client_goes_away_is_hung_up_on(adb: Adb, phone: Phone) -> None:
    client = _shell(adb, phone, "echo begun; exec sleep 60")
    assert client.stdout is not None and client.stdout.readline() == b"begun\n"
    client.kill()
    client.communicate()

    phone.wait_for_no_process()


@pytest.mark.parametrize("name", AWKWARD)
def test_push_and_pull_names_that_a_shell_would_read(adb: Adb, phone: Phone, tmp_path: Path, name: str) -> None:
    remote = f"{TMP}/names/{name}"
    (tmp_path / "out").write_bytes(name.encode())

    assert adb.run("push", tmp_path / "out", remote, serial=phone.serial).returncode == 0
    assert phone.path(remote).read_bytes() == name.encode()
    assert adb.run("shell", f"cat {shlex.quote(remote)}", serial=phone.serial).stdout == name.encode()
    assert adb.run("pull", remote, tmp_path / "back", serial=phone.serial).returncode == 0
    assert (tmp_path / "back").read_bytes() == name.encode()
    assert not list(phone.root.rglob("gone"))


def test_push_20_mb_with_mode_and_time(adb: Adb, phone: Phone, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 20
    local, remote = tmp_path / "large", f"{TMP}/large/file"
    local.write_bytes(data)
    local.chmod(0o750)
    os.utime(local, (0, 1_000_000_000))
    phone.clear_log()

    assert adb.run("push", local, remote, serial=phone.serial).returncode == 0

    assert phone.path(remote).read_bytes() == data
    assert phone.path(remote).stat().st_mode & 0o777 == 0o777  # as adbd: what the owner may do, all may
    assert phone.path(remote).stat().st_mtime == 1_000_000_000
    assert phone.sent() == len(data)
    assert adb.run("shell", f"sha256sum < {remote}", serial=phone.serial).stdout.split()[0].decode() == (
        hashlib.sha256(data).hexdigest()
    )


def test_folders_push_and_pull(adb: Adb, phone: Phone, tmp_path: Path) -> None:
    for name in ("a", "deep/b", "deep/er/c"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(name)

    assert adb.run("push", tmp_path / "tree", f"{TMP}/trees/", serial=phone.serial).returncode == 0
    assert adb.run("pull", f"{TMP}/trees", tmp_path / "back", serial=phone.serial).returncode == 0

    back = {str(path.relative_to(tmp_path / "back")): path.read_text() for path in (tmp_path / "back").rglob("?")}
    assert {name.removeprefix("tree/"): text for name, text in back.items()} == {
        name: name for name in ("a", "deep/b", "deep/er/c")
    }


def test_nothing_outside_data_can_be_written(adb: Adb, phone: Phone, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("new")
    for target in ("/etc/estream", f"{TMP}/../../../etc/estream", "/system/bin/estream", "/estream"):
        done = adb.run("push", tmp_path / "file", target, serial=phone.serial)
        said = done.stdout + done.stderr
        assert done.returncode == 1 and (b"Read-only file system" in said or b"Permission denied" in said), said
    assert adb.run("shell", "echo > /usr/estream", serial=phone.serial).returncode != 0
    assert not Path("/etc/estream").exists() and not Path("/estream").exists() and not Path("/usr/estream").exists()


def test_pull_of_what_is_not_there(adb: Adb, phone: Phone, tmp_path: Path) -> None:
    done = adb.run("pull", f"{TMP}/absent", tmp_path / "back", serial=phone.serial)

    assert done.returncode == 1 and b"No such file or directory" in done.stdout + done.stderr


def test_broken_push_leaves_no_file_and_the_phone_comes_back(adb: Adb, new_phone: NewPhone, tmp_path: Path) -> None:
    phone = new_phone()
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    phone.drop_push_after(1_000_000)

    done = adb.run("push", tmp_path / "file", f"{TMP}/file", serial=phone.serial)

    assert done.returncode == 1
    assert not phone.path(f"{TMP}/file").exists()
    assert 1_000_000 <= phone.sent() < 1_100_000
    adb.connect(phone)
    assert adb.run("push", tmp_path / "file", f"{TMP}/file", serial=phone.serial).returncode == 0
    assert phone.path(f"{TMP}/file").stat().st_size == 3_000_000


def test_killed_daemon_closes_the_pipes_of_its_commands(adb: Adb, new_phone: NewPhone) -> None:
    phone = new_phone()
    client = _shell(adb, phone, "echo begun; cat > /dev/null; echo end of stdin > /data/seen")
    assert client.stdout is not None and client.stdout.readline() == b"begun\n"
    assert any("cat > /dev/null" in line for line in phone.processes())

    phone.kill_daemon()

    client.communicate(timeout=20)  # its status is 0: the client does not tell a broken connection from success
    phone.wait_for_no_process()
    assert phone.path("/data/seen").read_text() == "end of stdin\n"
    phone.start_daemon()
    adb.disconnect(phone)
    adb.connect(phone)
    assert adb.run("shell", "echo back", serial=phone.serial).stdout == b"back\n"


def test_a_command_that_does_not_watch_stdin_outlives_the_daemon_but_not_the_phone(
    adb: Adb, new_phone: NewPhone
) -> None:
    phone = new_phone()
    client = _shell(adb, phone, "echo begun; exec sleep 1234567")
    assert client.stdout is not None and client.stdout.readline() == b"begun\n"

    phone.kill_daemon()
    client.communicate()

    assert phone.processes() == ["sleep 1234567"]
    phone.close()
    assert subprocess.run(["pgrep", "-f", "sleep 1234567"], capture_output=True).stdout == b""


def test_unauthorized(adb: Adb, new_phone: NewPhone) -> None:
    phone = new_phone(connect=False)
    phone.set_state("unauthorized")

    assert b"failed to authenticate" in adb.run("connect", phone.serial).stdout

    assert adb.state(phone) == "unauthorized"
    done = adb.run("shell", "true", serial=phone.serial)
    assert done.returncode == 1 and b"device unauthorized" in done.stderr


def test_offline(adb: Adb, new_phone: NewPhone) -> None:
    phone = new_phone()
    phone.set_state("offline")
    phone.kill_daemon()
    phone.start_daemon()

    end = time.monotonic() + 20
    while adb.state(phone) != "offline":
        assert time.monotonic() < end, adb.state(phone)
        time.sleep(0.05)
    done = adb.run("shell", "true", serial=phone.serial)
    assert done.returncode == 1 and b"device offline" in done.stderr


def test_a_small_disk_is_really_full(adb: Adb, new_phone: NewPhone, tmp_path: Path) -> None:
    phone = new_phone(disk=4 << 20)
    (tmp_path / "file").write_bytes(bytes(5 << 20))

    assert adb.run("shell", f"df -k {TMP} | tail -n 1", serial=phone.serial).stdout.split()[1] == b"4096"
    done = adb.run("push", tmp_path / "file", f"{TMP}/file", serial=phone.serial)

    assert done.returncode == 1 and b"No space left on device" in done.stdout + done.stderr
    assert adb.run("shell", f"ls {TMP}", serial=phone.serial).stdout == b""


def test_the_phone_says_what_the_test_has_set(adb: Adb, new_phone: NewPhone) -> None:
    phone = new_phone(meminfo="MemTotal:       11534336 kB\n")
    phone.set_property("ro.soc.model", "SM8750")
    phone.set_service("thermalservice", "Thermal Status: 3\n")

    def said(command: str) -> str:
        return adb.run("shell", command, serial=phone.serial).stdout.decode()

    assert said("getprop ro.soc.model") == "SM8750\n"
    assert said("getprop ro.absent") == "\n"
    assert "[ro.soc.model]: [SM8750]\n" in said("getprop")
    assert said("dumpsys thermalservice") == "Thermal Status: 3\n"
    assert said("cat /proc/meminfo") == "MemTotal:       11534336 kB\n"
    assert said("uname -m") == "aarch64\n"
    assert said("stat -c %s /proc/meminfo; sha256sum < /dev/null").split()[1].startswith("e3b0c442")


def _shell(adb: Adb, phone: Phone, command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        adb.command(["shell", command], phone.serial),
        env=adb.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
