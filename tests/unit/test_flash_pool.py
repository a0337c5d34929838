"""PoolFile: direct and buffered reads of real files, and what it says when they go wrong."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from estream.errors import FlashError
from estream.flash import PoolFile
from estream.package.layout import ALIGNMENT

BLOCKS = 5
_MEMFD_SECRET = 447  # system call, the same number on all processors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "experts.safetensors"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, BLOCKS * ALIGNMENT, np.uint8).tobytes())
    return path


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, BLOCKS * ALIGNMENT))


@pytest.mark.parametrize("direct", [True, False])
def test_reads_any_aligned_range(path: Path, memory: memoryview, direct: bool) -> None:
    content = path.read_bytes()
    with PoolFile.open(path, direct=direct) as file:
        assert file.nbytes == len(content)
        for first, count in ((0, 5), (1, 1), (3, 2)):
            part = memory[: count * ALIGNMENT]
            file.read_into(part, first * ALIGNMENT)
            assert bytes(part) == content[first * ALIGNMENT : (first + count) * ALIGNMENT]


def test_buffered_reads_can_be_asked_for(path: Path) -> None:
    with PoolFile.open(path, direct=False) as file:
        assert (file.direct, file.direct_reason) == (False, "asked for")


def test_direct_is_reported_with_a_reason_or_none(path: Path) -> None:
    with PoolFile.open(path) as file:
        assert file.direct is (file.direct_reason is None)


def fake_open(monkeypatch: pytest.MonkeyPatch, refuse: bool) -> set[int]:
    """Descriptors that were opened with O_DIRECT; they are buffered ones here, so that every file system will do."""
    real, direct = os.open, set[int]()

    def opened(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refuse:
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    monkeypatch.setattr(os, "open", opened)
    return direct


needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no O_DIRECT here")


@needs_direct
def test_falls_back_when_the_file_system_refuses(
    path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_open(monkeypatch, refuse=True)
    with PoolFile.open(path) as file:
        assert (file.direct, file.direct_reason) == (False, "opening with O_DIRECT failed: Invalid argument")
        file.read_into(memory, 0)
    assert bytes(memory) == path.read_bytes()


def _einval(fd: int, parts: list[memoryview], offset: int) -> int:
    raise OSError(errno.EINVAL, "Invalid argument")


def _nothing(fd: int, parts: list[memoryview], offset: int) -> int:
    return parts[0].nbytes  # claims success, touches no byte


def _short(fd: int, parts: list[memoryview], offset: int) -> int:
    return 512


@needs_direct
@pytest.mark.parametrize(
    ("preadv", "reason"),
    [
        (_einval, "a direct read failed: Invalid argument"),
        (_nothing, "a direct read gave other bytes than a buffered read"),
        (_short, "a direct read gave 512 of 16384 bytes"),
    ],
)
def test_falls_back_when_a_direct_block_is_wrong(
    path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch, preadv: object, reason: str
) -> None:
    """A FUSE file system may accept O_DIRECT and then answer EINVAL, or wrong bytes."""
    direct = fake_open(monkeypatch, refuse=False)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, *rest: preadv(fd, *rest) if fd in direct else real(fd, *rest))  # type: ignore[operator]
    before = set(os.listdir("/proc/self/fd"))
    with PoolFile.open(path) as file:
        assert (file.direct, file.direct_reason) == (False, reason)
        monkeypatch.setattr(os, "preadv", real)
        file.read_into(memory, 0)
        assert bytes(memory) == path.read_bytes()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_are_continued(
    path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if direct:
        fake_open(monkeypatch, refuse=False)
    file = PoolFile.open(path, direct=direct)
    real, offsets = os.preadv, list[int]()

    def short(fd: int, parts: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return real(fd, [parts[0][: ALIGNMENT + 4096]], offset)

    monkeypatch.setattr(os, "preadv", short)
    file.read_into(memory, 0)
    file.close()
    assert bytes(memory) == path.read_bytes()
    assert len(offsets) > 3
    assert not direct or all(offset % ALIGNMENT == 0 for offset in offsets)  # O_DIRECT takes no odd offset


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [2 * ALIGNMENT, 2 * ALIGNMENT + 5000])
def test_a_cut_file_is_an_error(path: Path, memory: memoryview, direct: bool, size: int) -> None:
    with PoolFile.open(path, direct=direct) as file:
        os.truncate(path, size)
        with pytest.raises(
            FlashError, match=r"experts.safetensors ends or was cut short: read at offset 16384"
        ) as caught:
            file.read_into(memory[: 4 * ALIGNMENT], ALIGNMENT)
        assert caught.value.asked == "65536 bytes" and caught.value.had == f"{size - ALIGNMENT} bytes"


def test_an_io_error_names_file_offset_and_size(
    path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, parts: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with PoolFile.open(path) as file:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(
            FlashError, match=r"experts.safetensors at offset 32768 failed: Input/output error"
        ) as caught:
            file.read_into(memory[:ALIGNMENT], 2 * ALIGNMENT)
    assert caught.value.asked == "16384 bytes" and isinstance(caught.value.__cause__, OSError)


def test_unaligned_reads_are_refused(path: Path, memory: memoryview) -> None:
    with PoolFile.open(path) as file:
        for part, offset in ((memory[:ALIGNMENT], 512), (memory[:512], 0)):
            with pytest.raises(FlashError, match="unaligned"):
                file.read_into(part, offset)


def test_changes_of_the_open_file_are_noticed(path: Path) -> None:
    with PoolFile.open(path) as file:
        file.check_unchanged()
        path.with_name("other").write_bytes(b"new package")
        os.replace(path.with_name("other"), path)  # the open file stays what it was
        file.check_unchanged()
    with PoolFile.open(path, direct=False) as file:
        os.utime(path, ns=(1, 1))
        with pytest.raises(FlashError, match="changed while it was open: mtime"):
            file.check_unchanged()


def test_missing_and_closed_files(path: Path, memory: memoryview) -> None:
    with pytest.raises(FlashError, match=r"cannot open .*nothing: No such file"):
        PoolFile.open(path.with_name("nothing"))
    file = PoolFile.open(path)
    file.close()
    file.close()
    with pytest.raises(FlashError, match="closed"):
        file.read_into(memory, 0)
    with pytest.raises(FlashError, match="closed"):
        file.check_unchanged()


class Unpinnable:
    """os.preadv as the kernel has it for a mapped dma-buf: a direct read into `memory` gives EFAULT."""

    def __init__(self, memory: memoryview, direct: set[int]) -> None:
        self._start = np.frombuffer(memory, np.uint8).ctypes.data
        self._end, self._direct, self._real = self._start + memory.nbytes, direct, os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        at = np.frombuffer(buffers[0], np.uint8).ctypes.data
        if fd in self._direct and self._start <= at < self._end:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return self._real(fd, buffers, offset)


@needs_direct
def test_memory_without_direct_reads_is_filled_through_a_buffer(
    path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    direct = fake_open(monkeypatch, refuse=False)
    monkeypatch.setattr(os, "preadv", Unpinnable(memory, direct))
    monkeypatch.setattr("estream.flash.staging.PIECE", 2 * ALIGNMENT)
    with PoolFile.open(path) as file:
        assert (file.direct, file.direct_reason, file.staged_bytes) == (True, None, 0)
        with ThreadPoolExecutor(2) as lanes:
            parts = [(memory[: 3 * ALIGNMENT], 0), (memory[3 * ALIGNMENT :], 3 * ALIGNMENT)]
            for lane in [lanes.submit(file.read_into, *part) for part in parts]:
                lane.result()
        assert bytes(memory) == path.read_bytes()
        assert file.direct and file.direct_reason == "through a buffer: direct reads into this memory are refused"
        assert file.staged_bytes == BLOCKS * ALIGNMENT
    assert len(caplog.records) == 1 and "through a buffer" in caplog.text


def test_a_bad_address_of_a_buffered_read_is_an_error(
    path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PoolFile.open(path, direct=False) as file:
        monkeypatch.setattr(os, "preadv", Unpinnable(memory, {file._fd}))
        with pytest.raises(FlashError, match="Bad address"):
            file.read_into(memory, 0)


@needs_direct
def test_memory_that_the_kernel_cannot_pin(path: Path) -> None:
    """Secret memory is refused to direct reads as dma-bufs are, by the kernel itself."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(_MEMFD_SECRET, 0)
    if fd < 0:
        pytest.skip("this kernel has no memfd_secret")
    try:
        os.ftruncate(fd, BLOCKS * ALIGNMENT)
        memory = mmap.mmap(fd, BLOCKS * ALIGNMENT)
    except OSError as error:
        pytest.skip(f"memfd_secret: {error.strerror}")
    finally:
        os.close(fd)
    with PoolFile.open(path) as file:
        file.read_into(memoryview(memory), 0)
        assert memory[:] == path.read_bytes()
        assert not file.direct or file.staged_bytes == BLOCKS * ALIGNMENT
