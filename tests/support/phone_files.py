"""Downloads of a phone's pieces in their real formats, with tiny real ELF files: what `estream device bundle` reads."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from android.elf import AARCH64, HEXAGON

PREFIX = "./data/data/com.termux/files/usr/"
JNI = "jni/arm64-v8a/"
QAIRT = "2.51.0.260929181845"
PHONE_PROGRAM = "print('a phone')\n"


def elf(
    *needed: str, machine: int = AARCH64, soname: str | None = None, bits: int = 64, extra: bytes = b"", shift: int = 0
) -> bytes:
    """A shared library that holds a dynamic section and nothing to run. shift: of addresses against offsets."""
    wide = bits == 64
    strings, entries = b"\0", []
    for tag, name in [*((1, name) for name in needed), *([(14, soname)] if soname else [])]:
        entries.append((tag, len(strings)))
        strings += name.encode() + b"\0"
    head, program, entry = (64, 56, struct.Struct("<qQ")) if wide else (52, 32, struct.Struct("<iI"))
    dynamic_at = head + 2 * program
    dynamic_bytes = entry.size * (len(entries) + 3)
    strings_at = dynamic_at + dynamic_bytes
    entries += [(5, strings_at + shift), (10, len(strings)), (0, 0)]
    dynamic = b"".join(entry.pack(tag, value) for tag, value in entries)
    size = strings_at + len(strings) + len(extra)
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9)
    if wide:
        header = ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, head, 0, 0, head, program, 2, 64, 0, 0)
        load = struct.pack("<IIQQQQQQ", 1, 5, 0, shift, shift, size, size, 0x1000)
        table = struct.pack(
            "<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at + shift, dynamic_at + shift, dynamic_bytes, dynamic_bytes, 8
        )
    else:
        header = ident + struct.pack("<HHIIIIIHHHHHH", 3, machine, 1, 0, head, 0, 0, head, program, 2, 40, 0, 0)
        load = struct.pack("<IIIIIIII", 1, 0, shift, shift, size, size, 5, 0x1000)
        table = struct.pack(
            "<IIIIIIII", 2, dynamic_at, dynamic_at + shift, dynamic_at + shift, dynamic_bytes, dynamic_bytes, 6, 4
        )
    return header + load + table + dynamic + strings + extra


def skel(*needed: str) -> bytes:
    """A library of the NPU's processor."""
    return elf(*needed, machine=HEXAGON, bits=32)


def ar(members: Mapping[str, bytes]) -> bytes:
    """An ar archive as `ar` and dpkg write it."""
    out = b"!<arch>\n"
    for name, content in members.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        out += b"\n" * (len(content) % 2)
    return out


def tar(files: Mapping[str, bytes | str]) -> bytes:
    """A tar archive; a value that is text is where a symbolic link leads."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


PACKERS = {"": bytes, ".xz": lzma.compress, ".gz": lambda content: gzip.compress(content, mtime=0), ".zst": bytes}


def deb(control: Mapping[str, str], files: Mapping[str, bytes | str], packing: str = ".xz") -> bytes:
    """A package of Termux. files: by path below the prefix; a path that starts with "!" is taken as it is."""
    text = "".join(f"{name}: {value}\n" for name, value in control.items())
    placed = {name[1:] if name.startswith("!") else PREFIX + name: content for name, content in files.items()}
    pack = PACKERS[packing]
    return ar(
        {
            "debian-binary": b"2.0\n",
            f"control.tar{packing}": pack(tar({"./control": text.encode()})),
            f"data.tar{packing}": pack(tar(placed)),
        }
    )


def aar(files: Mapping[str, bytes]) -> bytes:
    """An Android archive: a zip."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"AndroidManifest.xml": b"<manifest/>\n", **files}.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


@dataclass
class Deb:
    control: dict[str, str]
    files: dict[str, bytes | str]
    packing: str = ".xz"


@dataclass
class FakeDownloads:
    """A complete set, to be spoilt by tests before it is written. aars: files by path; raw: whole files as bytes."""

    aars: dict[str, dict[str, bytes]] = field(default_factory=dict)
    debs: dict[str, Deb] = field(default_factory=dict)
    raw: dict[str, bytes] = field(default_factory=dict)

    def take(self, name: str) -> bytes:
        """Takes a file out of the set: its bytes."""
        if name in self.aars:
            return aar(self.aars.pop(name))
        one = self.debs.pop(name)
        return deb(one.control, one.files, one.packing)

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        rest = FakeDownloads(dict(self.aars), dict(self.debs))
        contents = {name: rest.take(name) for name in (*self.aars, *self.debs)} | self.raw
        for path in folder.iterdir():
            path.unlink()
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        return folder


def control(package: str, version: str, depends: str = "", architecture: str = "aarch64") -> dict[str, str]:
    fields = {"Package": package, "Version": version, "Architecture": architecture}
    return {**fields, **({"Depends": depends} if depends else {}), "Description": "a test's\n and more"}


def whole() -> FakeDownloads:
    """What a user downloads for all SoCs, each file as small as can be."""
    qairt: dict[str, bytes] = {
        "libQnnHtp.so": elf("libc.so", "liblog.so", extra=f"\0v{QAIRT}\0this is v{QAIRT}.\0".encode()),
        "libQnnSystem.so": elf("libc.so"),
        "libQnnHtpPrepare.so": elf("libc.so"),
    }
    for arch in (73, 75, 79, 81):
        qairt[f"libQnnHtpV{arch}Stub.so"] = elf("libcdsprpc.so", "libc.so")
        qairt[f"libQnnHtpV{arch}Skel.so"] = skel("libc++.so.1", "libgcc.so")
    qairt["libQnnHtpV81.so"] = skel()
    dynload, site = "lib/python3.13/lib-dynload/", "lib/python3.13/site-packages/"
    return FakeDownloads(
        aars={
            "onnxruntime-android-1.24.2.aar": {
                JNI + "libonnxruntime.so": elf("libc.so", "liblog.so", extra=b"\0VERS_1.24.2\0"),
                JNI + "libonnxruntime4j_jni.so": elf("libonnxruntime.so"),
                "jni/x86_64/libonnxruntime.so": elf(machine=62),
            },
            "onnxruntime-android-qnn-2.7.0.aar": {JNI + "libonnxruntime_providers_qnn.so": elf("libc++_shared.so")},
            "qnn-runtime-2.51.0.aar": {JNI + name: content for name, content in qairt.items()},
        },
        debs={
            "python_3.13.11_aarch64.deb": Deb(
                control("python", "3.13.11", "gdbm, libffi (>= 3.4), openssl, zlib"),
                {
                    "bin/python3.13": elf("libpython3.13.so.1.0", "libc.so"),
                    "bin/python3": "python3.13",
                    "bin/pydoc": "pydoc3.13",
                    "lib/libpython3.13.so.1.0": elf("libc.so", "libz.so.1"),
                    "lib/libpython3.13.so": "libpython3.13.so.1.0",
                    "lib/python3.13/os.py": b"# os\n",
                    "lib/python3.13/test/test_os.py": b"# spare\n",
                    "lib/python3.13/ctypes/__init__.py": b"# ctypes\n",
                    "lib/python3.13/__pycache__/os.cpython-313.pyc": b"spare",
                    "lib/python3.13/config-3.13/Makefile": b"spare",
                    dynload + "_ctypes.cpython-313.so": elf("libffi.so", "libc.so"),
                    dynload + "_hashlib.cpython-313.so": elf("libcrypto.so.3"),
                    dynload + "_gdbm.cpython-313.so": elf("libgdbm.so"),
                    site + "README.txt": b"spare",
                    "include/python3.13/Python.h": b"spare",
                    "share/man/man1/python.1": b"spare",
                },
            ),
            "python-numpy_2.3.4_aarch64.deb": Deb(
                control("python-numpy", "2.3.4", "libc++, libopenblas, python"),
                {
                    site + "numpy/__init__.py": b"# numpy\n",
                    site + "numpy/_core/_multiarray_umath.cpython-313.so": elf("libopenblas.so", "libc++_shared.so"),
                    site + "numpy/_core/tests/test_it.py": b"# spare\n",
                    site + "numpy/_core/include/numpy/arrayobject.h": b"spare",
                },
            ),
            "libffi_3.4.7_aarch64.deb": Deb(control("libffi", "3.4.7"), {"lib/libffi.so": elf("libc.so")}),
            "zlib_1.3.1_aarch64.deb": Deb(
                control("zlib", "1.3.1"),
                {
                    "lib/libz.so.1.3.1": elf("libc.so"),
                    "lib/libz.so.1": "/data/data/com.termux/files/usr/lib/libz.so.1.3.1",
                },
            ),
            "openssl_3.5.4_aarch64.deb": Deb(
                control("openssl", "1:3.5.4", "ca-certificates, zlib"),
                {"lib/libcrypto.so.3": elf("libz.so.1"), "lib/libssl.so.3": elf("libcrypto.so.3")},
            ),
            "libopenblas_0.3.30_aarch64.deb": Deb(
                control("libopenblas", "0.3.30"), {"lib/libopenblas.so": elf("libm.so")}, ".gz"
            ),
            "libc++_29_aarch64.deb": Deb(control("libc++", "29"), {"lib/libc++_shared.so": elf("libc.so")}),
        },
    )


def phone(folder: Path) -> Path:
    """A folder with a program for the phone."""
    folder.mkdir(exist_ok=True)
    (folder / "estream_phone.py").write_text(PHONE_PROGRAM)
    return folder
