"""`estream device bundle`: the downloads become a bundle, and everything that is wrong with them is named at once."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from android.bundle import MANIFEST, Bundle, build_bundle
from android.problems import BundleError, IncompleteError
from android.runtime_part import runtime_files
from estream.cli.main import main
from estream.errors import UsageError
from estream.package.contexts import ContextManifest
from tests.support.phone_files import JNI, QAIRT, Deb, FakeDownloads, control, elf, phone, skel, whole

Spoil = Callable[[FakeDownloads], object]
ORT, PLUGIN = "onnxruntime-android-1.24.2.aar", "onnxruntime-android-qnn-2.7.0.aar"
QNN, PYTHON, NUMPY = "qnn-runtime-2.51.0.aar", "python_3.13.11_aarch64.deb", "python-numpy_2.3.4_aarch64.deb"
DYNLOAD = "lib/python3.13/lib-dynload/"


def build(tmp_path: Path, downloads: FakeDownloads, **options: object) -> Bundle:
    folder = downloads.write(tmp_path / "downloads")
    return build_bundle(folder, tmp_path / "out", phone=phone(tmp_path / "phone"), **options)  # type: ignore[arg-type]


def problems(tmp_path: Path, downloads: FakeDownloads, **options: object) -> list[str]:
    with pytest.raises(IncompleteError) as told:
        build(tmp_path, downloads, **options)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    return [f"{problem.kind}: {problem}" for problem in told.value.problems]


def package(tmp_path: Path, *socs: str, qairt: str = QAIRT) -> Path:
    """As much of a packed model as a bundle is checked against."""
    folder = tmp_path / "model.estream"
    folder.mkdir()
    (folder / "model.json").write_text('{"format": "estream"}')
    for soc in socs:
        contexts = folder / "graphs" / "htp" / soc
        contexts.mkdir(parents=True)
        (contexts / "manifest.json").write_bytes(ContextManifest(qairt, soc, 81, {}, {}).to_json())
    return folder


def test_a_whole_set_of_downloads(tmp_path: Path) -> None:
    bundle = build(tmp_path, whole())
    assert bundle == Bundle.open(tmp_path / "out")
    assert bundle.damaged() == []
    assert dict(bundle.versions) == {
        "libc++": "29",
        "libffi": "3.4.7",
        "libopenblas": "0.3.30",
        "onnxruntime": "1.24.2",
        "openssl": "1:3.5.4",
        "plugin": "2.7.0",
        "python": "3.13.11",
        "numpy": "2.3.4",
        "qairt": QAIRT,
        "zlib": "1.3.1",
    }
    assert bundle.known_from["onnxruntime"] == "libonnxruntime.so"
    assert bundle.known_from["qairt"] == "libQnnHtp.so"
    assert bundle.known_from["plugin"] == "its file name"
    assert bundle.known_from["python"] == "its control file"
    assert bundle.socs == ("sm8550", "sm8650", "sm8750", "sm8850")
    paths = [file.path for file in bundle.files]
    assert paths == sorted(paths)
    dynload, site = f"python/{DYNLOAD}", "python/lib/python3.13/site-packages/numpy/"
    assert [path for path in paths if not path.startswith("app/")] == [
        "lib/libQnnHtp.so",
        *(f"lib/libQnnHtpV{arch}{side}.so" for arch in (73, 75, 79) for side in ("Skel", "Stub")),
        "lib/libQnnHtpV81.so",
        "lib/libQnnHtpV81Skel.so",
        "lib/libQnnHtpV81Stub.so",
        "lib/libQnnSystem.so",
        "lib/libonnxruntime.so",
        "lib/libonnxruntime_providers_qnn.so",
        "python/bin/python3",
        "python/bin/python3.13",
        "python/lib/libc++_shared.so",
        "python/lib/libcrypto.so.3",
        "python/lib/libffi.so",
        "python/lib/libopenblas.so",
        "python/lib/libpython3.13.so.1.0",
        "python/lib/libz.so.1",
        "python/lib/python3.13/ctypes/__init__.py",
        f"{dynload}_ctypes.cpython-313.so",
        f"{dynload}_hashlib.cpython-313.so",
        "python/lib/python3.13/os.py",
        f"{site}__init__.py",
        f"{site}_core/_multiarray_umath.cpython-313.so",
    ]
    app = {path for path in paths if path.startswith("app/")}
    assert app == {"app/estream_phone.py", *(f"app/{name}" for name in runtime_names())}
    assert {"app/estream/engine.py", "app/estream/flash/machine.py"} < app
    assert not any("/cli/" in path or path.endswith(("writer.py", "pack.py")) for path in app)


def runtime_names() -> list[str]:
    root = Path(__file__).resolve().parents[2]
    return [path.relative_to(root).as_posix() for path in runtime_files().values()]


def test_modes_sizes_and_bytes(tmp_path: Path) -> None:
    bundle = build(tmp_path, whole())
    there = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert there == {tmp_path / "out" / file.path for file in bundle.files} | {tmp_path / "out" / MANIFEST}
    for file in bundle.files:
        found = os.stat(tmp_path / "out" / file.path)
        assert (found.st_size, stat.S_IMODE(found.st_mode)) == (file.bytes, file.mode)
        assert file.mode == (0o755 if file.path.startswith("python/bin/") else 0o644)
    assert (tmp_path / "out" / "python/bin/python3").read_bytes() == elf("libpython3.13.so.1.0", "libc.so")


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    first = build(tmp_path, whole())
    before = {file.path: (tmp_path / "out" / file.path).read_bytes() for file in first.files}
    manifest = (tmp_path / "out" / MANIFEST).read_bytes()
    build(tmp_path, whole())  # replaces the first
    assert {file.path: (tmp_path / "out" / file.path).read_bytes() for file in first.files} == before
    assert (tmp_path / "out" / MANIFEST).read_bytes() == manifest


def test_for_the_cpu_only(tmp_path: Path) -> None:
    downloads = whole()
    del downloads.aars[PLUGIN], downloads.aars[QNN]
    bundle = build(tmp_path, downloads, cpu_only=True)
    assert [file.path for file in bundle.files if file.path.startswith("lib/")] == ["lib/libonnxruntime.so"]
    assert (bundle.socs, "plugin" in bundle.versions) == ((), False)


def test_for_one_soc_of_a_package(tmp_path: Path) -> None:
    bundle = build(tmp_path, whole(), package=package(tmp_path, "sm8650", "sm8850"), soc="SM8850")
    assert bundle.socs == ("sm8850",)
    names = [file.path for file in bundle.files if "HtpV" in file.path]
    assert names == ["lib/libQnnHtpV81.so", "lib/libQnnHtpV81Skel.so", "lib/libQnnHtpV81Stub.so"]


def test_files_may_have_any_name_where_they_tell_their_version(tmp_path: Path) -> None:
    downloads = whole()
    downloads.aars["one.aar"], downloads.aars["two.aar"] = downloads.aars.pop(ORT), downloads.aars.pop(QNN)
    downloads.debs = {f"{index}.deb": one for index, one in enumerate(downloads.debs.values())}
    assert build(tmp_path, downloads).versions["qairt"] == QAIRT


ORT_STEP = "Fetch com.microsoft.onnxruntime:onnxruntime-android:1.24.1 or newer (file onnxruntime-android-1.24.1.aar)"
PLUGIN_STEP = "Fetch com.qualcomm.qti:onnxruntime-android-qnn:2.3.0 or newer (file onnxruntime-android-qnn-2.3.0.aar)"
QNN_STEP = "Fetch com.qualcomm.qti:qnn-runtime:2.47.0 or newer (file qnn-runtime-2.47.0.aar)"
PYTHON_STEP = "Fetch Termux's package python, version 3.11 or newer (file python_VERSION_aarch64.deb)"
NUMPY_STEP = "Fetch Termux's package python-numpy, version 2.0 or newer (file python-numpy_VERSION_aarch64.deb)"


def drop_deb(name: str) -> Spoil:
    return lambda downloads: downloads.debs.pop(name)


def drop_aar(name: str) -> Spoil:
    return lambda downloads: downloads.aars.pop(name)


def drop_library(name: str) -> Spoil:
    return lambda downloads: downloads.aars[QNN].pop(JNI + name)


MISSING: dict[str, tuple[Spoil, str]] = {
    "onnxruntime": (drop_aar(ORT), f"missing: ONNX Runtime. {ORT_STEP}"),
    "plugin": (drop_aar(PLUGIN), f"missing: the QNN execution provider. {PLUGIN_STEP}"),
    "qnn-runtime": (drop_aar(QNN), f"missing: QAIRT's run time. {QNN_STEP}"),
    "python": (drop_deb(PYTHON), f"missing: Python. {PYTHON_STEP}"),
    "numpy": (drop_deb(NUMPY), f"missing: numpy. {NUMPY_STEP}"),
    "libffi": (
        drop_deb("libffi_3.4.7_aarch64.deb"),
        "missing: libffi.so, needed by python/lib/python3.13/lib-dynload/_ctypes.cpython-313.so. "
        "Fetch Termux's package libffi (file libffi_VERSION_aarch64.deb)",
    ),
    "openssl, whose library has another name": (
        drop_deb("openssl_3.5.4_aarch64.deb"),
        "missing: libcrypto.so.3, needed by python/lib/python3.13/lib-dynload/_hashlib.cpython-313.so. "
        "Fetch Termux's package openssl (file openssl_VERSION_aarch64.deb)",
    ),
    "zlib, which a library needs": (
        drop_deb("zlib_1.3.1_aarch64.deb"),
        "missing: libz.so.1, needed by python/lib/libpython3.13.so.1.0. "
        "Fetch Termux's package zlib (file zlib_VERSION_aarch64.deb)",
    ),
    "libc++, which the plugin needs": (
        drop_deb("libc++_29_aarch64.deb"),
        "missing: libc++_shared.so, needed by lib/libonnxruntime_providers_qnn.so. "
        "Fetch Termux's package libc++ (file libc++_VERSION_aarch64.deb)",
    ),
    "a library of a package that is there": (
        lambda downloads: downloads.debs["libffi_3.4.7_aarch64.deb"].files.clear(),
        "missing: libffi.so, needed by python/lib/python3.13/lib-dynload/_ctypes.cpython-313.so. Fetch the one of "
        "Termux's packages that holds it: python_3.13.11_aarch64.deb depends on gdbm",
    ),
    "system library of QAIRT": (
        drop_library("libQnnSystem.so"),
        "missing: jni/arm64-v8a/libQnnSystem.so, which should be in qnn-runtime-2.51.0.aar. Fetch it again",
    ),
    "interpreter": (
        lambda downloads: downloads.debs[PYTHON].files.pop("bin/python3.13"),
        "missing: bin/python3, which should be in python_3.13.11_aarch64.deb. Fetch it again",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), MISSING.values(), ids=list(MISSING))
def test_names_what_is_missing(tmp_path: Path, spoil: Spoil, message: str) -> None:
    downloads = whole()
    spoil(downloads)
    assert problems(tmp_path, downloads) == [message]


def rename(old: str, new: str) -> Spoil:
    def spoil(downloads: FakeDownloads) -> None:
        downloads.aars[new] = downloads.aars.pop(old)

    return spoil


def old_ort(version: str) -> Spoil:
    def spoil(downloads: FakeDownloads) -> None:
        downloads.aars[ORT][JNI + "libonnxruntime.so"] = elf(extra=f"VERS_{version}\0".encode())

    return spoil


def set_control(name: str, field: str, value: str) -> Spoil:
    return lambda downloads: downloads.debs[name].control.update({field: value})


def other_python(downloads: FakeDownloads) -> None:
    files = downloads.debs[NUMPY].files
    downloads.debs[NUMPY].files = {path.replace("3.13", "3.12"): content for path, content in files.items()}


def put(name: str, library: str, content: bytes) -> Spoil:
    return lambda downloads: downloads.aars[name].update({JNI + library: content})


def both(downloads: FakeDownloads) -> None:
    downloads.aars["onnxruntime-android-1.25.0.aar"] = {JNI + "libonnxruntime.so": elf(extra=b"VERS_1.25.0\0")}


UNFIT: dict[str, tuple[Spoil, str]] = {
    "ONNX Runtime without the kernels": (
        old_ort("1.23.2"),
        "does not fit: onnxruntime-android-1.24.2.aar is too old "
        f"(asked ONNX Runtime 1.24.1 or newer, had 1.23.2, by libonnxruntime.so). {ORT_STEP}",
    ),
    "ONNX Runtime without what the plugin needs": (
        old_ort("1.24.1"),
        "does not fit: onnxruntime-android-1.24.2.aar is too old for onnxruntime-android-qnn-2.7.0.aar "
        "(asked ONNX Runtime 1.24.2 or newer, had 1.24.1, by libonnxruntime.so). "
        "Fetch com.microsoft.onnxruntime:onnxruntime-android:1.24.2 or newer (file onnxruntime-android-1.24.2.aar)",
    ),
    "old plugin": (
        rename(PLUGIN, "onnxruntime-android-qnn-2.2.0.aar"),
        "does not fit: onnxruntime-android-qnn-2.2.0.aar is too old "
        f"(asked the QNN execution provider 2.3.0 or newer, had 2.2.0, by its file name). {PLUGIN_STEP}",
    ),
    "plugin without a version": (
        rename(PLUGIN, "plugin.aar"),
        "does not fit: the version of plugin.aar cannot be told. "
        "Give it the name that it was published under, onnxruntime-android-qnn-VERSION.aar",
    ),
    "the other artifact of the same name": (
        lambda downloads: downloads.aars.update({PLUGIN: {JNI + "libonnxruntime.so": elf(extra=b"VERS_1.27.0\0")}}),
        "does not fit: onnxruntime-android-qnn-2.7.0.aar is Microsoft's ONNX Runtime with QNN built in, not Qualcomm's "
        f"plugin of the same name (asked libonnxruntime_providers_qnn.so, had libonnxruntime.so). {PLUGIN_STEP}",
    ),
    "old Python": (
        set_control(PYTHON, "Version", "3.10.9-1"),
        "does not fit: python_3.13.11_aarch64.deb is too old "
        f"(asked Python 3.11 or newer, had 3.10.9-1, by its control file). {PYTHON_STEP}",
    ),
    "old numpy": (
        set_control(NUMPY, "Version", "1.26.4"),
        "does not fit: python-numpy_2.3.4_aarch64.deb is too old "
        f"(asked numpy 2.0 or newer, had 1.26.4, by its control file). {NUMPY_STEP}",
    ),
    "numpy of another Python": (
        other_python,
        "does not fit: python-numpy_2.3.4_aarch64.deb is built for another Python than python_3.13.11_aarch64.deb "
        "(asked Python 3.13, had Python 3.12). Fetch the two packages of Termux anew, on the same day",
    ),
    "package of another processor": (
        set_control("libffi_3.4.7_aarch64.deb", "Architecture", "arm"),
        "does not fit: libffi_3.4.7_aarch64.deb is for another processor (asked aarch64, had arm). "
        "Fetch Termux's package libffi (file libffi_VERSION_aarch64.deb)",
    ),
    "library of another processor": (
        put(QNN, "libQnnSystem.so", elf(machine=62)),
        "does not fit: qnn-runtime-2.51.0.aar: lib/libQnnSystem.so is for another processor "
        "(asked aarch64, had x86-64). Fetch it again",
    ),
    "skel of the phone's processor": (
        put(QNN, "libQnnHtpV75Skel.so", elf()),
        "does not fit: qnn-runtime-2.51.0.aar: lib/libQnnHtpV75Skel.so is for another processor "
        "(asked Hexagon, had aarch64). Fetch it again",
    ),
    "two of a kind": (
        both,
        "does not fit: onnxruntime is there 2 times (had onnxruntime-android-1.24.2.aar (1.24.2), "
        "onnxruntime-android-1.25.0.aar (1.25.0)). Keep one of them",
    ),
    "something else": (
        lambda downloads: downloads.aars.update({"gson-2.1.aar": {"classes.jar": b""}}),
        "does not fit: gson-2.1.aar is no piece of a bundle (asked libonnxruntime.so, libonnxruntime_providers_qnn.so "
        "or libQnnHtp.so in jni/arm64-v8a, had no jni/arm64-v8a). Take it out of the folder",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), UNFIT.values(), ids=list(UNFIT))
def test_names_what_does_not_fit(tmp_path: Path, spoil: Spoil, message: str) -> None:
    downloads = whole()
    spoil(downloads)
    assert problems(tmp_path, downloads) == [message]


def test_names_that_lead_to_no_file_are_told(tmp_path: Path) -> None:
    folder = whole().write(tmp_path / "downloads")
    (folder / ORT).unlink()
    (folder / ORT).symlink_to(tmp_path / "nowhere.aar")
    (folder / "gson.aar").mkdir()
    with pytest.raises(IncompleteError) as told:
        build_bundle(folder, tmp_path / "out", phone=phone(tmp_path / "phone"))
    assert [str(problem) for problem in told.value.problems] == [
        "gson.aar is no file (had a folder). Take it out of the folder, or fetch the file",
        f"{ORT} is no file (had a link that leads nowhere). Take it out of the folder, or fetch the file",
    ]


def cut(name: str) -> Spoil:
    def spoil(downloads: FakeDownloads) -> None:
        content = downloads.take(name)
        downloads.raw[name] = content[: len(content) // 2]

    return spoil


DAMAGED: dict[str, tuple[Spoil, str]] = {
    "cut .aar": (cut(QNN), "damaged: qnn-runtime-2.51.0.aar is damaged: File is not a zip file. Fetch it again"),
    "cut .deb": (
        cut(NUMPY),
        "damaged: python-numpy_2.3.4_aarch64.deb is damaged: member data.tar.xz ends early. Fetch it again",
    ),
    "empty .deb": (
        lambda downloads: (downloads.debs.pop(PYTHON), downloads.raw.update({PYTHON: b""})),
        "damaged: python_3.13.11_aarch64.deb is damaged: it is not an ar archive. Fetch it again",
    ),
    "cut library": (
        put(QNN, "libQnnSystem.so", elf("libc.so")[:100]),
        "damaged: qnn-runtime-2.51.0.aar: lib/libQnnSystem.so is damaged: it ends early. Fetch it again",
    ),
    "a page of an error instead of a library": (
        put(PLUGIN, "libonnxruntime_providers_qnn.so", b"<html>"),
        "damaged: onnxruntime-android-qnn-2.7.0.aar: lib/libonnxruntime_providers_qnn.so is damaged: "
        "it is not an ELF file. Fetch it again",
    ),
    "link that leads out": (
        lambda downloads: downloads.debs["zlib_1.3.1_aarch64.deb"].files.update(
            {"lib/libz.so.1": "/system/lib/libz.so"}
        ),
        "damaged: zlib_1.3.1_aarch64.deb: link lib/libz.so.1 leads out of the archive (had /system/lib/libz.so). "
        "Fetch it again",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), DAMAGED.values(), ids=list(DAMAGED))
def test_names_what_is_damaged(tmp_path: Path, spoil: Spoil, message: str) -> None:
    downloads = whole()
    spoil(downloads)
    assert problems(tmp_path, downloads)[0] == message


def test_everything_is_told_at_once(tmp_path: Path) -> None:
    told = problems(tmp_path, FakeDownloads())
    steps = (ORT_STEP, PLUGIN_STEP, QNN_STEP, PYTHON_STEP, NUMPY_STEP)
    assert sorted(line.partition(". ")[2] for line in told) == sorted(steps)


QAIRT_STEP = "Fetch com.qualcomm.qti:qnn-runtime:2.50.1 (file qnn-runtime-2.50.1.aar)"


def test_qairt_of_the_packages_contexts(tmp_path: Path) -> None:
    asked = package(tmp_path, "sm8650", qairt="2.50.1.260801000000")
    assert problems(tmp_path, whole(), package=asked) == [
        "does not fit: qnn-runtime-2.51.0.aar is not the QAIRT that compiled the package's contexts for sm8650 "
        f"(asked 2.50.1.260801000000, had {QAIRT}, by libQnnHtp.so). {QAIRT_STEP}, "
        "or compile again with a host package that has this QAIRT"
    ]


def test_missing_qairt_is_asked_for_by_the_packages_version(tmp_path: Path) -> None:
    downloads = whole()
    del downloads.aars[QNN]
    asked = package(tmp_path, "sm8650", qairt="2.50.1.260801000000")
    assert problems(tmp_path, downloads, package=asked) == [f"missing: QAIRT's run time. {QAIRT_STEP}"]


def test_qairt_by_file_name_where_the_library_tells_nothing(tmp_path: Path) -> None:
    downloads = whole()
    downloads.aars[QNN][JNI + "libQnnHtp.so"] = elf()
    bundle = build(tmp_path, downloads, package=package(tmp_path, "sm8650"))
    assert (bundle.versions["qairt"], bundle.known_from["qairt"]) == ("2.51.0", "its file name")


def test_stub_and_skel_of_the_wanted_soc(tmp_path: Path) -> None:
    downloads = whole()
    for side in ("Stub", "Skel"):
        del downloads.aars[QNN][f"{JNI}libQnnHtpV81{side}.so"]
    assert problems(tmp_path, downloads, soc="sm8850") == [
        "missing: qnn-runtime-2.51.0.aar lacks libQnnHtpV81Stub.so and libQnnHtpV81Skel.so for sm8850. " + QNN_STEP
    ]


def test_without_a_wish_the_socs_that_are_there(tmp_path: Path) -> None:
    downloads = whole()
    del downloads.aars[QNN][f"{JNI}libQnnHtpV73Skel.so"]
    assert build(tmp_path, downloads).socs == ("sm8650", "sm8750", "sm8850")


@pytest.mark.parametrize(
    ("compiled", "soc", "message"),
    [
        ((), None, "has no contexts. Compile them first: estream compile {} --soc SOC"),
        (
            ("sm8650",),
            "sm8850",
            "has no contexts for sm8850 (had sm8650). Compile them first: estream compile {} --soc sm8850",
        ),
    ],
)
def test_package_without_contexts(tmp_path: Path, compiled: tuple[str, ...], soc: str | None, message: str) -> None:
    asked = package(tmp_path, *compiled)
    assert problems(tmp_path, whole(), package=asked, soc=soc) == [f"missing: {asked} {message.format(asked)}"]


def test_libraries_that_only_this_phone_has(tmp_path: Path) -> None:
    downloads = whole()
    downloads.aars[QNN][JNI + "libQnnSystem.so"] = elf("libvendor.so")
    assert problems(tmp_path, downloads) == [
        "missing: libvendor.so, needed by lib/libQnnSystem.so. "
        "No package is known to hold it. If the phone has it itself, pass --on-phone libvendor.so"
    ]
    assert build(tmp_path, downloads, on_phone=["libvendor.so"]).socs


def test_an_interpreter_may_be_a_script(tmp_path: Path) -> None:
    downloads = whole()
    downloads.debs[PYTHON].files["bin/python3"] = b"#!/bin/sh\n"
    modes = {file.path: file.mode for file in build(tmp_path, downloads).files}
    assert (modes["python/bin/python3"], modes["python/bin/python3.13"]) == (0o755, 0o755)


def test_numpy_may_bring_its_libraries_along(tmp_path: Path) -> None:
    downloads = whole()
    del downloads.debs["libopenblas_0.3.30_aarch64.deb"]
    downloads.debs[NUMPY].files["lib/python3.13/site-packages/numpy.libs/libopenblas.so"] = elf("libm.so")
    bundle = build(tmp_path, downloads)
    assert [file.path for file in bundle.files if "openblas" in file.path] == [
        "python/lib/python3.13/site-packages/numpy.libs/libopenblas.so"
    ]


def test_a_skel_takes_its_own_libraries_along(tmp_path: Path) -> None:
    downloads = whole()
    downloads.aars[QNN][JNI + "libQnnHtpV75Skel.so"] = skel("libQnnHtpV75Extra.so", "libgcc.so")
    downloads.aars[QNN][JNI + "libQnnHtpV75Extra.so"] = elf()
    bundle = build(tmp_path, downloads, soc="sm8650")
    assert "lib/libQnnHtpV75Extra.so" in [file.path for file in bundle.files]


def test_nobodys_own_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a bundle"):
        build(tmp_path, whole())
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_an_old_bundle_is_replaced_whole(tmp_path: Path) -> None:
    build(tmp_path, whole())
    (tmp_path / "out" / "lib" / "left.so").write_bytes(b"old")
    build(tmp_path, whole(), soc="sm8650")
    assert not (tmp_path / "out" / "lib" / "left.so").exists()


@pytest.mark.parametrize("option", [{"soc": "sm8650"}, {"package": Path("model.estream")}])
def test_cpu_only_excludes_the_npus_options(tmp_path: Path, option: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="for the CPU only"):
        build(tmp_path, whole(), cpu_only=True, **option)


def test_a_program_for_the_phone_must_be_there(tmp_path: Path) -> None:
    folder = whole().write(tmp_path / "downloads")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IncompleteError, match=r"missing: EStream's own .*estream_phone\.py\. Install EStream again"):
        build_bundle(folder, tmp_path / "out", phone=tmp_path / "empty")


BROKEN_MANIFESTS: dict[str, tuple[Callable[[dict[str, object]], object], str]] = {
    "format": (lambda raw: raw.update(format="zip"), "field format (asked estream-bundle, had 'zip')"),
    "version": (lambda raw: raw.update(version=2), "field version (asked 1, had 2)"),
    "no files": (lambda raw: raw.pop("files"), "a field is missing or wrong: 'files'"),
    "path that leads out": (lambda raw: first(raw).update(path="../x"), "a field is missing or wrong: file {"),
    "absolute path": (lambda raw: first(raw).update(path="/data/x"), "a field is missing or wrong: file {"),
    "bytes": (lambda raw: first(raw).update(bytes="1"), "a field is missing or wrong: file {"),
    "mode": (lambda raw: first(raw).update(mode=0o4755), "a field is missing or wrong: file {"),
}


def first(raw: dict[str, object]) -> dict[str, object]:
    files = raw["files"]
    assert isinstance(files, list)
    entry: dict[str, object] = files[0]
    return entry


@pytest.mark.parametrize(("spoil", "message"), BROKEN_MANIFESTS.values(), ids=list(BROKEN_MANIFESTS))
def test_open_refuses_a_broken_manifest(
    tmp_path: Path, spoil: Callable[[dict[str, object]], object], message: str
) -> None:
    build(tmp_path, whole())
    raw = json.loads((tmp_path / "out" / MANIFEST).read_text())
    spoil(raw)
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(BundleError) as told:
        Bundle.open(tmp_path / "out")
    assert message in str(told.value)
    assert str(told.value).endswith("Build it again: estream device bundle")


def test_open_and_damaged_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is not a bundle: it has no bundle\.json"):
        Bundle.open(tmp_path)
    bundle = build(tmp_path, whole())
    one = tmp_path / "out" / "app" / "estream_phone.py"
    content = one.read_bytes()
    one.write_bytes(content[:-2] + b"x\n")
    assert Bundle.open(tmp_path / "out").damaged() == [f"{one} is damaged: it does not match its SHA-256"]
    one.write_bytes(content[1:])
    with pytest.raises(BundleError, match=rf"has another size .* \(asked {len(content)}, had {len(content) - 1}\)"):
        Bundle.open(tmp_path / "out")
    one.unlink()
    with pytest.raises(BundleError, match=r"estream_phone\.py is damaged: No such file"):
        Bundle.open(tmp_path / "out")
    assert bundle.damaged() == [f"{one}: No such file or directory"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("android.gather.PHONE", phone(tmp_path / "phone"))
    folder = whole().write(tmp_path / "downloads")
    command = ["device", "bundle", "--from", str(folder), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "  onnxruntime  1.24.2, by libonnxruntime.so\n" in out
    assert "  serves       sm8550, sm8650, sm8750, sm8850\n" in out
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["versions"]["qairt"], told["socs"][0]) == (True, QAIRT, "sm8550")
    (folder / NUMPY).unlink()
    assert main(command) == 1
    done = capsys.readouterr()
    assert done.out == f"missing: numpy. {NUMPY_STEP}\n"
    assert done.err == f"estream: error: {folder} makes no bundle: 1 missing\n"
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == [
        {"kind": "missing", "thing": "numpy", "asked": None, "had": None, "next_step": NUMPY_STEP}
    ]


def test_command_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["device", "bundle", "--from", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "none is not a folder. Name the folder that holds the .aar and .deb files" in capsys.readouterr().err
    assert main([*command, "--soc", "sm1"]) == 2


def test_packages_that_no_one_needs_stay_out(tmp_path: Path) -> None:
    downloads = whole()
    downloads.debs["gdbm_1.26_aarch64.deb"] = Deb(control("gdbm", "1.26"), {"lib/libgdbm.so": elf()})
    bundle = build(tmp_path, downloads)
    assert "gdbm" not in bundle.versions
