from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from estream.errors import CheckpointError, PackageError
from estream.package.safetensors_header import DTYPE_BITS, parse_header, read_header


def _write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def _entry(start: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file({"a": values, "empty": np.zeros((0, 4), np.float16), "b": np.arange(5, dtype=np.int8)}, path, {"k": "v"})
    header = read_header(path)
    assert header.metadata == {"k": "v"}
    assert header.file_bytes == path.stat().st_size
    a = header.tensors["a"]
    assert (a.dtype, a.shape, a.nbytes, a.start) == ("F32", (2, 3), 24, header.data_offset)
    assert path.read_bytes()[a.start : a.end] == values.tobytes()
    assert header.tensors["empty"].nbytes == 0
    assert header.tensors["b"].end == header.file_bytes


def test_reads_a_descriptor_without_moving_it(tmp_path: Path) -> None:
    path = _write(tmp_path / "a", {"x": _entry(0, 3)}, b"abc")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.lseek(fd, 5, os.SEEK_SET)
        assert read_header(fd).tensors["x"].shape == (3,)
        assert os.lseek(fd, 0, os.SEEK_CUR) == 5
    finally:
        os.close(fd)


def test_tensors_come_in_file_order_and_padding_of_the_header_is_allowed(tmp_path: Path) -> None:
    text = json.dumps({"z": _entry(4, 6), "a": _entry(0, 4)}).encode() + b" " * 100
    header = read_header(_write(tmp_path / "a", text, b"123456"))
    assert list(header.tensors) == ["a", "z"]
    assert header.data_offset == 8 + len(text)


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
def test_foreign_dtypes_are_named(tmp_path: Path, dtype: str, bits: int) -> None:
    path = _write(tmp_path / "a", {"x": _entry(0, bits, dtype, [8])}, bytes(bits))
    assert read_header(path).tensors["x"].dtype == dtype


BAD: dict[str, tuple[Any, bytes, str]] = {
    "not JSON": (b"{abc", b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "nested too deep": (b'{"a":' + b"[" * 100000, b"", "not valid JSON"),
    "a list": ([], b"", "does not start with"),
    "leading space": (b" {}", b"", "does not start with"),
    "repeated name": (b'{"x": %b, "x": %b}' % ((json.dumps(_entry(0, 1)).encode(),) * 2), b"1", "appears twice"),
    "repeated key": (b'{"x": {"dtype": "U8", "dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"1", "twice"),
    "infinite number": (b'{"x": Infinity}', b"", "not JSON"),
    "entry is a number": ({"x": 3}, b"", "'x' is not described"),
    "missing key": ({"x": {"dtype": "U8", "shape": [1]}}, b"1", "'x' is not described"),
    "surplus key": ({"x": _entry(0, 1) | {"y": 1}}, b"1", "'x' is not described"),
    "unknown dtype": ({"x": _entry(0, 1, "Q4")}, b"1", "'x' has an unknown dtype"),
    "dtype is a list": ({"x": {"dtype": [], "shape": [], "data_offsets": [0, 1]}}, b"1", "unknown dtype"),
    "negative shape": ({"x": _entry(0, 1, shape=[-1])}, b"1", "natural numbers"),
    "boolean shape": ({"x": _entry(0, 1, shape=[True])}, b"1", "natural numbers"),
    "float shape": ({"x": _entry(0, 1, shape=[1.0])}, b"1", "natural numbers"),
    "shape is a number": ({"x": _entry(0, 1, shape=1)}, b"1", "natural numbers"),
    "offsets reversed": ({"x": _entry(1, 0, shape=[1])}, b"1", "impossible data_offsets"),
    "three offsets": ({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"1", "impossible"),
    "size against shape": ({"x": _entry(0, 4, "F32", [2])}, b"1234", "size does not match"),
    "half a byte": ({"x": _entry(0, 1, "F4", [1])}, b"1", "size does not match"),
    "absurd shape": ({"x": _entry(0, 4, "F32", [2**62, 2**62])}, b"1234", "size does not match"),
    "absurd shape of nothing": ({"x": _entry(0, 0, shape=[0, 10**400])}, b"", "natural numbers"),
    "half a surrogate pair": (b'{"\\ud800": 1}', b"", "not valid JSON"),
    "half a pair in metadata": (b'{"__metadata__": {"a": "\\udfff"}}', b"", "not valid JSON"),
    "overlap": ({"x": _entry(0, 2), "y": _entry(1, 3)}, b"123", "'y' overlaps"),
    "hole": ({"x": _entry(0, 1), "y": _entry(2, 3)}, b"123", "'y' leaves a hole"),
    "hole at the start": ({"x": _entry(1, 2)}, b"12", "'x' leaves a hole"),
    "outside the file": ({"x": _entry(0, 9)}, b"123", "'x' ends outside"),
    "bytes at the end": ({"x": _entry(0, 2)}, b"123", "bytes after the last tensor"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "metadata is a list": ({"__metadata__": []}, b"", "__metadata__"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(tmp_path: Path, case: str) -> None:
    header, data, message = BAD[case]
    path = _write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(PackageError, match=r"bad.safetensors") as caught:
        read_header(path)
    assert message in str(caught.value)


def test_refuses_files_that_end_early(tmp_path: Path) -> None:
    for text, message in ((b"", "shorter than"), (b"1234567", "shorter than")):
        (tmp_path / "a").write_bytes(text)
        with pytest.raises(PackageError, match=message):
            read_header(tmp_path / "a")
    for length, message in ((3, "truncated header"), (10**9, "header is too long"), (2**64 - 1, "too long")):
        with pytest.raises(PackageError, match=message):
            read_header(_write(tmp_path / "a", b"{}", length=length))
    with pytest.raises(PackageError, match="cannot be opened"):
        read_header(tmp_path / "absent")
    with pytest.raises(PackageError, match="cannot be"):
        read_header(tmp_path)


def test_the_error_class_and_the_label_are_the_callers(tmp_path: Path) -> None:
    path = _write(tmp_path / "a", b"[]")
    with pytest.raises(CheckpointError, match="shard one"):
        read_header(path, label="shard one", error=CheckpointError)


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_a_header_or_a_clear_error(text: bytes, file_bytes: int) -> None:
    for candidate in (text, b'{"x":' + text):
        try:
            header = parse_header(candidate, file_bytes, "file")
        except PackageError as error:
            assert "file" in str(error)
        else:
            assert sum(entry.nbytes for entry in header.tensors.values()) == file_bytes - header.data_offset
