"""The phone's Python, ONNX Runtime and QNN provider, for aarch64 and emulated: real libraries, no silicon."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from android.layout import PhoneLayout
from tests.device import downloads as made
from tests.device.phone import Adb, Phone
from tests.device.sandbox import Sandbox
from tests.support.faults import IDS, logits_of, make_package

LAYOUT = PhoneLayout("/data/local/tmp/emulated python")
LIBRARY = f"{LAYOUT.libraries}/libonnxruntime.so"
PREFILL = """
import sys
import numpy as np
from estream.engine import Engine
from estream.runtime import open_target

package, library, out, *ids = sys.argv[1:]
with Engine(package, open_target("cpu", threads=1, library=library)) as engine:
    np.save(out, engine.prefill([int(token) for token in ids]).logits)
"""
OPEN_HTP = """
import sys
from pathlib import Path
from estream.errors import EStreamError
from estream.runtime.htp import HtpTarget
from estream.runtime.soc import find_soc

library, folder, graph = sys.argv[1:]
try:
    with HtpTarget(find_soc("sm8650").provider_options, library=library, folder=folder) as target:
        print("registered", flush=True)
        target.load(Path(graph))
except EStreamError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@dataclass
class Python:
    """Python on the phone, with the environment of a run."""

    adb: Adb
    phone: Phone

    def run(self, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        variables = [f"{name}={value}" for name, value in {**LAYOUT.environment, **environment}.items()]
        words = ["env", *variables, "python/bin/python3", "-c", code, *arguments]
        return self.adb.run("shell", f"cd {shlex.quote(LAYOUT.root)} && {shlex.join(words)}", serial=self.phone.serial)


@pytest.fixture(scope="module")
def python(adb: Adb, phone: Phone, sandbox: Sandbox) -> Python:
    """Everything at its place, as a bundle would put it."""
    made.install_python(sandbox, phone.path(LAYOUT.python))
    made.install_numpy(sandbox, phone.path(LAYOUT.python))
    phone.path(LAYOUT.libraries).mkdir()
    for find in (made.runtime_libraries, made.plugin_libraries, made.qnn_libraries):
        for name, source in find(sandbox).items():
            shutil.copy(source, phone.path(LAYOUT.libraries) / name)
    ignore = shutil.ignore_patterns("__pycache__", "cli", "checkpoint")
    shutil.copytree(Path(__file__).parents[2] / "estream", phone.path(LAYOUT.app) / "estream", ignore=ignore)
    return Python(adb, phone)


@pytest.fixture(scope="module")
def package(phone: Phone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny float32 package, on the phone too."""
    made_package = make_package(tmp_path_factory.mktemp("package"))
    shutil.copytree(made_package, phone.path(LAYOUT.models) / made_package.name)
    return made_package


def test_python_is_the_phones_own(python: Python) -> None:
    code = (
        "import ctypes, json, platform, subprocess, sys, numpy;"
        "child = subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout;"
        "labs = ctypes.CDLL(None).labs; labs.restype = labs.argtypes = None; labs.argtypes = [ctypes.c_long];"
        "labs.restype = ctypes.c_long;"
        "print(json.dumps([platform.machine(), sys.prefix, numpy.__file__, float(numpy.arange(5.0) @ numpy.arange(5.0)),"
        " labs(-2**40), child]))"
    )
    done = python.run(code)

    assert done.stderr == b""
    machine, prefix, numpy_file, product, absolute, child = json.loads(done.stdout)
    assert (machine, prefix, product, absolute, child) == ("aarch64", LAYOUT.python, 30.0, 2**40, "42\n")
    assert numpy_file.startswith(LAYOUT.python)


def test_status_and_errors_cross(python: Python) -> None:
    done = python.run("import sys; print('out'); sys.exit('no such thing')")

    assert (done.returncode, done.stdout, done.stderr) == (1, b"out\n", b"no such thing\n")


def test_prefill_agrees_with_the_host(python: Python, package: Path, tmp_path: Path) -> None:
    out = f"{LAYOUT.root}/logits.npy"

    done = python.run(PREFILL, f"{LAYOUT.models}/{package.name}", LIBRARY, out, *map(str, IDS))

    assert (done.returncode, done.stderr) == (0, b"")
    expected = logits_of(package)
    assert np.abs(np.load(python.phone.path(out)) - expected).max() <= 1e-4 * np.ptp(expected)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        pytest.param({}, ["libonnxruntime_providers_qnn.so found no NPU", "estream doctor"], id="no device"),
        pytest.param({"ORT_QNN_ENABLE_CPU_BACKEND": "1"}, ["QNN"], id="a device, but no DSP"),
    ],
)
def test_qnn_provider_without_a_dsp_is_refused(
    python: Python, package: Path, environment: dict[str, str], words: list[str]
) -> None:
    graph = next((package / "graphs/cpu").glob("*.onnx")).relative_to(package)
    remote = f"{LAYOUT.models}/{package.name}/{graph}"

    done = python.run(OPEN_HTP, LIBRARY, LAYOUT.libraries, remote, **environment)

    assert (done.returncode, done.stdout) == (1, b"registered\n"), done
    message = done.stderr.decode()
    assert message.startswith("TargetError: ")
    for word in words:
        assert word in message


def test_downloads_hold_what_the_phone_runs(downloads: Path, sandbox: Sandbox, tmp_path: Path) -> None:
    kinds = {path.name.rpartition("-" if path.suffix == ".aar" else "_")[0] for path in downloads.iterdir()}
    assert len(list(downloads.iterdir())) == 5
    for archive in downloads.glob("*.aar"):
        with zipfile.ZipFile(archive) as opened:
            libraries = [name for name in opened.namelist() if name.startswith("jni/arm64-v8a/lib")]
            assert libraries
            assert all(opened.read(name).startswith(b"\x7fELF") for name in libraries)
    for deb in downloads.glob("*.deb"):
        architecture = subprocess.run(["dpkg-deb", "--field", deb, "Architecture"], capture_output=True, check=True)
        assert architecture.stdout == b"aarch64\n"
        subprocess.run(["dpkg-deb", "--extract", deb, tmp_path], check=True)
    prefix = tmp_path / "data/data/com.termux/files/usr"
    assert kinds >= {"onnxruntime-android", "onnxruntime-android-qnn", "qnn-runtime"}
    assert (prefix / "bin/python3.11").read_bytes().startswith(b"\x7fELF")
    assert (prefix / "bin/python3").stat().st_mode & 0o111
    assert (prefix / "lib/python3.11/site-packages/numpy/__init__.py").exists()
