"""Child processes in which the QNN provider finds a stand-in for the phone's libcdsprpc.so."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAME = "libcdsprpc.so"
_MARK = "child: "
_TIMEOUT_S = 120


def build(folder: Path) -> Path:
    """Compiles the stand-in into `folder`."""
    source = Path(__file__).with_name("cdsprpc.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(folder / NAME), str(source)]
    subprocess.run([*command, "-lpthread"], check=True)
    return folder


@dataclass(frozen=True)
class Answer:
    """What a call returned, and what the stand-in logged meanwhile."""

    value: Any
    log: list[list[str]]

    def calls(self, name: str) -> list[list[str]]:
        return [line[1:] for line in self.log if line[0] == name]


def ask(folder: Path | None, log: Path, *calls: list[object]) -> list[Answer]:
    """Calls functions of tests.support.shared_child, [name, arguments ...] each, one after the other in a child that
    finds the library in `folder` (None: nowhere)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CDSPRPC_LOG": str(log)}
    environment.pop("ESTREAM_SHARED_MEMORY", None)
    if folder is not None:
        environment["LD_LIBRARY_PATH"] = str(folder)  # read when a process starts: that is why there are children
    wanted = json.dumps([list(map(str, call)) for call in calls])
    command = [sys.executable, "-m", "tests.support.shared_child", wanted]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=ROOT)
    lines = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return [Answer(*json.loads(line)) for line in lines]


def serve(functions: Mapping[str, Callable[..., object]], wanted: str) -> None:
    """The child's side of `ask`."""
    log = Path(os.environ["CDSPRPC_LOG"])
    for name, *arguments in json.loads(wanted):
        log.unlink(missing_ok=True)
        value = functions[name](*arguments)
        lines = log.read_text().splitlines() if log.exists() else []
        print(f"\n{_MARK}{json.dumps([value, [line.split() for line in lines]])}", flush=True)


class Standin:
    """The library as the provider of this process sees it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(NAME)
        self._library.standin_refuse.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_int)
        self._library.standin_bytes.restype = ctypes.c_size_t

    def refuse(self, *, above: int = (1 << 64) - 1, nth: int = 1, count: int = 0) -> None:
        """From now on: allocations of more than `above` bytes, and `count` of them from the n-th on. Without arguments:
        none."""
        self._library.standin_refuse(above, nth, count)

    def lose_descriptors(self, yes: bool) -> None:
        self._library.standin_without_descriptors(yes)

    @property
    def mappings(self) -> int:
        return int(self._library.standin_mappings())

    @property
    def nbytes(self) -> int:
        return int(self._library.standin_bytes())

    @property
    def strays(self) -> int:
        return int(self._library.standin_strays())

    def left(self) -> list[int]:
        """What must be all zeros after a close: mappings, mappings that the kernel knows, descriptors, stray frees."""
        maps = Path("/proc/self/maps").read_text().count("memfd:rpcmem")
        descriptors = 0
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the listing's own
                descriptors += "memfd:rpcmem" in os.readlink(f"/proc/self/fd/{entry}")
        return [self.mappings, maps, descriptors, self.strays]
