"""What the emulated phone is made of, fetched from package registries and unpacked in a cache folder.

adb and qemu from Debian; Python and its libraries from Debian for aarch64; numpy, ONNX Runtime and the QNN provider
from the Python registry for aarch64. apt works on state of its own: nothing is installed on the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PYTHON = "3.11"
_HOST_PACKAGES = ("adb", "qemu-user-static")
_PHONE_PACKAGES = (f"python{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libstdc++6", "libatomic1")
# The wheels' platforms, newest first: pip takes what it is told literally.
_PLATFORMS = ("manylinux_2_34_aarch64", "manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
_LIMIT_S = 600
_KEPT_S = 86400  # since its last use


class Unavailable(Exception):
    """The sandbox cannot be made here: what is missing."""


@dataclass(frozen=True)
class Sandbox:
    """A complete one.

    root/adb: the client and its libraries. root/emulator: what a phone sees as /system/emulator. root/python: usr/ of
    Debian's Python. root/wheels: one folder of site-packages.
    """

    root: Path

    @property
    def adb(self) -> Path:
        return self.root / "bin/adb"

    @property
    def emulator(self) -> Path:
        return self.root / "emulator"

    @property
    def python(self) -> Path:
        return self.root / "python/usr"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def system_libraries(self) -> set[str]:
        """Names of the libraries that this phone has of itself, where a real one has Android's."""
        return {path.name for path in (self.emulator / "aarch64").rglob("*.so*")}

    def version(self, distribution: str) -> str:
        """Of an unpacked wheel."""
        (folder,) = self.wheels.glob(f"{distribution}-*.dist-info")
        return folder.name.removesuffix(".dist-info").partition("-")[2]

    @property
    def python_version(self) -> str:
        """Such as 3.11.2."""
        return (self.root / "python.version").read_text()


def cache_folder() -> Path:
    """$ESTREAM_TEST_CACHE, else .cache in the checkout."""
    return Path(os.environ.get("ESTREAM_TEST_CACHE") or Path(__file__).parents[2] / ".cache").absolute()


def fetch() -> Sandbox:
    """The sandbox, made now if it is not in the cache. Raises Unavailable."""
    wheels = _wheels()
    wanted = hashlib.sha256(Path(__file__).read_bytes() + repr(wheels).encode()).hexdigest()[:16]
    root = cache_folder() / f"phone-{wanted}"
    root.parent.mkdir(parents=True, exist_ok=True)
    with _locked(root.parent / "phone.lock"):
        if not root.is_dir():
            for old in root.parent.glob("phone-*"):
                if time.time() - old.stat().st_mtime > _KEPT_S:  # else a checkout of another version may be using it
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=root.parent, prefix="making-") as making:
                _make(Path(making, "phone"), wheels)
                Path(making, "phone").rename(root)
        os.utime(root)
    return Sandbox(root)


def _wheels() -> list[str]:
    """The machine's own versions, whose numbers the phone's are compared with."""
    same = [f"{name}=={importlib.metadata.version(name)}" for name in ("onnxruntime", "onnxruntime-qnn")]
    return [*same, "numpy>=2,<3"]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(root: Path, wheels: list[str]) -> None:
    root.mkdir()
    with ThreadPoolExecutor() as pool:
        parts = [pool.submit(_fetch_debian, root), pool.submit(_fetch_wheels, root, wheels)]
        for part in parts:
            part.result()


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    """stdout. Raises Unavailable with the end of stderr."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not installed") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(map(str, command[:4]))} …: {done.stderr.strip()[-500:]}")
    return done.stdout


# Debian


def _fetch_debian(root: Path) -> None:
    with tempfile.TemporaryDirectory(dir=root.parent, prefix="apt-") as state:
        apt = _apt(Path(state))
        host = _run("dpkg", "--print-architecture").strip()
        _run("apt-get", *apt, "update")
        phone = [f"{name}:arm64" for name in _PHONE_PACKAGES]
        install = ("apt-get", *apt, "install", "--yes", "--download-only", "--no-install-recommends")
        _run(*install, *_HOST_PACKAGES, *phone)
        debs = sorted(Path(state, "cache/archives").glob("*.deb"))
        for deb in debs:
            name, _, architecture = deb.stem.split("_")
            if architecture in ("arm64", "all") and name.startswith(("python", "libpython")):
                _unpack(deb, root / "python")
            elif architecture == "arm64":
                _unpack(deb, root / "emulator/aarch64")
            elif architecture == host and name == "qemu-user-static":
                _unpack(deb, root / "qemu")
            elif architecture == host and name != "libc6":
                _unpack(deb, root / "adb")
        python = next(deb for deb in debs if deb.name.startswith(f"python{PYTHON}-minimal_"))
        (root / "python.version").write_text(python.stem.split("_")[1].partition("-")[0])
    (root / "qemu/usr/bin/qemu-aarch64-static").rename(root / "emulator/qemu-aarch64-static")
    shutil.rmtree(root / "qemu")
    _write_adb(root)


def _apt(state: Path) -> list[str]:
    """Options for the machine's sources, but with lists, cache and an empty record of installed packages of its own."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True)
    (state / "status").touch()
    # Hooks of the machine would act on the machine.
    (state / "apt.conf").write_text("#clear APT::Update;\n#clear DPkg;\n#clear APT::Architectures;\n")
    options = {
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Dir::Cache::archives": state / "cache/archives",
        "APT::Architectures::": "arm64",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    return [
        "-qq",
        "-c",
        str(state / "apt.conf"),
        *(word for item in options.items() for word in ("-o", "=".join(map(str, item)))),
    ]


def _unpack(deb: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _run("dpkg-deb", "--extract", deb, folder)


def _write_adb(root: Path) -> None:
    """A script beside which the client finds its libraries, wherever the cache lies."""
    libraries = sorted({path.parent.relative_to(root) for path in (root / "adb").rglob("*.so.*")})
    search = ":".join(f"$root/{folder}" for folder in libraries)
    client = (root / "adb/usr/bin/adb").resolve().relative_to(root.resolve())
    (root / "bin").mkdir()
    script = root / "bin/adb"
    script.write_text(
        '#!/bin/sh\nroot="$(dirname "$(dirname "$(readlink -f "$0")")")"\n'
        f'LD_LIBRARY_PATH="{search}" exec "$root/{client}" "$@"\n'
    )
    script.chmod(0o755)


# Python's registry


def _fetch_wheels(root: Path, wheels: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=root.parent, prefix="pip-") as folder:
        platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        target = ("--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON)
        _run(*pip, *target, *platforms, "--dest", folder, *wheels)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(root / "wheels")
