"""ExpertStream and ResidentExperts on a real file: bytes, faults, aborts, threads and descriptors."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from estream.errors import ClosedError, FlashError
from estream.flash import MODES, ExpertStream, PoolFile, ReadyGroup, ResidentExperts, load_ranges
from estream.package.layout import ALIGNMENT, PanelLayout, PoolLayout
from estream.runtime.target import Buffer
from estream.telemetry.trace import Trace

LAYOUT = PoolLayout(PanelLayout(64, 32, "f32"), 2, 4, (1, 2, 4))
SIZE = LAYOUT.panel.panel_bytes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "experts.safetensors"
    content = np.random.default_rng(2).integers(0, 256, LAYOUT.data_offset + LAYOUT.pool_bytes, np.uint8)
    path.write_bytes(content.tobytes())
    return path


@pytest.fixture(scope="module")
def content(path: Path) -> bytes:
    return path.read_bytes()


def allocate(nbytes: int) -> Buffer:
    region = mmap.mmap(-1, nbytes)
    KEPT.append(region)
    return Buffer(ctypes.addressof(ctypes.c_char.from_buffer(region)), nbytes)


KEPT: list[mmap.mmap] = []


class Faulty:
    """A source that counts its reads per 16 KiB, delays them in a seeded pattern, and fails as told."""

    def __init__(
        self, file: PoolFile, fail_at: int = -1, error: BaseException | None = None, delay: float = 0.0
    ) -> None:
        self.file, self.fail_at, self.error, self.delay = file, fail_at, error, delay
        self.direct, self.direct_reason = file.direct, file.direct_reason
        self.seen: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.count = itertools.count()

    def read_into(self, memory: memoryview, offset: int) -> None:
        number = next(self.count)
        self.gate.wait()
        if self.delay:
            time.sleep(self.delay * (number * 7 % 5))
        if number == self.fail_at and self.error is not None:
            raise self.error
        self.file.read_into(memory, offset)
        self.seen += range(offset, offset + memory.nbytes, ALIGNMENT)

    def check_unchanged(self) -> None:
        self.file.check_unchanged()


@pytest.fixture
def source(path: Path) -> Iterator[Faulty]:
    with PoolFile.open(path) as file:
        yield Faulty(file)


def streamed(source: Faulty, group: int = 3, banks: int = 2, lanes: int = 2, **options: object) -> ExpertStream:
    size = min(group, LAYOUT.panels_per_layer) * SIZE
    return ExpertStream(source, LAYOUT, [allocate(size) for _ in range(banks)], group=group, lanes=lanes, **options)  # type: ignore[arg-type]


def masks(seed: int) -> dict[int, np.ndarray]:
    random = np.random.default_rng(seed)
    share = random.choice([0.1, 0.5, 1.0])
    return {layer: random.random(LAYOUT.panels_per_layer) < share for layer in LAYOUT.moe_layers}


def prefill(experts: ExpertStream | ResidentExperts, needed: dict[int, np.ndarray], pause: float = 0.0) -> list[bytes]:
    """What the compute sees, in order: the bytes of each needed panel, read as late as the bank is its own."""
    seen: list[bytes] = []
    experts.begin()
    for layer, mask in needed.items():
        time.sleep(pause)
        experts.routes(layer, mask)
        time.sleep(pause)  # the lanes have seen the routes before the first demand
        for ready in experts.groups(layer):
            time.sleep(pause)
            seen += [bytes(buffer.memory()) for _, buffer in ready.panels]
            ready.release()
    experts.end()
    return seen


def expected(content: bytes, needed: dict[int, np.ndarray]) -> list[bytes]:
    starts = [LAYOUT.panel_offset(layer, int(p)) for layer, mask in needed.items() for p in np.flatnonzero(mask)]
    return [content[start : start + SIZE] for start in starts]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", [1, 3, 4, 64])
def test_streamed_bytes_are_the_files(source: Faulty, content: bytes, mode: str, group: int) -> None:
    source.delay = 1e-4
    for banks, lanes in itertools.product((1, 2, 3), (1, 2, 4)):
        stream = streamed(source, group, banks, lanes, mode=mode)
        for seed in range(2):
            needed = masks(seed)
            source.seen.clear()
            assert prefill(stream, needed, pause=1e-4) == expected(content, needed)
            counters = stream.counters
            assert len(source.seen) == len(set(source.seen))  # nothing is read twice
            assert counters.bytes_read == len(source.seen) * ALIGNMENT <= counters.panels_read * SIZE
            assert counters.groups_dropped or counters.bytes_read == counters.panels_read * SIZE
            assert counters.panels_needed == sum(int(mask.sum()) for mask in needed.values())
            if mode != "before-routing":
                assert counters.panels_read == counters.panels_needed
        stream.close()


def test_a_released_bank_is_filled_while_the_compute_is_elsewhere(source: Faulty) -> None:
    stream = streamed(source, 64, 1, 2)
    stream.begin()
    stream.routes(1, np.ones(LAYOUT.panels_per_layer, dtype=bool))
    for ready in stream.groups(1):
        assert len(source.seen) * ALIGNMENT == LAYOUT.layer_bytes
        ready.release()
    until = time.monotonic() + 10
    while len(source.seen) * ALIGNMENT < 2 * LAYOUT.layer_bytes:  # nothing more is called: attention would run now
        assert time.monotonic() < until
        time.sleep(1e-3)
    stream.close()


def test_groups_may_be_held_until_flash_needs_a_bank(source: Faulty, content: bytes) -> None:
    stream, needed = streamed(source, 1, 3, 2), masks(3)
    held: list[ReadyGroup] = []
    flushes: list[int] = []

    def release_one() -> None:
        flushes.append(len(held))
        held.pop(0).release()

    seen: list[bytes] = []
    stream.begin()
    for layer, mask in needed.items():
        stream.routes(layer, mask)
        for ready in stream.groups(layer, release_one):
            held.append(ready)
            seen += [bytes(buffer.memory()) for _, buffer in ready.panels]
    for ready in held:
        ready.release()
    stream.end()
    assert seen == expected(content, needed) and flushes and set(flushes) == {2}
    stream.begin()
    stream.routes(1, np.ones(LAYOUT.panels_per_layer, dtype=bool))
    with pytest.raises(FlashError, match="layer 1: groups in use fill the arena"):
        list(stream.groups(1, lambda: None))
    stream.close()


def test_resident_equals_streamed_and_never_reads_again(source: Faulty, content: bytes) -> None:
    progress: list[tuple[str, int, int]] = []
    experts = ResidentExperts(
        source, LAYOUT, [allocate(LAYOUT.pool_bytes)], progress=lambda *step: progress.append(step)
    )
    assert experts.loaded_bytes == LAYOUT.pool_bytes == len(source.seen) * ALIGNMENT
    assert progress[-1] == ("loading experts", LAYOUT.pool_bytes, LAYOUT.pool_bytes)
    source.seen.clear()
    for seed in range(3):
        assert prefill(experts, masks(seed)) == expected(content, masks(seed))
    assert source.seen == [] and experts.counters.bytes_read == 0
    assert experts.counters.panels_needed == sum(int(mask.sum()) for mask in masks(2).values())


@pytest.mark.parametrize("mode", MODES)
def test_pinned_groups_are_read_once_verified_and_prepared_once(source: Faulty, content: bytes, mode: str) -> None:
    def checksum(layer: int, panel: int) -> int:
        start = LAYOUT.panel_offset(layer, panel)
        return zlib.crc32(content[start : start + SIZE])

    def invert(memory: memoryview) -> None:
        panel = np.frombuffer(memory, np.uint8)
        np.bitwise_not(panel, out=panel)

    everything = {layer: np.ones(LAYOUT.panels_per_layer, dtype=bool) for layer in LAYOUT.moe_layers}
    homes = [allocate(size * SIZE) for _ in LAYOUT.moe_layers for size in (3, 3, 2)]  # the last group is shorter
    stream = streamed(source, 3, 1, 2, mode=mode, homes=homes, checksum=checksum, prepare=invert)
    for needed in (everything, masks(1), everything):
        seen = [bytes(~np.frombuffer(panel, np.uint8)) for panel in prefill(stream, needed)]
        assert seen == expected(content, needed)
    assert stream.kept_bytes == LAYOUT.pool_bytes and stream.counters.bytes_read == 0
    assert len(source.seen) * ALIGNMENT == LAYOUT.pool_bytes
    stream.close()


def test_abort_keeps_pinned_groups_that_are_complete(source: Faulty, content: bytes) -> None:
    everything = {layer: np.ones(LAYOUT.panels_per_layer, dtype=bool) for layer in LAYOUT.moe_layers}
    homes = [allocate(2 * SIZE) for _ in LAYOUT.moe_layers for _ in range(2)]
    stream = streamed(source, 2, 1, 1, mode="on-demand", homes=homes)
    stream.begin()
    stream.routes(1, everything[1])
    groups = stream.groups(1, lambda: None)
    next(groups)
    held = next(groups)  # two pinned groups in use, the layer's other two never asked for
    stream.abort()
    with pytest.raises(FlashError, match="given up"):
        held.release()
    assert stream.kept_bytes == 4 * SIZE
    source.seen.clear()
    assert prefill(stream, everything) == expected(content, everything)
    assert LAYOUT.panel_offset(1, 0) not in source.seen and LAYOUT.panel_offset(1, 4) in source.seen
    stream.close()
    with pytest.raises(FlashError, match="as many for each layer"):
        streamed(source, 2, 1, 1, homes=homes[:-1])
    with pytest.raises(FlashError, match="bank 1 is too small"):
        streamed(source, 2, 1, 1, homes=[allocate(SIZE) for _ in LAYOUT.moe_layers])


def test_resident_refuses_misuse(source: Faulty) -> None:
    with pytest.raises(FlashError, match="do not hold"):
        ResidentExperts(source, LAYOUT, [allocate(ALIGNMENT)])
    experts = ResidentExperts(source, LAYOUT, [allocate(LAYOUT.pool_bytes)])
    with pytest.raises(FlashError, match="no prefill"):
        experts.routes(1, masks(0)[1])
    experts.begin()
    with pytest.raises(FlashError, match="already running"):
        experts.begin()
    with pytest.raises(FlashError, match="not known"):
        list(experts.groups(1))
    experts.routes(1, masks(0)[1])
    with pytest.raises(FlashError, match="twice"):
        experts.routes(1, masks(0)[1])
    with pytest.raises(FlashError, match="pool order"):
        list(experts.groups(2))
    with pytest.raises(FlashError, match="before layer 1"):
        experts.end()
    experts.abort()
    experts.begin()
    experts.close()
    with pytest.raises(ClosedError):
        experts.begin()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FlashError("reading failed: Input/output error"), "Input/output error"),
        (RuntimeError("a bug"), "a lane failed: RuntimeError: a bug"),
        (SystemExit(3), "a lane failed: SystemExit: 3"),
    ],
)
def test_a_failing_read_reaches_the_compute_and_the_stream_survives(
    source: Faulty, content: bytes, mode: str, error: BaseException, message: str
) -> None:
    everything = {layer: np.ones(LAYOUT.panels_per_layer, dtype=bool) for layer in LAYOUT.moe_layers}
    stream = streamed(source, 2, 2, 2, mode=mode)
    for fail_at in (0, 1, 7, 23):  # 3 layers, 4 groups, 2 stripes: 24 reads
        source.count, source.fail_at, source.error = itertools.count(), fail_at, error
        with pytest.raises(FlashError, match=message):
            prefill(stream, everything)
        stream.abort()
        source.fail_at = -1
        assert prefill(stream, everything) == expected(content, everything)
    stream.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_abort_in_the_middle_waits_for_reads_and_silences_old_loops(source: Faulty, content: bytes) -> None:
    stream = streamed(source, 1, 3, 2)
    everything = np.ones(LAYOUT.panels_per_layer, dtype=bool)
    stream.begin()
    stream.routes(1, everything)
    old = stream.groups(1)
    first = next(old)
    with pytest.raises(FlashError, match="already running"):
        stream.begin()
    with pytest.raises(FlashError, match="before layer 1"):
        stream.end()
    second = next(old)
    wait_until(lambda: stream._machine.quiet)  # all banks are full
    source.gate.clear()
    first.release()  # gives a bank back: its next read stops at the gate
    wait_until(lambda: not stream._machine.quiet)
    threading.Timer(0.05, source.gate.set).start()
    stream.abort()
    assert source.gate.is_set() and stream._machine.quiet
    stream.begin()
    with pytest.raises(FlashError, match="given up"):
        next(old)
    with pytest.raises(FlashError, match="given up"):
        second.release()
    stream.abort()
    stream.abort()
    assert prefill(stream, masks(1)) == expected(content, masks(1))
    stream.close()


def test_an_interrupt_while_waiting_leaves_a_usable_stream(
    source: Faulty, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = streamed(source)
    source.gate.clear()
    stream.begin()
    stream.routes(1, np.ones(LAYOUT.panels_per_layer, dtype=bool))

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stream._news, "wait", interrupted)
        next(stream.groups(1))
    source.gate.set()
    stream.abort()
    assert prefill(stream, masks(0)) == expected(content, masks(0))
    stream.close()


def test_verification_names_the_damaged_panel(source: Faulty, content: bytes) -> None:
    def checksum(layer: int, panel: int) -> int:
        start = LAYOUT.panel_offset(layer, panel)
        return zlib.crc32(content[start : start + SIZE]) ^ damage.get((layer, panel), 0)

    damage: dict[tuple[int, int], int] = {}
    needed = {layer: np.ones(LAYOUT.panels_per_layer, dtype=bool) for layer in LAYOUT.moe_layers}
    stream = streamed(source, checksum=checksum)
    assert stream.verifies and not streamed(source).verifies
    assert prefill(stream, needed) == expected(content, needed)
    damage[2, 5] = 1
    with pytest.raises(FlashError, match="layer 2, expert 2, panel 1: the bytes read are not those"):
        prefill(stream, needed)
    stream.abort()
    with pytest.raises(FlashError, match="layer 2, expert 2, panel 1: the bytes read are not those"):
        ResidentExperts(source, LAYOUT, [allocate(LAYOUT.pool_bytes)], checksum=checksum)
    damage.clear()
    assert prefill(stream, needed) == expected(content, needed)
    stream.close()


@pytest.mark.parametrize("mode", MODES)
def test_every_panel_is_prepared_once_after_it_was_verified(source: Faulty, content: bytes, mode: str) -> None:
    def checksum(layer: int, panel: int) -> int:
        start = LAYOUT.panel_offset(layer, panel)
        return zlib.crc32(content[start : start + SIZE])

    def invert(memory: memoryview) -> None:
        time.sleep(0.001)  # a group that is Ready too early would show
        panel = np.frombuffer(memory, np.uint8)
        np.bitwise_not(panel, out=panel)

    def inverted(panels: list[bytes]) -> list[bytes]:
        return [bytes(~np.frombuffer(panel, np.uint8)) for panel in panels]

    for check in (checksum, None):
        stream = streamed(source, mode=mode, checksum=check, prepare=invert)
        assert stream.verifies is (check is not None)
        for seed in range(3):  # the banks are used again and again
            assert prefill(stream, masks(seed)) == inverted(expected(content, masks(seed)))
        stream.close()
        experts = ResidentExperts(source, LAYOUT, [allocate(LAYOUT.pool_bytes)], checksum=check, prepare=invert)
        for seed in range(2):
            assert prefill(experts, masks(seed)) == inverted(expected(content, masks(seed)))


def test_many_prefills_leak_neither_threads_nor_descriptors(path: Path, content: bytes) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with PoolFile.open(path) as file:
            stream = streamed(Faulty(file), lanes=4)
            for seed in range(4):
                if seed == 2:
                    stream.begin()
                    stream.abort()
                assert prefill(stream, masks(seed)) == expected(content, masks(seed))
            stream.begin()
            stream.close()  # in the middle of a prefill
            stream.close()
            with pytest.raises(ClosedError):
                stream.begin()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_changed_file_is_noticed_at_begin(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    with PoolFile.open(copy) as file:
        stream = streamed(Faulty(file))
        prefill(stream, masks(0))
        os.truncate(copy, 5 * ALIGNMENT)
        with pytest.raises(FlashError, match="changed while it was open: size"):
            stream.begin()
        stream.close()


def test_banks_that_do_not_fit_are_refused(source: Faulty) -> None:
    with pytest.raises(FlashError, match="bank 0 is too small"):
        ExpertStream(source, LAYOUT, [allocate(SIZE)], group=2, lanes=1)
    with pytest.raises(FlashError, match="bank 1 is not page-aligned"):
        region = allocate(4 * SIZE)
        ExpertStream(source, LAYOUT, [region, region.part(512, SIZE)], group=1, lanes=1)


def test_addresses_are_a_fixed_set_and_waits_are_measured(source: Faulty) -> None:
    ticks = itertools.count()
    trace = Trace()
    stream = streamed(source, 3, 2, 2, clock=lambda: float(next(ticks)), trace=trace)
    bound: set[tuple[int, int]] = set()
    source.gate.clear()
    threading.Timer(0.05, source.gate.set).start()
    for _ in range(3):
        stream.begin()
        for layer in LAYOUT.moe_layers:
            stream.routes(layer, np.ones(LAYOUT.panels_per_layer, dtype=bool))
            for ready in stream.groups(layer):
                bound |= {(buffer.address, buffer.nbytes) for _, buffer in ready.panels}
                ready.release()
        stream.end()
        if source.delay == 0:
            assert stream.counters.wait_s > 0  # the gate was closed at the first group
            source.delay = 1e-5
        assert stream.counters.busy_s > 0
    stream.close()
    assert len(bound) == 2 * 3 and {nbytes for _, nbytes in bound} == {SIZE}
    assert {span.track for span in trace.spans} == {"compute", "lane 0", "lane 1", "bank 0", "bank 1"}
    states = {span.name.split()[0] for span in trace.spans if span.track == "bank 0"}
    assert states == {"Filling", "Ready", "InUse"}
    read = sum(int(str(span.args["bytes"])) for span in trace.spans if span.args)
    assert read == 3 * LAYOUT.pool_bytes


def test_load_ranges_fills_buffers_and_stops_at_the_first_error(
    source: Faulty, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estream.flash.ranges.PIECE", 2 * ALIGNMENT)
    ranges = [(allocate(5 * ALIGNMENT), 3 * ALIGNMENT), (allocate(ALIGNMENT), 0)]
    progress: list[tuple[str, int, int]] = []
    done = load_ranges(source, ranges, lanes=3, progress=lambda *step: progress.append(step), stage="dense")
    assert done == 6 * ALIGNMENT and len(progress) == 4 and progress[-1] == ("dense", done, done)
    for buffer, offset in ranges:
        assert bytes(buffer.memory()) == content[offset : offset + buffer.nbytes]
    assert load_ranges(source, []) == 0
    with pytest.raises(FlashError, match="not aligned"):
        load_ranges(source, [(allocate(ALIGNMENT), 512)])
    threads = threading.active_count()
    source.count, source.fail_at, source.error = itertools.count(), 1, ValueError("odd")
    with pytest.raises(FlashError, match="a lane failed: ValueError: odd"):
        load_ranges(source, ranges, lanes=2)
    assert threading.active_count() == threads


def test_resident_records_may_lie_in_several_buffers(source: Faulty, content: bytes) -> None:
    def checksum(layer: int, panel: int) -> int:
        start = LAYOUT.panel_offset(layer, panel)
        return zlib.crc32(content[start : start + SIZE])

    records = LAYOUT.experts * len(LAYOUT.moe_layers)
    buffers = [allocate(count * LAYOUT.record_bytes) for count in (1, records - 3, 2)]
    experts = ResidentExperts(source, LAYOUT, buffers, checksum=checksum)
    for seed in range(2):
        assert prefill(experts, masks(seed)) == expected(content, masks(seed))
    for wrong in (buffers[:2], [*buffers, allocate(LAYOUT.record_bytes)], [allocate(LAYOUT.pool_bytes - SIZE)]):
        with pytest.raises(FlashError, match="do not hold"):
            ResidentExperts(source, LAYOUT, wrong)
