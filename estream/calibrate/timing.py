"""Medians of repeated calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median


def timed(action: Callable[[], None], seconds: float) -> float:
    """Median seconds of a call, over at least 3 calls and about `seconds`, after one that warms up."""
    action()
    found: list[float] = []
    started = time.perf_counter()
    while len(found) < 3 or (time.perf_counter() - started < seconds and len(found) < 1000):
        before = time.perf_counter()
        action()
        found.append(time.perf_counter() - before)
    return median(found)
