"""The phone and the adb client, from the side of the tests."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_CHECKOUT = Path(__file__).parents[2]
_START_S = 30.0
PROPERTIES = {
    "ro.build.version.release": "14",
    "ro.build.version.sdk": "34",
    "ro.board.platform": "pineapple",
    "ro.product.cpu.abi": "arm64-v8a",
    "ro.product.device": "emulated",
    "ro.product.manufacturer": "EStream",
    "ro.product.model": "Emulated phone",
    "ro.product.name": "emulated",
    "ro.soc.manufacturer": "QTI",
    "ro.soc.model": "SM8650",
}
# Of an ARM processor: ONNX Runtime reads it, and dies of an x86 one.
CPUINFO = "".join(
    f"processor\t: {core}\nBogoMIPS\t: 38.40\n"
    "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp\n"
    "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd0b\nCPU revision\t: 0\n\n"
    for core in range(2)
)


@cache
def namespaces() -> tuple[str, ...] | None:
    """The command that starts another as process 1 of namespaces of its own; None where the machine allows none."""
    for user in ((), ("--user", "--map-root-user")):
        command = ("unshare", *user, "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
        if shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode:
            return command
    return None


class Phone:
    """A running phone. Close it, or use it as a context: no process, mount or socket is left then.

    root: folder of this phone's files. root/data is /data and root/vendor is /vendor, for the test as for the phone.
    emulator: a folder that becomes /system/emulator. disk: bytes of /data, which is then not in `root` but in memory,
    and really full at that size. meminfo: text of /proc/meminfo; None: the machine's.
    """

    def __init__(
        self, root: Path, *, emulator: Path | None = None, disk: int | None = None, meminfo: str | None = None
    ) -> None:
        command = namespaces()
        assert command is not None
        self.root = root
        for name in ("data/local/tmp", "vendor/lib64", "values/getprop", "values/dumpsys", "proc", "mnt"):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name, value in PROPERTIES.items():
            self.set_property(name, value)
        self.set_service("thermalservice", "IsStatusOverride: false\nThermal Status: 0\n")
        self.set_state("device")
        (root / "proc/cpuinfo").write_text(CPUINFO)
        if meminfo is not None:
            (root / "proc/meminfo").write_text(meminfo)
        options = ["--emulator", str(emulator)] if emulator else []
        options += ["--disk", str(disk)] if disk is not None else []
        options += ["--unprivileged"] if "--user" in command else []
        self._main = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.device.phone_main", str(root), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_CHECKOUT,
            text=True,
        )
        self._answer()
        self.port: int = self._ask("start 0")
        self.serial = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Phone:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the phone and every process in it. Twice is harmless."""
        assert self._main.stdin is not None and self._main.stdout is not None
        self._main.stdin.close()
        self._main.wait(_START_S)
        self._main.stdout.close()

    def kill_daemon(self) -> None:
        """With SIGKILL. What it started goes on, without anybody at the other end of its pipes."""
        self._ask("kill")

    def start_daemon(self) -> None:
        """After `kill_daemon`, at the same port."""
        self._ask(f"start {self.port}")

    def processes(self) -> list[str]:
        """Command lines of what runs on the phone, without its first process and the daemon."""
        found: list[str] = self._ask("processes")
        return found

    def wait_for_no_process(self, timeout_s: float = 10) -> None:
        """Fails with what still runs."""
        end = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < end, f"still running on the phone: {left}"
            time.sleep(0.05)

    def path(self, remote: str) -> Path:
        """Where a file of /data or /vendor lies for the test."""
        return self.root / remote.lstrip("/")

    def set_property(self, name: str, value: str) -> None:
        """What `getprop name` says."""
        (self.root / "values/getprop" / name).write_text(f"{value}\n")

    def set_service(self, name: str, text: str) -> None:
        """What `dumpsys name` says."""
        (self.root / "values/dumpsys" / name).write_text(text)

    def set_state(self, state: str) -> None:
        """`device`, `unauthorized` (asks for a key that it never accepts) or `offline` (does not answer), from the next
        connection on."""
        (self.root / "values/state").write_text(state)

    def drop_push_after(self, count: int) -> None:
        """Drops the connection once, `count` bytes into a pushed file, or into a command's stdin."""
        (self.root / "values/drop_push_after").write_text(str(count))

    def log(self) -> list[str]:
        """`open SERVICE 'COMMAND'` and `sent BYTES 'PATH or COMMAND'` since the log was cleared."""
        path = self.root / "values/log"
        return path.read_text(errors="surrogateescape").splitlines() if path.exists() else []

    def clear_log(self) -> None:
        (self.root / "values/log").unlink(missing_ok=True)

    def sent(self) -> int:
        """Bytes of files pushed, and of commands' stdin, since the log was cleared."""
        return sum(int(line.split()[1]) for line in self.log() if line.startswith("sent "))

    def _ask(self, command: str) -> Any:
        assert self._main.stdin is not None
        self._main.stdin.write(f"{command}\n")
        self._main.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._main.stdout is not None
        line = self._main.stdout.readline()
        assert line, f"the phone's first process ended with status {self._main.wait(_START_S)}"
        return json.loads(line)


@dataclass
class Adb:
    """The real client, with a server, keys and settings of its own."""

    program: Path
    port: int
    home: Path
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ADB_", "ANDROID_"))},
            "PATH": f"{self.program.parent}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "ANDROID_ADB_SERVER_PORT": str(self.port),
            "ADB_LOCAL_TRANSPORT_MAX_PORT": "5554",  # looks for no emulators of others
        }

    @classmethod
    @contextmanager
    def running(cls, program: Path, home: Path) -> Iterator[Adb]:
        """With a server that runs while the context lasts."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        adb = cls(program, port, home)
        with open(home / "server.log", "wb") as log:
            server = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", str(program), "nodaemon", "server"],
                env=adb.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            end = time.monotonic() + _START_S
            while not _listens(port):
                assert server.poll() is None and time.monotonic() < end, (home / "server.log").read_text()
                time.sleep(0.02)
            yield adb
        finally:
            server.kill()
            server.wait()

    def run(
        self, *arguments: str | Path, serial: str | None = None, stdin: bytes = b"", timeout_s: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """`adb [-s serial] arguments`, whatever its status."""
        return subprocess.run(
            self.command(arguments, serial), env=self.environment, input=stdin, capture_output=True, timeout=timeout_s
        )

    def command(self, arguments: Sequence[str | Path], serial: str | None = None) -> list[str]:
        """For subprocess, with `environment`."""
        return [str(self.program), *(["-s", serial] if serial else []), *map(str, arguments)]

    def connect(self, phone: Phone) -> None:
        """Until the phone is a device; fails otherwise."""
        said = self.run("connect", phone.serial).stdout.decode()
        assert "connected to" in said, said
        self.run("wait-for-device", serial=phone.serial)

    def disconnect(self, phone: Phone) -> None:
        """Forgets the phone."""
        self.run("disconnect", phone.serial)

    def state(self, phone: Phone) -> str | None:
        """As `adb devices` has it; None: not listed."""
        for line in self.run("devices").stdout.decode().splitlines():
            serial, _, state = line.partition("\t")
            if serial == phone.serial:
                return state
        return None


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))
