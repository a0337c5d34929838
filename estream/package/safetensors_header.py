"""The project's only parser of safetensors headers: strict, bounded, standard library only.

A safetensors file is a little-endian u64 n, n bytes of JSON, then data that the tensors fill without holes:

    {"__metadata__": {str: str}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from estream.errors import EStreamError, PackageError, brief

# A third of the format's own limit, and ten times the largest header known to us (300,000 tensors in one file): parsing
# a hostile one must end within seconds and fit a phone.
MAX_HEADER_BYTES = 32 << 20
METADATA = "__metadata__"

# Every dtype of the format by its size in bits, so that one that EStream cannot use is still reported by name.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True)
class Entry:
    """One tensor; `start` and `end` are absolute byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """`tensors` in file order; `data_offset` is where the data starts, `file_bytes` the size of the whole file."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_offset: int
    file_bytes: int


def read_header(
    source: str | os.PathLike[str] | int, *, label: str | None = None, error: type[EStreamError] = PackageError
) -> Header:
    """Reads and checks the header of a safetensors file.

    `source` is a path or an open file descriptor (read by pread; its position does not move). Nothing but the header
    is read. `label` names the file in messages (default: the path). Raises `error` when the file cannot be read, or
    when anything in the header contradicts the format or the size of the file.
    """
    if isinstance(source, int):
        return _read(source, label or f"file descriptor {source}", error)
    path = Path(source)
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as problem:
        raise error(f"{path}: cannot be opened: {problem.strerror}") from problem
    try:
        return _read(fd, label or str(path), error)
    finally:
        os.close(fd)


def _read(fd: int, label: str, error: type[EStreamError]) -> Header:
    try:
        file_bytes = os.fstat(fd).st_size
        prefix = _pread(fd, 8, 0)
        if len(prefix) < 8:
            _refuse(error, label, "shorter than the 8 bytes of a header length", had=f"{len(prefix)} bytes")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            hint = next((hint for magic, hint in _FOREIGN.items() if prefix.startswith(magic)), _NEXT_STEP)
            _refuse(error, label, "header is too long", asked=f"{length} bytes", had=f"at most {MAX_HEADER_BYTES}",
                    next_step=hint)  # fmt: skip
        if 8 + length > file_bytes:
            _refuse(error, label, "truncated header", asked=f"{8 + length} bytes", had=f"{file_bytes} bytes")
        text = _pread(fd, length, 8)
    except OSError as problem:
        raise error(f"{label}: cannot be read: {problem.strerror}") from problem
    if len(text) < length:
        _refuse(error, label, "truncated header", asked=f"{length} bytes", had=f"{len(text)} bytes")
    return parse_header(text, file_bytes, label, error=error)


def parse_header(text: bytes, file_bytes: int, label: str, *, error: type[EStreamError] = PackageError) -> Header:
    """Checks the JSON `text` (without the length in front of it) of a file of `file_bytes` bytes.

    `label` names the file in messages. Raises `error` as `read_header` does.
    """
    data_offset = 8 + len(text)
    if not text.startswith(b"{"):
        _refuse(error, label, "header does not start with '{'", had=repr(text[:16]))
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:  # ValueError: bad UTF-8, bad JSON, repeated names
        raise error(f"{label}: header is not valid JSON: {problem}", next_step=_NEXT_STEP) from problem
    metadata = raw.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(error, label, f"{METADATA} is not a map of strings")
    entries = [_entry(name, value, data_offset, label, error) for name, value in raw.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_cover(entries, data_offset, file_bytes, label, error)
    return Header({entry.name: entry for entry in entries}, metadata, data_offset, file_bytes)


def _entry(name: str, value: Any, data_offset: int, label: str, error: type[EStreamError]) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _refuse(error, label, f"tensor {brief(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    quoted = brief(name)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(error, label, f"tensor {quoted} has an unknown dtype", had=brief(dtype))
    if not _naturals(shape):
        _refuse(error, label, f"tensor {quoted} has a shape that is not a list of natural numbers", had=brief(shape))
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(error, label, f"tensor {quoted} has impossible data_offsets", had=brief(offsets))
    bits = _bits(shape, dtype, 8 * (offsets[1] - offsets[0]))
    if bits != 8 * (offsets[1] - offsets[0]):
        asked = (
            f"{bits / 8:g} bytes for {dtype} {shape}"
            if len(shape) < 9 and bits < 1 << 60
            else f"{dtype} {brief(shape)}"
        )
        _refuse(error, label, f"tensor {quoted}: size does not match its shape", asked=asked,
                had=f"{offsets[1] - offsets[0]} bytes")  # fmt: skip
    return Entry(name, dtype, tuple(shape), data_offset + offsets[0], data_offset + offsets[1])


def _check_cover(
    entries: list[Entry], data_offset: int, file_bytes: int, label: str, error: type[EStreamError]
) -> None:
    """The tensors, sorted by offset, must fill the data exactly: no overlap, no hole, nothing after the last."""
    position = data_offset
    for entry in entries:
        if entry.start != position:
            what = "overlaps the one before it" if entry.start < position else "leaves a hole before it"
            _refuse(error, label, f"tensor {brief(entry.name)} {what}",
                    asked=f"start at byte {entry.start - data_offset}",
                    had=f"{position - data_offset} bytes of data before it")  # fmt: skip
        if entry.end > file_bytes:
            _refuse(error, label, f"truncated: tensor {brief(entry.name)} ends outside the file",
                    asked=f"{entry.end} bytes", had=f"{file_bytes} bytes")  # fmt: skip
        position = entry.end
    if position != file_bytes:
        _refuse(error, label, "bytes after the last tensor", asked=f"{position} bytes", had=f"{file_bytes} bytes")


_NEXT_STEP = "Copy or download the file again"

# What other files begin with: each of these read as a length is far beyond MAX_HEADER_BYTES.
_PICKLE = "It is a pickle, which runs code when it is read: get the model as safetensors"
_FOREIGN = {
    b"version ": "It is a Git LFS pointer, not the file itself: run git lfs pull",
    b"PK\x03\x04": _PICKLE,
    b"\x80\x02": _PICKLE,
    b"\x80\x04": _PICKLE,
    b"GGUF": "It is a GGUF file; get the original Hugging Face checkpoint in safetensors",
}


def _refuse(
    error: type[EStreamError],
    label: str,
    what: str,
    *,
    asked: object = None,
    had: object = None,
    next_step: str = _NEXT_STEP,
) -> NoReturn:
    raise error(f"{label}: {what}", asked=asked, had=had, next_step=next_step)


def _bits(shape: list[int], dtype: str, most: int) -> int:
    """Bits of a tensor; some number beyond `most` if it has more. A hostile shape would take hours to multiply out."""
    if 0 in shape:
        return 0
    bits = DTYPE_BITS[dtype]
    for number in shape:
        bits *= number
        if bits > most:
            break
    return bits


def _naturals(value: Any) -> bool:
    # bool is an int in Python, not in JSON
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {brief(name)} appears twice")
        # Half of a surrogate pair, which JSON's escapes can write, is no text: UnicodeEncodeError.
        (name + value if isinstance(value, str) else name).encode()
        result[name] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    """Up to `nbytes` from `offset`; fewer only at the end of the file."""
    parts: list[bytes] = []
    while nbytes > 0:
        part = os.pread(fd, min(nbytes, 1 << 24), offset)
        if not part:
            break
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return b"".join(parts)
