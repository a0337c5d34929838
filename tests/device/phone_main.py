"""The phone's first process: builds its file system, starts the daemon, and ends everything when its stdin ends.

Runs as process 1 of namespaces of its own (`unshare --mount --pid --fork`): nothing is mounted on the machine, /data is
the same for pushes and for commands, and no process outlives this one. All but /data and /vendor is read-only.

stdin takes a command per line, and stdout answers each with a line of JSON: `start PORT` the daemon (answer: its port),
`kill` it, `processes` (answer: the command lines of what else runs).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.device.daemon import Daemon

_FROM_THE_MACHINE = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "dev", "sys")
_COMMANDS = Path(__file__).with_name("system_bin")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path, help="has data, vendor, values, proc; and mnt, which is empty")
    parser.add_argument("--emulator", type=Path, help="becomes /system/emulator")
    parser.add_argument("--disk", type=int, help="bytes of /data, which is then in memory and ends with the phone")
    parser.add_argument("--unprivileged", action="store_true", help="in a user namespace")
    options = parser.parse_args()
    FileSystem(options.root.resolve(), privileged=not options.unprivileged).build(options.emulator, options.disk)
    os.chroot(options.root / "mnt")
    os.chdir("/")
    signal.signal(signal.SIGCHLD, _reap)
    daemon = 0
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        answer: object = None
        if command == "start":
            daemon, answer = _start(int(arguments[0]))
        elif command == "kill":
            os.kill(daemon, signal.SIGKILL)
            while Path("/proc", str(daemon)).exists():
                time.sleep(0.01)
        elif command == "processes":
            answer = _processes({os.getpid(), daemon})
        print(json.dumps(answer), flush=True)


class FileSystem:
    """Mounts on root/mnt what the phone sees. privileged: by the machine's root, who could write to its files."""

    def __init__(self, root: Path, *, privileged: bool) -> None:
        self._root, self._new, self._privileged = root, root / "mnt", privileged

    def build(self, emulator: Path | None, disk: int | None) -> None:
        root, new = self._root, self._new
        _mount("-t", "tmpfs", "-o", "mode=755,size=1m", "phone", new)
        for name in _FROM_THE_MACHINE:
            source = Path("/", name)
            if source.is_symlink():
                (new / name).symlink_to(os.readlink(source))
            elif source.is_dir():
                self._bind(source, name, read_only=True)
        (new / "proc").mkdir()
        _mount("-t", "proc", "proc", new / "proc")
        for replaced in (root / "proc").iterdir():
            _mount("--bind", replaced, new / "proc" / replaced.name)
        self._bind(_COMMANDS, "system/bin", read_only=True)
        self._bind(root / "values", "system/values")
        if emulator is not None:
            self._bind(emulator, "system/emulator", read_only=True)
        self._bind(root / "vendor", "vendor")
        if disk is None:
            self._bind(root / "data", "data")
        else:
            (new / "data").mkdir()
            _mount("-t", "tmpfs", "-o", f"mode=771,size={disk}", "data", new / "data")
        (new / "data/local/tmp").mkdir(parents=True, exist_ok=True)
        _mount("-o", "remount,bind,ro", new)

    def _bind(self, source: Path, name: str, *, read_only: bool = False) -> None:
        target = self._new / name
        target.mkdir(parents=True)
        # Without root, a folder can be bound only together with what is mounted in it.
        _mount("--bind" if self._privileged else "--rbind", source, target)
        if read_only and self._privileged:
            _mount("-o", "remount,bind,ro", target)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _start(port: int) -> tuple[int, int]:
    """(process, port) of a new daemon, which listens by then."""
    daemon = Daemon(port)
    process = os.fork()
    if not process:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup pass its being ignored on
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        daemon.serve_forever()
    daemon.close()
    return process, daemon.port


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _processes(besides: set[int]) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) not in besides:
            with suppress(OSError):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
    return [line for line in found if line]  # a zombie has none


if __name__ == "__main__":
    main()
