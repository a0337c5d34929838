"""Spans of a prefill as Chrome trace events, which Perfetto opens: one track per lane, per bank, and for compute."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from estream.whole_file import write_whole


class Span(NamedTuple):
    """`start_s` and `end_s` on the clock of whoever adds it: one clock per trace."""

    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, object] | None


class Trace:
    """Collects spans from any thread: adding one is a single list append. Spans of one track nest or do not overlap."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(
        self, track: str, name: str, start_s: float, end_s: float, args: Mapping[str, object] | None = None
    ) -> None:
        self.spans.append(Span(track, name, start_s, end_s, args))

    def events(self) -> list[dict[str, object]]:
        """Trace events: the tracks' names and order, then the spans by start; microseconds since the first one."""
        spans = sorted(self.spans, key=lambda span: (span.start_s, -span.end_s))
        origin = spans[0].start_s if spans else 0.0
        threads = {track: number for number, track in enumerate(sorted({s.track for s in spans}, key=_order), 1)}
        events: list[dict[str, object]] = [_metadata("process_name", 0, {"name": "EStream prefill"})]
        for track, thread in threads.items():
            events.append(_metadata("thread_name", thread, {"name": track}))
            events.append(_metadata("thread_sort_index", thread, {"sort_index": thread}))
        for span in spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.track.split()[0],
                    "pid": 1,
                    "tid": threads[span.track],
                    "ts": round((span.start_s - origin) * 1e6, 3),
                    "dur": round(max(0.0, span.end_s - span.start_s) * 1e6, 3),
                    **({"args": dict(span.args)} if span.args else {}),
                }
            )
        return events

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole file or none. Raises UsageError where `path` is no regular file, OSError naming `path`."""
        text = json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"})
        write_whole(path, text)


def _metadata(name: str, thread: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": 1, "tid": thread, "args": args}


def _order(track: str) -> tuple[bool, list[tuple[int, str]]]:
    """Compute first, then by name with numbers in numeric order: lane 2 before lane 10."""
    return track != "compute", [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", track)]
