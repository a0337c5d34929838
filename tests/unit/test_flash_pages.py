"""Pages on a real file: bytes, order, faults, aborts, threads."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from estream.errors import ClosedError, FlashError
from estream.flash.pages import Page, Pages
from estream.flash.pool import PoolFile
from estream.package.layout import ALIGNMENT
from estream.runtime.target import Buffer

KEPT: list[mmap.mmap] = []
# Page p: two ranges with a hole between them, whose bytes in the slot belong to nobody.
RANGES = [((0, 4 * p * ALIGNMENT, ALIGNMENT), (2 * ALIGNMENT, (4 * p + 2) * ALIGNMENT, ALIGNMENT)) for p in range(5)]


class Gated:
    """A source whose reads wait at a gate, are counted, and fail as told."""

    def __init__(self, file: PoolFile) -> None:
        self.file, self.direct, self.direct_reason = file, file.direct, file.direct_reason
        self.offsets: list[int] = []
        self.error: BaseException | None = None
        self.fail_at = -1
        self.gate = threading.Event()
        self.gate.set()

    def read_into(self, memory: memoryview, offset: int) -> None:
        self.gate.wait()
        if self.error is not None and len(self.offsets) == self.fail_at:
            raise self.error
        self.file.read_into(memory, offset)
        self.offsets.append(offset)

    def check_unchanged(self) -> None:
        self.file.check_unchanged()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "dense.safetensors"
    path.write_bytes(np.random.default_rng(3).integers(0, 256, 20 * ALIGNMENT, np.uint8).tobytes())
    return path


@pytest.fixture
def source(path: Path) -> Iterator[Gated]:
    with PoolFile.open(path) as file:
        yield Gated(file)


def allocate(nbytes: int) -> Buffer:
    KEPT.append(mmap.mmap(-1, nbytes))
    return Buffer(ctypes.addressof(ctypes.c_char.from_buffer(KEPT[-1])), nbytes)


def opened(source: Gated, slots: list[Buffer], finish: Callable[[memoryview], None] = lambda memory: None) -> Pages:
    return Pages(source, [Page(f"page {p}", ranges, finish) for p, ranges in enumerate(RANGES)], slots)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def check(slots: list[Buffer], path: Path, number: int) -> None:
    content, memory = path.read_bytes(), slots[number % len(slots)].memory()
    for at, offset, nbytes in RANGES[number]:
        assert bytes(memory[at : at + nbytes]) == content[offset : offset + nbytes]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_page_is_in_its_slot_when_it_is_entered(source: Gated, path: Path, count: int) -> None:
    slots = [allocate(3 * ALIGNMENT) for _ in range(count)]
    pages = opened(source, slots)
    for wanted in (5, 2, 5, 0):
        source.offsets.clear()
        pages.begin(wanted)
        for number in range(wanted):
            pages.enter(number)
            pages.enter(number)
            check(slots, path, number)
        pages.end()
        assert source.offsets == [offset for ranges in RANGES[:wanted] for _, offset, _ in ranges]
        assert pages.bytes_read == 2 * wanted * ALIGNMENT
    pages.close()


def test_the_lane_reads_one_page_ahead_and_leaves_the_one_in_use_alone(source: Gated, path: Path) -> None:
    slots = [allocate(3 * ALIGNMENT) for _ in range(2)]
    pages = opened(source, slots)
    pages.begin(5)
    for number in range(4):
        pages.enter(number)
        wait_until(lambda number=number: len(source.offsets) == 2 * (number + 2))  # type: ignore[misc]
        time.sleep(0.002)
        assert len(source.offsets) == 2 * (number + 2)
        check(slots, path, number)
    pages.abort()
    pages.close()


def test_what_finish_does_is_done_once_per_reading(source: Gated, path: Path) -> None:
    def invert(memory: memoryview) -> None:
        raw = np.frombuffer(memory, np.uint8)
        np.bitwise_not(raw, out=raw)

    slots = [allocate(3 * ALIGNMENT) for _ in range(2)]
    pages = opened(source, slots, invert)
    for _ in range(2):
        pages.begin(5)
        for number in range(5):
            pages.enter(number)
            at, offset, nbytes = RANGES[number][1]
            there = np.frombuffer(slots[number % 2].memory(), np.uint8)[at : at + nbytes]
            assert bytes(~there) == path.read_bytes()[offset : offset + nbytes]
        pages.end()
    pages.close()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FlashError("reading failed: Input/output error"), "Input/output error"),
        (RuntimeError("a bug"), "a lane failed: RuntimeError: a bug"),
        (SystemExit(3), "a lane failed: SystemExit: 3"),
    ],
)
def test_a_failing_read_reaches_the_compute_and_the_pages_survive(
    source: Gated, path: Path, error: BaseException, message: str
) -> None:
    slots = [allocate(3 * ALIGNMENT) for _ in range(2)]
    pages = opened(source, slots)
    for fail_at in (0, 1, 5, 9):
        source.offsets.clear()
        source.error, source.fail_at = error, fail_at
        pages.begin(5)
        with pytest.raises(FlashError, match=message):
            for number in range(5):
                pages.enter(number)
        pages.abort()
        source.error = None
        pages.begin(5)
        for number in range(5):
            pages.enter(number)
            check(slots, path, number)
        pages.end()
    pages.close()


def test_abort_waits_for_the_read_and_forgets_it(source: Gated, path: Path) -> None:
    slots = [allocate(3 * ALIGNMENT) for _ in range(2)]
    pages = opened(source, slots)
    source.gate.clear()
    pages.begin(5)
    wait_until(lambda: pages._reading)
    threading.Timer(0.05, source.gate.set).start()
    pages.abort()
    assert source.gate.is_set() and not pages._reading
    pages.abort()
    with pytest.raises(FlashError, match="no prefill is running"):
        pages.enter(0)
    pages.begin(1)
    pages.enter(0)
    check(slots, path, 0)
    pages.end()
    pages.close()


def test_an_interrupt_while_waiting_leaves_usable_pages(
    source: Gated, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [allocate(3 * ALIGNMENT) for _ in range(2)]
    pages = opened(source, slots)
    source.gate.clear()
    pages.begin(5)

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pages._news, "wait", interrupted)
        pages.enter(0)
    source.gate.set()
    pages.abort()
    pages.begin(2)
    for number in range(2):
        pages.enter(number)
        check(slots, path, number)
    pages.end()
    pages.close()


def test_misuse_is_refused_and_close_leaves_no_thread(source: Gated, path: Path) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(FlashError, match="the slot of page 0 is too small"):
        opened(source, [allocate(ALIGNMENT)])
    with pytest.raises(FlashError, match="not aligned"):
        Pages(source, [Page("odd", ((0, 1, ALIGNMENT),), lambda memory: None)], [allocate(ALIGNMENT)])
    pages = opened(source, [allocate(3 * ALIGNMENT) for _ in range(2)])
    pages.begin(3)
    with pytest.raises(FlashError, match="already running"):
        pages.begin(3)
    with pytest.raises(FlashError, match="pages are used in order"):
        pages.enter(1)
    with pytest.raises(FlashError, match="ends before page 0"):
        pages.end()
    pages.close()
    pages.close()
    assert set(threading.enumerate()) == threads
    with pytest.raises(ClosedError):
        pages.enter(0)
    with pytest.raises(ClosedError):
        pages.begin(1)


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "dense.safetensors"
    path.write_bytes(bytes(20 * ALIGNMENT))
    with PoolFile.open(path) as file:
        pages = opened(Gated(file), [allocate(3 * ALIGNMENT) for _ in range(2)])
        path.write_bytes(bytes(21 * ALIGNMENT))
        with pytest.raises(FlashError, match="changed while it was open"):
            pages.begin(5)
        pages.close()
