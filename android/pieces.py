"""What a bundle consists of: the five downloads, what is taken from each, and what a phone has itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from estream.runtime.capi import API_VERSION
from estream.runtime.soc import Soc

JNI = "jni/arm64-v8a"  # an .aar's folder of libraries for 64-bit ARM
MACHINE = "aarch64"  # Termux's name of the same processors

ORT_LIBRARY = "libonnxruntime.so"
PLUGIN_LIBRARY = "libonnxruntime_providers_qnn.so"
BACKEND_LIBRARY = "libQnnHtp.so"
SYSTEM_LIBRARY = "libQnnSystem.so"


@dataclass(frozen=True)
class Piece:
    """One download. maven: group:artifact of an .aar, else None: a package of Termux. least: the oldest that works."""

    name: str
    what: str
    least: str
    maven: str | None = None

    @property
    def artifact(self) -> str:
        return self.maven.partition(":")[2] if self.maven else self.name

    def fetch(self, version: str | None = None, *, least: str | None = None) -> str:
        """The next step of whoever lacks this piece. version: exactly this one; None: any from `least` on."""
        exact, newer = (version, "") if version else (least or self.least, " or newer")
        if self.maven:
            return f"Fetch {self.maven}:{exact}{newer} (file {self.artifact}-{exact}.aar)"
        return fetch_package(self.name, f", version {exact}{newer}")


def fetch_package(name: str, version: str = "") -> str:
    """The next step of whoever lacks a package of Termux."""
    return f"Fetch Termux's package {name}{version} (file {name}_VERSION_{MACHINE}.deb)"


ORT = Piece("onnxruntime", "ONNX Runtime", f"1.{API_VERSION}.1", "com.microsoft.onnxruntime:onnxruntime-android")
PLUGIN = Piece("plugin", "the QNN execution provider", "2.3.0", "com.qualcomm.qti:onnxruntime-android-qnn")
QAIRT = Piece("qairt", "QAIRT's run time", "2.47.0", "com.qualcomm.qti:qnn-runtime")
PYTHON = Piece("python", "Python", "3.11")
NUMPY = Piece("python-numpy", "numpy", "2.0")
CPU_PIECES = (ORT, PYTHON, NUMPY)
ALL_PIECES = (ORT, PLUGIN, QAIRT, PYTHON, NUMPY)

# Plugin from this version on → oldest ONNX Runtime that takes it, as its releases say; the newest first.
PLUGIN_NEEDS = (("2.7.0", "1.24.2"), ("2.3.0", "1.24.1"))

# Bytes that tell a library's version: the linker's version node of ONNX Runtime, the build string of QAIRT.
ORT_VERSION = re.compile(rb"VERS_(\d+\.\d+\.\d+)\0")
QAIRT_BUILD = re.compile(rb"v(2\.\d+\.\d+\.\d{6,}(?:_\w+)?)\.?\0")  # also as the end of a message


def stub(arch: int) -> str:
    """The processor's side of the connection to the NPU."""
    return f"libQnnHtpV{arch}Stub.so"


def skel(arch: int) -> str:
    """The NPU's side of it, for the NPU's own processor."""
    return f"libQnnHtpV{arch}Skel.so"


def beside_skel(arch: int) -> str:
    """What newer releases of QAIRT split off the skel; taken where there is one."""
    return f"libQnnHtpV{arch}.so"


def is_for_npu(name: str) -> bool:
    """Whether a library is loaded by the NPU's processor, not by Android."""
    return re.fullmatch(r"libQnnHtpV\d+(Skel)?\.so", name) is not None


def qairt_libraries(socs: Sequence[Soc]) -> list[str]:
    """What a run on these SoCs loads of QAIRT. libQnnHtpPrepare.so compiles on the phone, which EStream does not."""
    arches = sorted({soc.arch for soc in socs})
    return [BACKEND_LIBRARY, SYSTEM_LIBRARY, *(name for arch in arches for name in (stub(arch), skel(arch)))]


# Libraries that every Android has for programs of its shell, and those that a Snapdragon phone's vendor adds.
ANDROID_LIBRARIES = frozenset(
    f"lib{name}.so"
    for name in (
        *("c", "m", "dl", "log", "z", "stdc++", "android", "sync", "nativewindow", "binder_ndk", "mediandk", "aaudio"),
        *("EGL", "GLESv1_CM", "GLESv2", "GLESv3", "OpenSLES", "OpenMAXAL", "vulkan", "neuralnetworks", "jnigraphics"),
        *("icu", "amidi", "camera2ndk", "nativehelper"),
        "cdsprpc",
    )
)

# Where the name of the package is not that of the library.
_PACKAGES = {
    "libz": "zlib",
    "libssl": "openssl",
    "libcrypto": "openssl",
    "libc++_shared": "libc++",
    "libblas": "libopenblas",
    "libcblas": "libopenblas",
    "liblapack": "libopenblas",
    "libsqlite3": "libsqlite",
    "libncursesw": "ncurses",
    "libpanelw": "ncurses-ui-libs",
    "libtinfow": "ncurses",
    "libreadline": "readline",
    "libgdbm": "gdbm",
    "libgdbm_compat": "gdbm",
}


def package_of(library: str, candidates: Sequence[str]) -> str | None:
    """The package of Termux that holds a library. candidates: what the needing package depends on."""
    stem = library.partition(".so")[0]
    name = _PACKAGES.get(stem, stem)
    return name if name in candidates or stem in _PACKAGES else None


# Folders and modules of Python's library that a run does not need: they would be pushed for nothing, and the extension
# modules among them would ask for more packages of Termux.
_SPARE_FOLDERS = frozenset(
    (
        *("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "venv"),
        *("debpython", "sqlite3", "curses", "dbm", "distutils", "__pycache__", "__phello__"),
    )
)
_SPARE_EXTENSIONS = re.compile(
    r"(_curses|_curses_panel|_dbm|_gdbm|_sqlite3|_ssl|_tkinter|readline|_bz2|_lzma|_zstd|pyexpat|_elementtree|_uuid"
    r"|_crypt|nis|ossaudiodev|spwd|_test\w*|_xxtestfuzz|_ctypes_test|xxlimited\w*|xxsubtype|_xx\w*)\..*\bso"
)
_SPARE_NUMPY = frozenset(("tests", "f2py", "distutils", "include", "__pycache__", "_pyinstaller"))
_SPARE_ENDINGS = (".a", ".la", ".pc", ".pyi", ".pyc", ".exe", ".h", ".c")


def of_python(path: str) -> bool:
    """Whether a run needs this file of Termux's python; path below the prefix."""
    if re.fullmatch(r"bin/python3(\.\d+)?", path):
        return True
    match = re.fullmatch(r"lib/python3\.\d+/(.+)", path)
    if match is None:
        return is_library(path)
    below = match[1]
    folders = below.split("/")[:-1]
    if below.endswith(_SPARE_ENDINGS) or folders[:1] == ["site-packages"]:
        return False
    if any(folder in _SPARE_FOLDERS or folder.startswith("config-") for folder in folders):
        return False
    return not (folders == ["lib-dynload"] and _SPARE_EXTENSIONS.fullmatch(below.rpartition("/")[2]))


def of_numpy(path: str) -> bool:
    """The same of Termux's python-numpy. Builds that bring their libraries along have them in numpy.libs."""
    match = re.fullmatch(r"lib/python3\.\d+/site-packages/numpy(?:\.libs)?/(.+)", path)
    if match is None:
        return False
    folders = match[1].split("/")[:-1]
    return not match[1].endswith(_SPARE_ENDINGS) and not any(folder in _SPARE_NUMPY for folder in folders)


def is_library(path: str) -> bool:
    """Whether a path of a package is a shared library that programs find by its name."""
    return re.fullmatch(r"lib/lib[^/]+\.so(\.[\w.]+)?", path) is not None
