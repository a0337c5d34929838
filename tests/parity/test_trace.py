"""--trace of a real prefill, against the Chrome trace format that Perfetto reads."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from estream.cli.main import main
from estream.engine import Engine
from estream.errors import TargetError
from estream.runtime.mock import Faults
from estream.telemetry.trace import Trace
from tests.support.faults import IDS, make_package, mock


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("trace"), experts="int8")


def check_schema(document: Any) -> dict[str, list[dict[str, Any]]]:
    """Fails unless `document` is in the format; returns the spans of each track, by start."""
    assert set(document) == {"traceEvents", "displayTimeUnit"} and document["displayTimeUnit"] in ("ms", "ns")
    names: dict[tuple[int, int], str] = {}
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert set(event) <= {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        for key in ("ts", "dur"):
            assert isinstance(event[key], int | float) and event[key] >= 0
        spans[names[event["pid"], event["tid"]]].append(event)
    assert len(set(names.values())) == len(names)
    for track, events in spans.items():
        assert [event["ts"] for event in events] == sorted(event["ts"] for event in events), track
        check_nesting(track, events)
    return spans


def check_nesting(track: str, events: list[dict[str, Any]]) -> None:
    """Each span lies inside the one that is open, or begins after its end."""
    open_until: list[float] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + 0.002:  # written with three decimals
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.002, (track, event)
        open_until.append(end)


def test_trace_of_the_command_line(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    ids = ",".join(map(str, IDS))
    assert main(["prefill", str(package), "--ids", ids, "--group", "1", "--lanes", "2", "--trace", str(out), "-q"]) == 0
    spans = check_schema(json.loads(out.read_text()))
    tracks = set(spans)
    assert {"compute", "lane 0", "lane 1", "bank 0", "bank 1"} <= tracks
    assert all(re.fullmatch(r"compute|(lane|bank) \d+", track) for track in tracks)
    compute = " ".join(event["name"] for event in spans["compute"])
    for word in ("embedding", "attention 0", "ffn 1", "router 2", "shared expert 2", "layer 2 group", "output head"):
        assert word in compute
    states = {event["name"].split()[0] for track, events in spans.items() if "bank" in track for event in events}
    assert states >= {"filling", "ready"} or states >= {"Filling", "Ready"}


@pytest.mark.parametrize("experts_resident", ["none", "all"])
def test_compute_spans_cover_the_prefill(package: Path, experts_resident: str) -> None:
    """With runs that take 2 ms each, what lies between the spans is little beside them."""
    trace = Trace()
    target = mock(Faults(delay=lambda graph, run: 0.002))
    with Engine(package, target, trace=trace, resident=experts_resident) as engine:
        stats = engine.prefill(IDS).stats
    spans = check_schema({"traceEvents": trace.events(), "displayTimeUnit": "ms"})["compute"]
    total, end = 0.0, 0.0
    for event in spans:  # nested ones are inside
        total += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    assert stats.ttft_s is not None
    assert 0.5 * stats.ttft_s < total / 1e6 <= 1.001 * stats.ttft_s


def test_trace_of_a_failed_prefill_is_still_well_formed(package: Path) -> None:
    trace, faults = Trace(), Faults()
    with mock(faults) as target, Engine(package, target, group=1, trace=trace) as engine:
        for run in (7, 23):
            faults.run = target.runs.total() + run
            with pytest.raises(TargetError):
                engine.prefill(IDS)
            time.sleep(0.001)
        engine.prefill(IDS)
    spans = check_schema({"traceEvents": trace.events(), "displayTimeUnit": "ms"})
    assert sum(event["name"] == "embedding" for event in spans["compute"]) == 3
