"""A phone without adb: a folder, and the real program of the phone as a process of this machine.

Its Python finds numpy and nothing else of this environment, and only the run-time part of estream.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from android.layout import PhoneLayout

ROOT = Path(__file__).resolve().parents[2]
# Host side only, as tests/unit/test_import_blocker.py says.
_EXEMPT = ("checkpoint", "cli", "__main__.py", "pack.py", "synth.py", "writer.py", "__pycache__")
_PATIENCE_S = 10


class FakeDevice:
    """What `android.adb.Device` does, with a folder for the phone. processes: all that were started."""

    serial = "FAKE:1"

    def __init__(self, root: Path, *, runtime: Path | None = None, soc: str = "SM8650") -> None:
        """runtime: libonnxruntime.so; None: the phone has none."""
        self.layout = PhoneLayout(str(root))
        self.properties = {"ro.soc.model": soc}
        self.processes: list[FakeProcess] = []
        self.commands: list[tuple[str, ...]] = []
        app, libraries, numpy = Path(self.layout.app), Path(self.layout.libraries), root / "only-numpy"
        shutil.copytree(ROOT / "estream", app / "estream", ignore=shutil.ignore_patterns(*_EXEMPT))
        shutil.copy(ROOT / "android/phone/estream_phone.py", app)
        for folder in (libraries, numpy, Path(self.layout.models), Path(self.layout.python, "bin")):
            folder.mkdir(parents=True)
        site = Path(np.__file__).parents[1]
        for name in ("numpy", "numpy.libs"):
            (numpy / name).symlink_to(site / name)
        if runtime is not None:
            (libraries / "libonnxruntime.so").symlink_to(runtime)
        self.python = Path(self.layout.python, "bin/python3")
        self.write_python(f'export PYTHONPATH="$PYTHONPATH:{numpy}"\nexec {sys.executable} -S "$@"')

    def write_python(self, script: str) -> None:
        """What the phone's Python does, lines of sh."""
        self.python.write_text(f"#!/bin/sh\nunset PYTHONHOME LD_LIBRARY_PATH\n{script}\n")
        self.python.chmod(0o755)

    def shell(self, *argv: str, check: bool = True, **options: Any) -> Any:
        self.commands.append(argv)
        if argv[0] == "getprop":
            listed = "".join(f"[{name}]: [{value}]\n" for name, value in self.properties.items())
            return SimpleNamespace(status=0, out=listed.encode(), err=b"")
        done = subprocess.run(argv, capture_output=True, check=check)
        return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)

    @contextlib.contextmanager
    def stream(self, *argv: str, env: Mapping[str, str] | None = None, **options: Any) -> Iterator[FakeProcess]:
        process = FakeProcess(argv, {"PATH": os.environ["PATH"], **(env or {})})
        self.processes.append(process)
        try:
            yield process
        finally:
            process.stop()

    def push(self, local: Path, remote: str) -> None:
        shutil.copy(local, remote)

    def pull(self, remote: str, local: Path) -> None:
        shutil.copy(remote, local)


class FakeProcess:
    """status: as a phone's shell tells it, once it has ended. stopped_by_force: it did not end by itself."""

    def __init__(self, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, env=dict(env), stdin=pipe, stdout=pipe, stderr=pipe)
        self._err = bytearray()
        self._reader = threading.Thread(target=self._read_err, daemon=True)
        self._reader.start()
        self.pid = self._process.pid
        self.status: int | None = None
        self.stopped_by_force = False

    @property
    def err(self) -> bytes:
        return bytes(self._err)

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield line.removesuffix(b"\n")

    def finish(self) -> int:
        status = self._process.wait(60)
        self._reader.join()
        self.status = status if status >= 0 else 128 - status
        return self.status

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        drain = threading.Thread(target=self._process.stdout.read, daemon=True)
        drain.start()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.stopped_by_force = True
            self._process.kill()
        self.finish()
        drain.join()
        self._process.stdout.close()

    def _read_err(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            for line in pipe:
                self._err += line
