"""What an ELF file says of itself: the processor it is for, its name as a library, and the libraries it needs."""

from __future__ import annotations

import struct
from dataclasses import dataclass

AARCH64, HEXAGON = 183, 164  # e_machine
_NAMES = {AARCH64: "aarch64", HEXAGON: "Hexagon", 62: "x86-64", 40: "32-bit ARM", 3: "x86"}
_LOAD, _DYNAMIC = 1, 2  # p_type
_NEEDED, _STRTAB, _STRSZ, _SONAME = 1, 5, 10, 14  # d_tag
_MOST = 4096  # program headers, and entries of a dynamic section


@dataclass(frozen=True)
class Elf:
    """machine: e_machine. needed: DT_NEEDED in order. soname: DT_SONAME."""

    machine: int
    needed: tuple[str, ...] = ()
    soname: str | None = None

    @property
    def processor(self) -> str:
        return _NAMES.get(self.machine, f"processor {self.machine}")


def read_elf(content: bytes) -> Elf:
    """Reads a little-endian ELF file of 32 or 64 bits. Raises ValueError saying what is wrong."""
    try:
        return _read(content)
    except struct.error:
        raise ValueError("it ends early") from None


def _read(content: bytes) -> Elf:
    if content[:4] != b"\x7fELF":
        raise ValueError("it is not an ELF file")
    if len(content) < 6 or content[4] not in (1, 2) or content[5] != 1:
        raise ValueError("it is neither 32 nor 64 bits, little-endian")
    wide = content[4] == 2
    machine = struct.unpack_from("<H", content, 18)[0]
    table, size, count = (
        (*struct.unpack_from("<Q", content, 32), *struct.unpack_from("<HH", content, 54))
        if wide
        else (*struct.unpack_from("<I", content, 28), *struct.unpack_from("<HH", content, 42))
    )
    if count > _MOST:
        raise ValueError(f"it has {count} program headers")
    segments = []  # (type, offset, address, bytes)
    for index in range(count):
        at = table + index * size
        if wide:
            kind, _, offset, address, _, nbytes = struct.unpack_from("<IIQQQQ", content, at)
        else:
            kind, offset, address, _, nbytes = struct.unpack_from("<IIIII", content, at)
        if offset + nbytes > len(content):
            raise ValueError("it ends early")
        segments.append((kind, offset, address, nbytes))
    dynamic = next((segment for segment in segments if segment[0] == _DYNAMIC), None)
    if dynamic is None:
        return Elf(machine)
    entries = _entries(content[dynamic[1] : dynamic[1] + dynamic[3]], "<qQ" if wide else "<iI")
    strings = _strings(content, segments, dict(entries))
    needed = tuple(_text(strings, value) for tag, value in entries if tag == _NEEDED)
    soname = next((_text(strings, value) for tag, value in entries if tag == _SONAME), None)
    return Elf(machine, needed, soname)


def _entries(section: bytes, form: str) -> list[tuple[int, int]]:
    size = struct.calcsize(form)
    found: list[tuple[int, int]] = []
    for tag, value in struct.iter_unpack(form, section[: min(len(section) // size, _MOST) * size]):
        if tag == 0:
            break
        found.append((tag, value))
    return found


def _strings(content: bytes, segments: list[tuple[int, int, int, int]], entries: dict[int, int]) -> bytes:
    """The string table: the dynamic section has its address, program headers say where in the file that is."""
    address, nbytes = entries.get(_STRTAB), entries.get(_STRSZ, 0)
    if address is None:
        return b""
    for kind, offset, start, length in segments:
        if kind == _LOAD and start <= address and address + nbytes <= start + length:
            return content[offset + address - start : offset + address - start + nbytes]
    raise ValueError("its string table lies outside the file")


def _text(strings: bytes, offset: int) -> str:
    end = strings.find(b"\0", offset)
    if offset >= len(strings) or end < 0:
        raise ValueError("a name lies outside its string table")
    return strings[offset:end].decode("utf-8", "replace")
