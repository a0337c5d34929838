"""A folder that plays a phone for the fake adb: what is on it, and what goes wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SERIAL = "1a2b3c4d"
TARGET = "/data/local/tmp/estream"
_PROPERTIES = """[ro.product.manufacturer]: [Maker]
[ro.product.model]: [Phone 1]
[ro.build.version.release]: [15]
[ro.build.version.sdk]: [35]
[ro.product.cpu.abi]: [arm64-v8a]
[ro.soc.model]: [SM8650]
[ro.board.platform]: [pineapple]
"""
_THERMAL = """Thermal Status: 0
Cached temperatures:
\tTemperature{mValue=31.4, mType=0, mName=CPU0, mStatus=0}
\tTemperature{mValue=29.6, mType=2, mName=battery, mStatus=0}
"""
_MOUNTS = """1 0 254:1 / / ro,relatime - ext4 /dev/dm-1 ro
2 1 254:30 / %s/data rw,nosuid,nodev - f2fs /dev/dm-2 rw
3 2 0:50 / %s/sdcard rw,nosuid,nodev,noexec - fuse /dev/fuse rw
"""


def plugged_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakePhone:
    """A new phone in `folder`, the one that adb finds while the test runs."""
    folder.mkdir(exist_ok=True)
    made = FakePhone(folder)
    monkeypatch.setenv("ESTREAM_ADB", str(made.adb))
    monkeypatch.delenv("ANDROID_SERIAL", raising=False)
    return made


class FakePhone:
    """`folder`: where the phone lies; `adb`: the program that plays it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.adb = folder / "adb"
        (self.root / "data/local/tmp").mkdir(parents=True)
        (self.root / "sdcard").mkdir()
        (folder / "bin").mkdir()
        program = Path(__file__).with_name("fake_adb.py")
        self._executable(self.adb, f'exec "{sys.executable}" -S -E "{program}" "{folder}" "$@"')
        self.state: dict[str, Any] = {
            "serial": SERIAL,
            "devices": f"{SERIAL}               device usb:1-4 product:p model:Phone_1 device:d transport_id:7",
            "faults": [],
            "noise": False,
            "server_error": "",
        }
        self.write_state()
        self.command("getprop", f"cat <<'END'\n{_PROPERTIES}END")
        self.command("dumpsys", f"cat <<'END'\n{_THERMAL}END")
        self.command("sync", "exit 0")  # this machine's may take seconds
        self.command("getenforce", "echo Enforcing")
        self.free(100 << 20)
        self.file(
            "proc/meminfo",
            "MemTotal: 12000000 kB\nMemAvailable: 7000000 kB\nSwapTotal: 4000000 kB\nSwapFree: 3000000 kB\n",
        )
        self.file("proc/swaps", "Filename Type Size Used Priority\n/dev/block/zram0 partition 4000000 0 -2\n")
        self.file("proc/self/mountinfo", _MOUNTS.replace("%s", str(self.root)))
        self.file("vendor/lib64/libcdsprpc.so", "")
        for name in ("fastrpc_shell_3", "fastrpc_shell_unsigned_3"):
            self.file(f"vendor/dsp/cdsp/{name}", "")
        self.file("dev/fastrpc-cdsp", "")

    def write_state(self) -> None:
        (self.folder / "state.json").write_text(json.dumps(self.state))

    def fail(self, match: str, how: str, nbytes: int = 0) -> None:
        """The next command that matches goes wrong."""
        self.state["faults"].append({"match": match, "how": how, "bytes": nbytes})
        self.write_state()

    def attached(self, *lines: str) -> None:
        self.state["devices"] = "\n".join(lines)
        self.write_state()

    def free(self, nbytes: int) -> None:
        """df's answer."""
        said = (
            f"Filesystem 1024-blocks Used Available Capacity Mounted on\\n/dev/dm-2 200000000 1 {nbytes >> 10} 1%% /d"
        )
        self.command("df", f"printf '{said}\\n'")

    def command(self, name: str, script: str) -> None:
        """A program of the phone."""
        self._executable(self.folder / "bin" / name, script)

    def file(self, path: str, text: str) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def at(self, path: str = "") -> Path:
        """A path under the usual target."""
        return self.root / TARGET.lstrip("/") / path

    def calls(self) -> list[list[str]]:
        """Arguments of every call of adb so far."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _executable(self, path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
