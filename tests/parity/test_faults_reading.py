"""Flash that fails, files that are damaged, removed or replaced: an error or the right answer, never another answer."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from estream.engine import Engine
from estream.errors import EStreamError, FlashError, PackageError
from estream.flash.machine import MODES
from estream.flash.pool import PoolFile
from estream.package.reader import Package
from estream.runtime.target import Buffer
from tests.support.faults import IDS, Reads, last, logits_of, make_package, mock, nothing_left


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("reading"))


@pytest.fixture(scope="module")
def expected(package: Path) -> np.ndarray:
    return logits_of(package)


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package, tmp_path / "model.estream"))


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("mode", MODES)
def test_read_error_at_each_read(
    package: Path, expected: np.ndarray, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        nothing_left(monkeypatch),
        Engine(package, threads=1, group=1, banks=2, prefetch=mode) as engine,
        monkeypatch.context() as patch,
    ):
        reads = Reads(patch)
        last(engine)
        total = reads.count
        assert total > 20
        for failing in range(1, total + 1, 3):

            def fault(
                number: int, fd: int, buffers: Sequence[memoryview], offset: int, failing: int = failing
            ) -> int | None:
                if number == failing:
                    raise OSError(errno.EIO, "Input/output error")
                return None

            reads.count, reads.fault = 0, fault
            with pytest.raises((FlashError, PackageError), match=r"failed: Input/output error.*estream verify"):
                engine.prefill(IDS)
            reads.fault = None
            assert np.array_equal(last(engine), expected)


def test_read_error_while_opening_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(number: int, fd: int, buffers: Sequence[memoryview], offset: int) -> int | None:
        if number > 3:
            raise OSError(errno.EIO, "Input/output error")
        return None

    for resident in ("none", "all"):
        with nothing_left(monkeypatch), monkeypatch.context() as patch:
            Reads(patch, fault)
            with pytest.raises(FlashError, match="Input/output error"):
                Engine(package, threads=1, resident=resident)


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_are_continued(
    package: Path, expected: np.ndarray, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(package, threads=1, direct_io=direct) as engine, monkeypatch.context() as patch:
        reads = Reads(patch)

        def half(number: int, fd: int, buffers: Sequence[memoryview], offset: int) -> int | None:
            size = buffers[0].nbytes
            if size <= 64:
                return None
            least = 16384 if size >= 16384 else 1
            claimed = max(least, size // 2 + 7)
            assert reads.real(fd, buffers, offset) == size
            buffers[0][claimed:] = bytes(size - claimed)
            return claimed

        reads.fault = half
        assert np.array_equal(last(engine), expected)
        whole = reads.count
        reads.count, reads.fault = 0, None
        assert np.array_equal(last(engine), expected)
        assert reads.count < whole


def test_file_that_ends_during_a_prefill(package: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(package, threads=1) as engine, monkeypatch.context() as patch:
        reads = Reads(patch, lambda number, fd, buffers, offset: 0)
        with pytest.raises(PackageError, match="ends within embedding row"):
            engine.prefill(IDS)
        reads.fault = lambda number, fd, buffers, offset: 0 if buffers[0].nbytes >= 16384 else None
        with pytest.raises(FlashError, match=r"ends or was cut short.*estream verify"):
            engine.prefill(IDS)
        reads.fault = None
        assert np.array_equal(last(engine), expected)


@pytest.mark.parametrize("mode", MODES)
def test_flipped_byte_is_found_by_verify_reads(copy: Path, mode: str) -> None:
    pool = Package.open(copy).pool
    flip(copy / "experts.safetensors", pool.panel_offset(2, 3) + 5)
    ids = list(range(50))  # every expert has tokens
    with Engine(copy, threads=1, verify_reads=True, prefetch=mode, group=2, banks=2) as engine:
        for _ in range(2):
            with pytest.raises(FlashError, match=r"layer 2, expert 1, panel 1: the bytes read are not those"):
                engine.prefill(ids)
    with pytest.raises(FlashError, match="layer 2, expert 1, panel 1"):
        Engine(copy, threads=1, verify_reads=True, resident="all")


def test_byte_that_flips_on_the_way_is_found_once(
    package: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(package, threads=1, verify_reads=True) as engine, monkeypatch.context() as patch:
        reads = Reads(patch)

        def spoil(number: int, fd: int, buffers: Sequence[memoryview], offset: int) -> int | None:
            got = reads.real(fd, buffers, offset)
            if buffers[0].nbytes >= 16384:
                buffers[0][100] ^= 1
            return got

        reads.fault = spoil
        with pytest.raises(FlashError, match="the bytes read are not those"):
            engine.prefill(IDS)
        reads.fault = None
        assert np.array_equal(last(engine), expected)


def test_exception_inside_a_lane(package: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PoolFile, memory: memoryview, offset: int) -> None:
        raise ZeroDivisionError("a bug in a lane")

    with nothing_left(monkeypatch), Engine(package, threads=1) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(PoolFile, "read_into", broken)
            with pytest.raises(FlashError, match="a lane failed: ZeroDivisionError: a bug in a lane"):
                engine.prefill(IDS)
        assert np.array_equal(last(engine), expected)


def test_removed_while_open(copy: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left(monkeypatch), Engine(copy, threads=1, verify_reads=True) as engine:
        shutil.rmtree(copy)
        assert np.array_equal(last(engine), expected)
    with pytest.raises(PackageError, match="no such folder"):
        Engine(copy)


def test_replaced_while_open_is_not_mixed(copy: Path, expected: np.ndarray, tmp_path: Path) -> None:
    other = make_package(tmp_path, seed=1)
    new = logits_of(other)
    assert not np.array_equal(new, expected)
    with Engine(copy, threads=1, verify_reads=True) as engine:
        os.rename(copy, tmp_path / "aside")
        os.rename(other, copy)
        assert np.array_equal(last(engine), expected)
        assert np.array_equal(logits_of(copy), new)
        # As a copy over the old files does: the names stay, the files are others.
        for name in ("dense.safetensors", "experts.safetensors", "checksums.bin"):
            os.replace(tmp_path / "aside" / name, copy / name)
        assert np.array_equal(last(engine), expected)


def test_written_to_while_open(copy: Path) -> None:
    for name, message in (("dense", PackageError), ("experts", FlashError)):
        with Engine(copy, threads=1) as engine:
            os.utime(copy / f"{name}.safetensors", ns=(1, 1))
            with pytest.raises(
                message, match=rf"{name}\.safetensors changed while it was open.*Open the package again"
            ):
                engine.prefill(IDS)


def test_replaced_while_it_is_being_opened(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_package(tmp_path, seed=1)
    steps, swap_at = 0, 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == swap_at:
            for old, new in ((copy, tmp_path / "aside"), (other, copy), (tmp_path / "aside", other)):
                os.rename(old, new)

    def opened() -> Engine:
        nonlocal steps
        steps, target = 0, mock()
        allocate, load = target.allocate, target.load

        def stepping_allocate(nbytes: int, label: str) -> Buffer:
            step()
            return allocate(nbytes, label)

        def stepping_load(path: Path) -> object:
            step()
            return load(path)

        monkeypatch.setattr(target, "allocate", stepping_allocate)
        monkeypatch.setattr(target, "load", stepping_load)
        return Engine(copy, target)

    with nothing_left(monkeypatch):
        opened().close()
        total = steps
        for swap_at in (*range(1, total, 5), total):  # noqa: B007 (read by step)
            with pytest.raises(
                EStreamError, match=r"was replaced, changed or removed while it was being opened|damaged"
            ):
                opened()


def test_damaged_graph_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(copy / "graphs" / "cpu" / "expert.onnx", 60)
    with nothing_left(monkeypatch), pytest.raises(PackageError, match=r"expert\.onnx is damaged"):
        Engine(copy, threads=1)


def test_lane_threads_that_cannot_be_started(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count, failing = threading.Thread.start, 0, 1000

    def start(self: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count == failing:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    Engine(package, threads=1, lanes=8).close()
    total = count
    assert total > 8
    for failing in (1, 2, total - 3, total):  # noqa: B007 (read by start)
        with nothing_left(monkeypatch):
            count = 0
            with pytest.raises(FlashError, match=r"a lane thread cannot be started.*fewer --lanes"):
                Engine(package, threads=1, lanes=8)
