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
from qnn_graphs.builder import Builder
from qnn_graphs.htp.compiler import compile_graph
from tests.device import downloads as made
from tests.device.phone import Adb, Phone
from tests.device.ready import NO_NPU
from tests.device.sandbox import Sandbox

LAYOUT = PhoneLayout("/data/local/tmp/emulated python")
PLUGIN = "libonnxruntime_providers_qnn.so"
LIBRARY = f"{LAYOUT.libraries}/libonnxruntime.so"
DESCRIBE = """
import ctypes, json, platform, subprocess, sys
import numpy as np

labs = ctypes.CDLL(None).labs
labs.argtypes, labs.restype = [ctypes.c_long], ctypes.c_long
child = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True)
product = float(np.arange(5.0) @ np.arange(5.0))
print(json.dumps([platform.machine(), sys.prefix, np.__file__, product, labs(-(2**40)), child.stdout]))
"""
OPEN_HTP = """
import sys
from pathlib import Path
from estream.errors import EStreamError
from estream.runtime.htp import HtpTarget
from estream.runtime.soc import find_soc

library, folder, graph, shared = sys.argv[1:]
try:
    options = find_soc("sm8650").provider_options
    with HtpTarget(options, library=library, folder=folder, shared=shared == "shared") as target:
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


def test_python_is_the_phones_own(python: Python) -> None:
    done = python.run(DESCRIBE)

    assert done.stderr == b""
    machine, prefix, numpy_file, product, absolute, child = json.loads(done.stdout)
    assert (machine, prefix, product, absolute, child) == ("aarch64", LAYOUT.python, 30.0, 2**40, "42\n")
    assert numpy_file.startswith(LAYOUT.python)


def test_every_library_loads(python: Python, sandbox: Sandbox) -> None:
    assert {"libc.so.6", "ld-linux-aarch64.so.1", "libstdc++.so.6"} <= sandbox.system_libraries
    names = [LIBRARY, *(f"{LAYOUT.libraries}/{name}" for name in ("libQnnHtp.so", "libQnnSystem.so", PLUGIN))]

    done = python.run("import ctypes, sys\nfor name in sys.argv[1:]: ctypes.CDLL(name)", *names)

    assert (done.returncode, done.stderr) == (0, b"")


def test_status_and_errors_cross(python: Python) -> None:
    done = python.run("import sys; print('out'); sys.exit('no such thing')")

    assert (done.returncode, done.stdout, done.stderr) == (1, b"out\n", b"no such thing\n")


@pytest.fixture(scope="module")
def context(phone: Phone, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiled graph on the phone."""
    b = Builder("product")
    x, w = b.input("x", (32, 64), np.float16), b.input("w", (64, 96), np.float16)
    b.node("MatMul", x, w, out=b.output("y", (32, 96), np.float16))
    wrapper = compile_graph(b.model(), "sm8650").write(tmp_path_factory.mktemp("context"))
    shutil.copytree(wrapper.parent, phone.path(LAYOUT.models) / "context")
    return f"{LAYOUT.models}/context/{wrapper.name}"


def test_qnn_provider_without_a_dsp_finds_no_npu(python: Python, context: str) -> None:
    done = python.run(OPEN_HTP, LIBRARY, LAYOUT.libraries, context, "shared")

    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"TargetError: {NO_NPU}\n"


@pytest.mark.parametrize(
    ("memory", "cause"),
    [("shared", "libcdsprpc.so cannot be loaded"), ("copied", "QNN_BACKEND_ERROR_CANNOT_INITIALIZE")],
)
def test_a_context_without_a_dsp_is_refused(python: Python, context: str, memory: str, cause: str) -> None:
    # With this variable the provider claims a device. Why QNN does not start is in ONNX Runtime's log only.
    done = python.run(OPEN_HTP, LIBRARY, LAYOUT.libraries, context, memory, ORT_QNN_ENABLE_CPU_BACKEND="1")

    assert (done.returncode, done.stdout) == (1, b"registered\n")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("TargetError: ")
    assert cause in line


def test_downloads_hold_what_the_phone_runs(downloads: Path) -> None:
    assert len(list(downloads.iterdir())) == 5
    (runtime,), (plugin,), (qnn,), (numpy,) = (
        list(downloads.glob(pattern))
        for pattern in (
            "onnxruntime-android-1.*.aar",
            "onnxruntime-android-qnn-2.*.aar",
            "qnn-runtime-2.*.aar",
            "python-*.deb",
        )
    )
    (interpreter,) = downloads.glob("python_3.11.*_aarch64.deb")
    for archive, library in (
        (runtime, "libonnxruntime.so"),
        (plugin, "libonnxruntime_providers_qnn.so"),
        (qnn, "libQnnHtp.so"),
    ):
        with zipfile.ZipFile(archive) as opened:
            assert opened.read(f"jni/arm64-v8a/{library}").startswith(b"\x7fELF")
    prefix = "./data/data/com.termux/files/usr"
    for package, members in (
        (interpreter, ("bin/python3.11", "bin/python3", "lib/python3.11/os.py")),
        (numpy, ("lib/python3.11/site-packages/numpy/__init__.py",)),
    ):
        listed = subprocess.run(["dpkg-deb", "--contents", package], capture_output=True, check=True, text=True).stdout
        names = {line.split()[-1] for line in listed.splitlines()}
        assert names >= {f"{prefix}/{member}" for member in members}
