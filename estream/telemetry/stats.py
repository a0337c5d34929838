"""What one prefill measured. A figure that was not measured is None, never 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any

from estream.telemetry.memory import ProcessMemory, process_memory
from estream.telemetry.trace import Trace


class Stopwatch:
    """Adds up the seconds spent under each key, and shows them as spans of one track.

        watch = Stopwatch(trace)
        with watch("attention_s", "attention 3"): ...
        watch.seconds == {"attention_s": 0.25}

    Keys may nest: each counts its whole time. For one thread. `clock` is the stream's, so that spans share a time line.
    """

    def __init__(
        self, trace: Trace | None = None, *, clock: Callable[[], float] = time.perf_counter, track: str = "compute"
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._trace = trace
        self._clock = clock
        self._track = track

    def __call__(self, key: str, name: str | None = None) -> _Lap:
        return _Lap(self, key, name or key.removesuffix("_s"))

    def add(self, key: str, name: str, start_s: float, end_s: float) -> None:
        """Counts a time that was measured elsewhere."""
        self.seconds[key] = self.seconds.get(key, 0.0) + end_s - start_s
        if self._trace is not None:
            self._trace.span(self._track, name, start_s, end_s)


class _Lap:
    """One `with` block; counted when it is left by an exception, too."""

    __slots__ = ("_key", "_name", "_start", "_watch")

    def __init__(self, watch: Stopwatch, key: str, name: str) -> None:
        self._watch, self._key, self._name, self._start = watch, key, name, 0.0

    def __enter__(self) -> None:
        self._start = self._watch._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.add(self._key, self._name, self._start, self._watch._clock())


@dataclass(frozen=True)
class MemoryStats:
    """Bytes. `resident_weight_bytes`: weights held for the engine's life; the arena is apart. `shared_bytes`: mapped
    for host and NPU, arena and weights among them. `dma_buf_bytes`: all that the process has of that kind of memory."""

    vm_hwm_bytes: int | None = None
    rss_plus_swap_bytes: int | None = None
    arena_bytes: int | None = None
    resident_weight_bytes: int | None = None
    peak_bytes: int | None = None
    shared_bytes: int | None = None
    dma_buf_bytes: int | None = None

    @classmethod
    def of(
        cls,
        process: ProcessMemory,
        *,
        arena_bytes: int | None,
        resident_weight_bytes: int | None,
        shared_bytes: int | None = None,
    ) -> MemoryStats:
        held = (arena_bytes or 0) + (resident_weight_bytes or 0)
        return cls(
            process.vm_hwm_bytes,
            process.rss_plus_swap_bytes,
            arena_bytes,
            resident_weight_bytes,
            process.peak_bytes(held, shared_bytes or 0),
            shared_bytes,
            process.dma_buf_bytes,
        )


@dataclass(frozen=True)
class PrefillStats:
    """Seconds, bytes and counts of one prefill. Raises ValueError for a figure that is negative or not finite.

    ttft_s runs from the call of prefill to the logits; load_s (opening) is apart. bytes_read counts experts.safetensors
    only. flash_busy_s: at least one read was outstanding. rows: of tiles times panels. dropped_rate: the share of
    routed pairs of a token and an expert that was not computed. npu_bytes_copied: of tensors that graphs ran with in
    memory that the NPU does not see.
    """

    ttft_s: float | None = None
    load_s: float | None = None
    attention_s: float | None = None
    router_s: float | None = None
    dispatch_s: float | None = None
    flash_wait_s: float | None = None
    flash_busy_s: float | None = None
    bytes_read: int | None = None
    dense_bytes_read: int | None = None
    records_read: int | None = None
    records_needed: int | None = None
    groups_skipped: int | None = None
    rows_computed: int | None = None
    rows_useful: int | None = None
    dropped_rate: float | None = None
    bytes_copied: int | None = None
    npu_bytes_copied: int | None = None
    direct_io: bool | None = None
    direct_io_reason: str | None = None
    memory: MemoryStats = MemoryStats()

    def __post_init__(self) -> None:
        for owner in (self, self.memory):
            for field in fields(owner):
                value = getattr(owner, field.name)
                if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{field.name} cannot be {value}")

    @classmethod
    def measured(
        cls,
        watch: Stopwatch,
        *,
        arena_bytes: int | None = None,
        resident_weight_bytes: int | None = None,
        shared_bytes: int | None = None,
        **figures: Any,
    ) -> PrefillStats:
        """From the stopwatch (attention_s, router_s, dispatch_s), the process's memory now, and `figures`: fields by
        name. Raises TypeError for an unknown one."""
        times: dict[str, Any] = {key: watch.seconds.get(key) for key in ("attention_s", "router_s", "dispatch_s")}
        memory = MemoryStats.of(
            process_memory(),
            arena_bytes=arena_bytes,
            resident_weight_bytes=resident_weight_bytes,
            shared_bytes=shared_bytes,
        )
        return cls(**times, **figures, memory=memory)

    @property
    def bubble_rate(self) -> float | None:
        """The share of ttft_s in which the compute waited for flash."""
        if self.flash_wait_s is None or not self.ttft_s:
            return None
        return self.flash_wait_s / self.ttft_s

    def to_dict(self) -> dict[str, object]:
        """JSON-ready, `bubble_rate` included, memory nested."""
        return {**asdict(self), "bubble_rate": self.bubble_rate}
