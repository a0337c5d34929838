"""Trace files, memory figures and prefill statistics."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest

from estream.telemetry.memory import ProcessMemory, process_memory
from estream.telemetry.stats import MemoryStats, PrefillStats, Stopwatch
from estream.telemetry.trace import Trace

KIB = 1024


def test_trace_file_has_the_schema_that_perfetto_reads(tmp_path: Path) -> None:
    trace = Trace()
    trace.span("lane 10", "layer 0 group 1", 5.0, 5.5, {"bytes": 16384})
    trace.span("lane 2", "layer 0 group 0", 4.0, 4.25)
    trace.span("bank 0", "Filling", 4.0, 5.0)
    trace.span("compute", "attention 0", 4.5, 4.500001)
    trace.write(tmp_path / "trace.json")
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    data = json.loads((tmp_path / "trace.json").read_text())
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    metadata = [event for event in data["traceEvents"] if event["ph"] == "M"]
    spans = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert len(metadata) + len(spans) == len(data["traceEvents"])
    names = {event["tid"]: event["args"]["name"] for event in metadata if event["name"] == "thread_name"}
    assert names == {1: "compute", 2: "bank 0", 3: "lane 2", 4: "lane 10"}
    order = {event["tid"]: event["args"]["sort_index"] for event in metadata if event["name"] == "thread_sort_index"}
    assert order == {tid: tid for tid in names}
    for event in spans:
        assert set(event) - {"args"} == {"ph", "name", "cat", "pid", "tid", "ts", "dur"}
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["tid"] in names
    by_track = {names[event["tid"]]: event for event in spans}
    assert (by_track["lane 2"]["ts"], by_track["lane 2"]["dur"]) == (0.0, 250000.0)
    assert (by_track["compute"]["ts"], by_track["compute"]["dur"]) == (500000.0, 1.0)
    assert by_track["lane 10"]["args"] == {"bytes": 16384} and by_track["bank 0"]["cat"] == "bank"


def test_an_empty_trace_is_a_valid_file(tmp_path: Path) -> None:
    Trace().write(tmp_path / "t.json")
    assert [event["ph"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]] == ["M"]


def test_spans_of_many_threads_are_all_kept() -> None:
    trace = Trace()

    def add(lane: int) -> None:
        for number in range(500):
            trace.span(f"lane {lane}", "read", number, number + 1)

    threads = [threading.Thread(target=add, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(event["ph"] == "X" for event in trace.events()) == 2000


def test_memory_is_read_from_proc(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t9999 kB\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nVmSwap:\t  150 kB\n")
    memory = process_memory(tmp_path)
    assert memory == ProcessMemory(300 * KIB, 350 * KIB)
    assert memory.peak_bytes() == memory.held_bytes() == 350 * KIB
    assert memory.peak_bytes(held=400 * KIB) == 400 * KIB  # never below what is known to be held
    status.write_text("VmHWM:\t300 kB\nVmRSS:\t200 kB\n")
    assert process_memory(tmp_path) == ProcessMemory(300 * KIB, None)
    assert process_memory(tmp_path).peak_bytes() == 300 * KIB and process_memory(tmp_path).held_bytes() is None
    unknown = process_memory(tmp_path / "nothing")
    assert unknown == ProcessMemory(None, None) and unknown.peak_bytes() is None


STATUS = "VmHWM:\t5000 kB\nVmRSS:\t4000 kB\nRssAnon:\t3000 kB\nRssShmem:\t{shmem} kB\nVmSwap:\t500 kB\n"
DMA_BUF = "pos:\t0\nflags:\t02000002\nmnt_id:\t13\nino:\t{inode}\nsize:\t{size}\ncount:\t2\nexp_name:\tsystem\n"
MAPS = """7a0000000000-7a0000100000 rw-s 00000000 00:0a {inode}                     /dmabuf:qcom,system
7a0000200000-7a0000280000 rw-s 00080000 00:0a {inode}                     /dmabuf:qcom,system
7b0000000000-7b0000400000 rw-p 00000000 00:00 0
7c0000000000-7c0000001000 r--p 00000000 fe:01 42                         /data/local/tmp/dmabuf:x
"""


def test_dma_bufs_count_once_and_beside_the_resident_set(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(STATUS.format(shmem=0))
    infos = tmp_path / "fdinfo"
    infos.mkdir()
    (infos / "0").write_text("pos:\t0\nflags:\t0100000\nmnt_id:\t29\nino:\t7\n")
    for number, (inode, size) in enumerate([(70, 8 << 20), (70, 8 << 20), (71, 2 << 20)], 3):
        (infos / str(number)).write_text(DMA_BUF.format(inode=inode, size=size))
    (tmp_path / "maps").write_text(MAPS.format(inode=70))
    memory = process_memory(tmp_path)
    assert memory.dma_buf_bytes == 10 << 20  # a second descriptor and a mapping are the same buffer
    assert memory.held_bytes() == (10 << 20) + 4500 * KIB and memory.peak_bytes() == (10 << 20) + 5000 * KIB
    (tmp_path / "maps").write_text(MAPS.format(inode=72))  # its descriptor was closed
    assert process_memory(tmp_path).dma_buf_bytes == (10 << 20) + (1 << 20) + (512 << 10)
    for info in infos.iterdir():
        info.unlink()
    infos.rmdir()
    assert process_memory(tmp_path).dma_buf_bytes == (1 << 20) + (512 << 10)
    (tmp_path / "maps").unlink()
    assert process_memory(tmp_path).dma_buf_bytes is None


def test_shared_memory_is_held_however_little_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(STATUS.format(shmem=0))
    memory = process_memory(tmp_path)
    assert memory.peak_bytes() == 5000 * KIB
    assert memory.peak_bytes(shared=9000 * KIB) == 14000 * KIB and memory.held_bytes(9000 * KIB) == 13500 * KIB
    (tmp_path / "status").write_text(STATUS.format(shmem=1000))  # so much of it is in the resident set
    assert process_memory(tmp_path).peak_bytes(shared=9000 * KIB) == 13000 * KIB
    (tmp_path / "maps").write_text(MAPS.format(inode=70).replace("100000", "900000", 1))
    memory = process_memory(tmp_path)
    assert memory.dma_buf_bytes == (9 << 20) + (512 << 10)  # what the driver took for itself counts, too
    assert memory.peak_bytes(shared=9000 * KIB) == 5000 * KIB + (9 << 20) + (512 << 10)
    assert ProcessMemory(None, None).peak_bytes(shared=5) == 5


def test_memory_of_this_process_grows_with_what_it_holds() -> None:
    before = process_memory()
    if before.vm_hwm_bytes is None:
        pytest.skip("no /proc here")
    block = b"\1" * (64 << 20)
    after = process_memory()
    assert after.rss_plus_swap_bytes is not None and before.rss_plus_swap_bytes is not None
    assert after.rss_plus_swap_bytes - before.rss_plus_swap_bytes > len(block) // 2
    assert after.vm_hwm_bytes is not None and after.vm_hwm_bytes > len(block)


def test_stopwatch_adds_up_and_traces() -> None:
    ticks = itertools.count()
    trace = Trace()
    watch = Stopwatch(trace, clock=lambda: float(next(ticks)))
    with watch("dispatch_s", "layer 0"), watch("router_s"):  # ticks 0 to 3, 1 to 2
        pass
    with pytest.raises(RuntimeError), watch("dispatch_s"):  # 4 to 5
        raise RuntimeError
    assert watch.seconds == {"dispatch_s": 4.0, "router_s": 1.0}
    assert [(span.name, span.track) for span in trace.spans] == [
        ("router", "compute"),
        ("layer 0", "compute"),
        ("dispatch", "compute"),
    ]


def test_unmeasured_statistics_are_null() -> None:
    empty = PrefillStats().to_dict()
    memory = empty.pop("memory")
    assert isinstance(memory, dict)
    assert set(memory) == {
        "vm_hwm_bytes",
        "rss_plus_swap_bytes",
        "arena_bytes",
        "resident_weight_bytes",
        "peak_bytes",
        "shared_bytes",
        "dma_buf_bytes",
    }
    assert all(value is None for value in (*empty.values(), *memory.values()))
    wanted = (
        "ttft_s load_s attention_s router_s dispatch_s flash_wait_s bytes_read dense_bytes_read records_read "
        "records_needed groups_skipped bubble_rate rows_computed rows_useful bytes_copied npu_bytes_copied direct_io "
        "direct_io_reason"
    )
    assert set(wanted.split()) <= set(empty)


def test_measured_statistics() -> None:
    ticks = itertools.count()
    watch = Stopwatch(clock=lambda: float(next(ticks)))
    with watch("attention_s"), watch("head_s"):
        pass
    stats = PrefillStats.measured(
        watch, ttft_s=4.0, flash_wait_s=1.0, bytes_read=0, arena_bytes=3, resident_weight_bytes=1 << 50, direct_io=False
    )
    assert (stats.attention_s, stats.router_s, stats.bubble_rate, stats.bytes_read) == (3.0, None, 0.25, 0)
    assert stats.memory.peak_bytes == (1 << 50) + 3
    shared = PrefillStats.measured(watch, arena_bytes=3, shared_bytes=1 << 50).memory
    assert shared.shared_bytes == 1 << 50 and shared.peak_bytes is not None and shared.peak_bytes >= 1 << 50
    assert json.loads(json.dumps(stats.to_dict()))["bubble_rate"] == 0.25
    assert PrefillStats(flash_wait_s=0.0, ttft_s=2.0).bubble_rate == 0.0
    with pytest.raises(TypeError):
        PrefillStats.measured(watch, tokens_per_second=1.0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="ttft_s cannot be"):
            PrefillStats(ttft_s=wrong)
    with pytest.raises(ValueError, match="arena_bytes"):
        PrefillStats(memory=MemoryStats(arena_bytes=-1))
