"""The readers of .aar, .deb and ELF: real formats, hostile names, damage."""

from __future__ import annotations

import contextlib
import io
import lzma
import struct
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from android import archives
from android.archives import Contents, read_aar, read_ar, read_control, read_data
from android.elf import AARCH64, HEXAGON, Elf, read_elf
from android.problems import BundleError
from android.versions import at_least, numbers, same_build
from tests.support.phone_files import PREFIX, aar, ar, control, deb, elf, tar

CONTROL = control("zlib", "1.3.1", "libc++ (>= 29), python3 | python")
FILES: dict[str, bytes | str] = {"lib/libz.so.1.3.1": b"library", "lib/libz.so": "libz.so.1", "share/doc": b"text"}
NAMES = st.text(st.sampled_from("abcdefghijklmnop.-_0123456789"), min_size=1, max_size=15)


def written(tmp_path: Path, content: bytes, name: str = "a.deb") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def everything(path: str) -> bool:
    return True


@given(st.dictionaries(NAMES, st.binary(max_size=40), max_size=5))
def test_ar_round_trip(members: dict[str, bytes]) -> None:
    content = ar(members)
    places = read_ar(io.BytesIO(content))
    assert {name: content[at : at + size] for name, (at, size) in places.items()} == members


@given(st.dictionaries(NAMES, st.binary(max_size=40), min_size=1, max_size=5), st.data())
def test_ar_that_is_cut_or_changed_is_refused_or_read(members: dict[str, bytes], data: st.DataObject) -> None:
    content = bytearray(ar(members))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    with contextlib.suppress(ValueError):
        for start, size in read_ar(io.BytesIO(content)).values():
            assert 0 <= size <= len(content) - start


@given(st.binary(max_size=200))
def test_ar_of_any_bytes(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_ar(io.BytesIO(b"!<arch>\n" + content))


@pytest.mark.parametrize("packing", ["", ".xz", ".gz"])
def test_deb(tmp_path: Path, packing: str) -> None:
    path = written(tmp_path, deb(CONTROL, FILES, packing))
    fields = read_control(path)
    assert (fields["package"], fields["version"], fields["architecture"]) == ("zlib", "1.3.1", "aarch64")
    assert fields["description"] == "a test's\nand more"
    contents = read_data(path, lambda name: name.startswith("lib/"))
    assert sorted(contents.files) == ["lib/libz.so.1.3.1"]
    assert contents.files["lib/libz.so.1.3.1"]() == b"library"
    assert contents.links == {"lib/libz.so": "lib/libz.so.1"}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python reads Zstandard")
def test_zstandard_is_refused_with_a_next_step(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as told:
        read_control(written(tmp_path, deb(CONTROL, FILES, ".zst")))
    assert str(told.value) == (
        "a.deb: control.tar.zst is packed with Zstandard, which Python reads from 3.14 on. "
        "Run this command with Python 3.14, or fetch Termux's own package, which is packed with xz"
    )


def test_links(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {
        "lib/one.so": b"one",
        "lib/relative.so": "../lib/one.so",
        "lib/absolute.so": "/data/data/com.termux/files/usr/lib/one.so",
        "lib/second.so": "relative.so",
        "lib/dangling.so": "none.so",
        "lib/out.so": "../../../../../etc/passwd",
        "lib/system.so": "/system/lib64/libz.so",
        "lib/round.so": "about.so",
        "lib/about.so": "round.so",
    }
    contents = read_data(written(tmp_path, deb(CONTROL, files)), everything)
    for name in ("one", "relative", "absolute", "second"):
        read = contents.find(f"lib/{name}.so")
        assert read is not None and read() == b"one"
    assert contents.find("lib/dangling.so") is None
    assert contents.find("lib/none.so") is None
    for name in ("out", "system"):
        with pytest.raises(BundleError, match=rf"a\.deb: link lib/{name}\.so leads out of the archive"):
            contents.find(f"lib/{name}.so")
    with pytest.raises(BundleError, match="leads in a circle"):
        contents.find("lib/round.so")


@pytest.mark.parametrize("name", ["../evil", "./../evil", "data/../../evil", "/etc/passwd", "a\\..\\b"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleError, match=r"leads out of the archive\. Fetch it again"):
        read_data(written(tmp_path, deb(CONTROL, {f"!{name}": b"x"})), everything)
    with pytest.raises(BundleError, match=r"leads out of the archive\. Fetch it again"):
        read_aar(written(tmp_path, aar({name: b"x"}), "a.aar"))


def test_other_kinds_of_members_are_refused(tmp_path: Path) -> None:
    twice = tar({PREFIX + "lib/a": b"1"})[:1024] + tar({PREFIX + "lib/a": b"2"})
    path = written(tmp_path, ar({"debian-binary": b"2.0\n", "data.tar": twice}))
    with pytest.raises(BundleError, match="holds lib/a twice"):
        read_data(path, everything)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc")
    with pytest.raises(BundleError, match="holds a symbolic link, link"):
        read_aar(written(tmp_path, out.getvalue(), "a.aar"))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"control.tar": b""}, "it has no member debian-binary"),
        ({"debian-binary": b"2.0\n"}, "it has no member control.tar"),
        ({"debian-binary": b"2.0\n", "control.tar.lz": b""}, "control.tar.lz is packed in a way that is not known"),
        ({"debian-binary": b"2.0\n", "control.tar": tar({"./x": b""})}, "has no control file"),
        ({"debian-binary": b"2.0\n", "control.tar": tar({"./control": b"Package: x\n"})}, "has no field Version"),
        ({"debian-binary": b"2.0\n", "control.tar.xz": b"text"}, "is damaged: "),
        ({"debian-binary": b"2.0\n", "control.tar.gz": b"text"}, "is damaged: "),
        ({"debian-binary": b"2.0\n", "control.tar.xz": lzma.compress(tar({"./control": b"x"}))[:-9]}, "ends early"),
        ({"debian-binary": b"2.0\n", "control.tar": b"x" * 1024}, "is damaged: "),
    ],
)
def test_damaged_debs_are_named(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(BundleError) as told:
        read_control(written(tmp_path, ar(members)))
    assert str(told.value).startswith("a.deb") and message in str(told.value)
    assert str(told.value).endswith(". Fetch it again")


@given(st.data())
def test_a_damaged_deb_is_read_or_refused_and_never_wrong(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(deb(CONTROL, FILES))
    start = bytes(content).index(b"data.tar.xz") + 60
    at = data.draw(st.integers(start, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path = written(tmp_path_factory.mktemp("deb"), bytes(content))
    with contextlib.suppress(BundleError):
        assert read_data(path, everything).files["lib/libz.so.1.3.1"]() == b"library"


def test_a_damaged_member_of_an_aar_is_named(tmp_path: Path) -> None:
    content = bytearray(aar({"jni/arm64-v8a/lib.so": bytes(range(256)) * 4}))
    at = content.index(b"lib.so") + 40
    content[at] ^= 0xFF
    contents = read_aar(written(tmp_path, bytes(content), "a.aar"))
    with pytest.raises(BundleError, match=r"^a\.aar: jni/arm64-v8a/lib\.so is damaged: .*Fetch it again$"):
        contents.files["jni/arm64-v8a/lib.so"]()


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = written(tmp_path, deb(CONTROL, {"lib/a": bytes(5000), "lib/b": bytes(5000)}))
    android = written(tmp_path, aar({"a": bytes(5000), "b": bytes(5000)}), "a.aar")
    monkeypatch.setattr(archives, "MEMBER_BYTES", 4096)
    for read in (lambda: read_data(package, everything), lambda: read_aar(android)):
        with pytest.raises(BundleError, match=r"of 4\.88 KiB, more than 4\.00 KiB"):
            read()
    monkeypatch.setattr(archives, "MEMBER_BYTES", 1 << 20)
    monkeypatch.setattr(archives, "TOTAL_BYTES", 8192)
    for read in (lambda: read_data(package, everything), lambda: read_aar(android)):
        with pytest.raises(BundleError, match="unpacks to more than"):
            read()
    monkeypatch.setattr(archives, "TOTAL_BYTES", 1 << 20)
    monkeypatch.setattr(archives, "MEMBERS", 1)
    for read in (lambda: read_data(package, everything), lambda: read_aar(android)):
        with pytest.raises(BundleError, match="holds more than 1 files"):
            read()


@pytest.mark.parametrize("shift", [0, 0x4000])
@pytest.mark.parametrize(("bits", "machine"), [(64, AARCH64), (32, HEXAGON)])
def test_elf(bits: int, machine: int, shift: int) -> None:
    content = elf("libc.so", "libz.so.1", soname="libx.so", bits=bits, machine=machine, shift=shift, extra=b"more")
    assert read_elf(content) == Elf(machine, ("libc.so", "libz.so.1"), "libx.so")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an ELF file"),
        (b"<html>", "not an ELF file"),
        (elf("libc.so")[:40], "ends early"),
        (elf("libc.so")[:-4], "ends early"),
        (elf("libc.so").replace(b"\x7fELF\x02\x01", b"\x7fELF\x02\x02"), "neither 32 nor 64 bits, little-endian"),
        (elf("libc.so").replace(struct.pack("<qQ", 1, 1), struct.pack("<qQ", 1, 99)), "outside its string table"),
        (elf("libc.so").replace(struct.pack("<qQ", 10, 9), struct.pack("<qQ", 10, 1 << 40)), "outside the file"),
    ],
)
def test_broken_elf(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_elf(content)


@given(st.data())
def test_changed_elf_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(elf("libc.so", "libm.so"))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        read_elf(bytes(content[: data.draw(st.integers(0, len(content)))]))


def test_a_library_of_this_machine() -> None:
    import _ctypes

    built_in = getattr(_ctypes, "__file__", None)
    library = Path(built_in or sys.executable)
    assert "libc.so.6" in read_elf(library.read_bytes()).needed


def test_versions() -> None:
    assert numbers("1:3.5.4-2") == (3, 5, 4)
    assert numbers("git") == ()
    assert at_least("1.24.10", "1.24.2") and not at_least("1.9", "1.10")
    assert same_build("2.51.0.260929181845", "2.51.0") and same_build("2.51.0", "2.51.0.260929181845")
    assert not same_build("2.51.0.260929181845", "2.51.0.260929181846")
    assert not same_build("2.51.0.1", "2.50.0")


def test_contents_without_links(tmp_path: Path) -> None:
    assert Contents(tmp_path, {}).find("lib/a.so") is None
