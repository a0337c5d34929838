"""The folder of files that a user would have downloaded for a phone, made of the sandbox's real aarch64 files.

They have the formats and names of the real ones (an .aar is a zip archive, a Termux .deb an ar archive of two tar
archives). What is inside needs glibc, not bionic, and python3 is a script that starts qemu.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.device.sandbox import PYTHON, Sandbox

_LAUNCHER = f"""#!/bin/sh
# This phone's processor is emulated. -0: Python, and what it starts, must find this script again.
exec /system/emulator/qemu-aarch64-static -cpu cortex-a76 -L /system/emulator/aarch64 -0 "$0" \\
    "${{0%/*}}/python{PYTHON}" "$@"
"""
# Debian's Python looks for other packages in dist-packages only.
_SITE_CUSTOMIZE = f"""import site, sys

site.addsitedir(f"{{sys.prefix}}/lib/python{PYTHON}/site-packages")
"""
_PREFIX = "data/data/com.termux/files/usr"


def runtime_libraries(sandbox: Sandbox) -> dict[str, Path]:
    """ONNX Runtime's library, by its name on a phone."""
    (library,) = (sandbox.wheels / "onnxruntime/capi").glob("libonnxruntime.so*")
    return {"libonnxruntime.so": library}


def plugin_libraries(sandbox: Sandbox) -> dict[str, Path]:
    """The QNN provider's."""
    name = "libonnxruntime_providers_qnn.so"
    return {name: sandbox.wheels / "onnxruntime_qnn" / name}


def qnn_libraries(sandbox: Sandbox) -> dict[str, Path]:
    """QAIRT's back end, and per Hexagon architecture the stub for the processor and the skeleton for the NPU."""
    architectures = [f"libQnnHtpV{number}{end}.so" for number in (73, 75, 79, 81) for end in ("Stub", "Skel")]
    names = ["libQnnHtp.so", "libQnnSystem.so", *architectures]
    return {name: sandbox.wheels / "onnxruntime_qnn" / name for name in names}


def install_python(sandbox: Sandbox, prefix: Path) -> None:
    """Python without numpy at `prefix`: bin/, lib/."""
    library = prefix / f"lib/python{PYTHON}"
    ignore = shutil.ignore_patterns("__pycache__", "sitecustomize.py")
    shutil.copytree(sandbox.python / f"lib/python{PYTHON}", library, ignore=ignore)
    (library / "sitecustomize.py").write_text(_SITE_CUSTOMIZE)
    (library / "site-packages").mkdir()
    (prefix / "bin").mkdir()
    shutil.copy(sandbox.python / f"bin/python{PYTHON}", prefix / f"bin/python{PYTHON}")
    launcher = prefix / "bin/python3"
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)


def install_numpy(sandbox: Sandbox, prefix: Path) -> None:
    """numpy, beside or without Python."""
    packages = prefix / f"lib/python{PYTHON}/site-packages"
    for name in ("numpy", "numpy.libs"):
        ignore = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(sandbox.wheels / name, packages / name, ignore=ignore)


def cached_downloads(sandbox: Sandbox, qairt: str) -> Path:
    """A folder of `phone_downloads` in the cache, made now if it is not there."""
    folder = sandbox.root / f"downloads-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=sandbox.root, prefix="making-") as making:
            phone_downloads(sandbox, Path(making, "all"), qairt)
            with suppress(OSError):  # another process was faster
                Path(making, "all").rename(folder)
    return folder


def phone_downloads(sandbox: Sandbox, folder: Path, qairt: str) -> None:
    """Writes the three .aar and the two .deb files into `folder`. qairt: version of qnn-runtime, such as 2.47.0."""
    folder.mkdir(parents=True, exist_ok=True)
    provider = sandbox.version("onnxruntime_qnn")
    runtime = sandbox.version("onnxruntime")
    write_aar(folder / f"onnxruntime-android-{runtime}.aar", "ai.onnxruntime", runtime_libraries(sandbox))
    write_aar(folder / f"onnxruntime-android-qnn-{provider}.aar", "ai.onnxruntime.qnn", plugin_libraries(sandbox))
    write_aar(folder / f"qnn-runtime-{qairt}.aar", "com.qualcomm.qti.qnn", qnn_libraries(sandbox))
    for package, version, install in (
        ("python", sandbox.python_version, install_python),
        ("python-numpy", sandbox.version("numpy"), install_numpy),
    ):
        root = folder / f"{package}.root"
        install(sandbox, root / _PREFIX)
        write_deb(folder / f"{package}_{version}_aarch64.deb", package, version, root)
        shutil.rmtree(root)


def write_aar(path: Path, package: str, libraries: Mapping[str, Path]) -> None:
    """An Android archive of `libraries` for arm64-v8a."""
    manifest = f'<manifest xmlns:android="http://schemas.android.com/apk/res/android" package="{package}" />\n'
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("AndroidManifest.xml", manifest)
        archive.writestr("classes.jar", b"PK\5\6" + bytes(18))  # an empty archive
        for name, library in libraries.items():
            archive.write(library, f"jni/arm64-v8a/{name}")


def write_deb(path: Path, package: str, version: str, root: Path) -> None:
    """A Debian package for aarch64 of the tree `root`."""
    control = (
        f"Package: {package}\nArchitecture: aarch64\nInstalled-Size: 1\nMaintainer: the tests\nVersion: {version}\n"
        f"Description: {package} of the emulated phone\n"
    ).encode()
    member = tarfile.TarInfo("./control")
    member.size = len(control)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(member, io.BytesIO(control))
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(root, ".", filter=_as_packaged)
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": lzma.compress(packed.getvalue()),
        "data.tar.xz": lzma.compress(data.getvalue(), preset=0),
    }
    path.write_bytes(b"!<arch>\n" + b"".join(_ar(members.items())))


def _as_packaged(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _ar(members: Iterable[tuple[str, bytes]]) -> Iterable[bytes]:
    for name, data in members:
        mode = f"{stat.S_IFREG | 0o644:o}"
        yield f"{name:<16}{0:<12}{0:<6}{0:<6}{mode:<8}{len(data):<10}`\n".encode()
        yield data + b"\n" * (len(data) % 2)
