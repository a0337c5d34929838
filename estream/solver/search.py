"""The configuration that finishes a prompt first within a memory budget, and what it promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from estream.layers.state import State
from estream.layers.weights import dense_bytes
from estream.package.layout import PoolLayout
from estream.package.reader import Package
from estream.runtime.mock import MockTarget
from estream.solver.automatic import ARENA_BYTES, Configuration, held_bytes, resolve
from estream.solver.latency import Prediction, Workload, predict, workload
from estream.solver.load import draw_counts
from estream.solver.profile import DeviceProfile, Rate, Shape

MAX_ROWS = 512  # of a tile on target cpu
_LARGEST_GROUP = 64 << 20
_TIE = 0.002  # predictions closer than this are the same: the smaller arena, then the larger group wins


@dataclass(frozen=True)
class Plan:
    """What `solve` chose. Seconds and bytes are predictions. bound: "flash", "compute" or "dispatch"; advice: what
    would shorten it most."""

    tokens: int
    memory: int | None
    configuration: Configuration
    prediction: Prediction
    peak_bytes: int
    bound: str
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the timeline."""
        return {
            "tokens": self.tokens,
            "memory": self.memory,
            "configuration": asdict(self.configuration),
            "ttft_s": self.prediction.ttft_s,
            "bubble_rate": self.prediction.bubble_rate,
            "flash_s": self.prediction.flash_s,
            "compute_s": self.prediction.compute_s,
            "bytes_read": self.prediction.bytes_read,
            "peak_bytes": self.peak_bytes,
            "bound": self.bound,
            "advice": self.advice,
        }


def solve(
    package: Package,
    profile: DeviceProfile,
    tokens: int,
    *,
    memory: int | None = None,
    counts: Sequence[np.ndarray] | None = None,
) -> Plan:
    """counts: rows per expert of each MoE layer; None: drawn with uniform routing. Where the budget has no room for
    resident dense weights they are paged; that their reads share the flash with the experts' is not predicted.

    Raises ProfileError where the profile lacks the package's shape, MemoryBudgetError naming the smallest workable
    budget.
    """
    arch, pool, shape = package.architecture, package.pool, profile.shape(package)
    if counts is None:
        counts = draw_counts(arch.experts, arch.top_k, tokens, len(pool.moe_layers))
    work = workload(package, shape, tokens, counts, MAX_ROWS)
    held = held_before_arena(package, profile, tokens)
    _, *sizes = dense_bytes(package)
    fallback = resolve(pool, lanes=profile.lanes, memory=memory, held=held, dense_bytes=(sizes[0], sizes[1]))
    held += fallback.dense_bytes
    best = _best(package, profile, shape, work, fallback, memory, held)
    configuration, prediction = best
    configuration = replace(configuration, dense_weights=fallback.dense_weights, dense_bytes=fallback.dense_bytes)
    return Plan(
        tokens,
        memory,
        configuration,
        prediction,
        held + configuration.arena_bytes,
        _bound(shape, work, prediction),
        _advice(package, profile, shape, work, configuration, prediction),
    )


def held_before_arena(package: Package, profile: DeviceProfile, tokens: int) -> int:
    """Bytes of the process beside the arena and the matrices and records of dense weights, on target cpu."""
    state = State(MockTarget(), package.architecture, tokens)  # reserves, does not touch
    vectors, _, _ = dense_bytes(package)
    now = profile.base_bytes + vectors
    return held_bytes(now, state.nbytes, state.scratch_bytes, package.architecture, tokens)


def configurations(pool: PoolLayout, arena_bytes: int, lanes: int) -> Iterator[Configuration]:
    """G in powers of two, the B that fill the arena (at least two, or one where two do not fit), both ways to start."""
    panel, group = pool.panel.panel_bytes, 1
    groups_in_all = pool.panels_per_layer * len(pool.moe_layers)
    while group <= pool.panels_per_layer and group * panel <= max(arena_bytes, panel):
        bank = group * panel
        banks = min(arena_bytes // bank, -(-groups_in_all // group))
        if group == 1 or (banks >= 2 and bank <= _LARGEST_GROUP):
            for prefetch in ("before-routing", "after-routing"):
                banks = max(1, banks)
                yield Configuration(group, banks, lanes, prefetch, "none", bank, banks * bank)
        group *= 2


def _best(
    package: Package,
    profile: DeviceProfile,
    shape: Shape,
    work: Workload,
    fallback: Configuration,
    memory: int | None,
    held: int,
) -> tuple[Configuration, Prediction]:
    arena = ARENA_BYTES if memory is None else min(max(memory - held, 0), max(ARENA_BYTES, fallback.arena_bytes))
    found = [
        (one, _predict(package, profile, shape, work, one))
        for one in configurations(package.pool, arena, profile.lanes)
    ]
    least = min(prediction.ttft_s for _, prediction in found)
    equal = [pair for pair in found if pair[1].ttft_s <= (1 + _TIE) * least]
    return min(equal, key=lambda pair: (pair[0].prefetch != "before-routing", pair[1].bytes_read, -pair[0].group))


def _predict(
    package: Package, profile: DeviceProfile, shape: Shape, work: Workload, chosen: Configuration
) -> Prediction:
    return predict(
        package,
        profile,
        shape,
        work,
        group=chosen.group,
        banks=chosen.banks,
        lanes=chosen.lanes,
        prefetch=chosen.prefetch,
    )


def _bound(shape: Shape, work: Workload, prediction: Prediction) -> str:
    if prediction.flash_s > work.compute_s:
        return "flash"
    dispatches = sum(int(np.count_nonzero(seconds)) for seconds in work.panel_s)
    fixed = dispatches * (shape.panel[0][1] + shape.group_s)
    return "dispatch" if fixed > 0.5 * work.compute_s else "compute"


def _advice(
    package: Package,
    profile: DeviceProfile,
    shape: Shape,
    work: Workload,
    configuration: Configuration,
    prediction: Prediction,
) -> str:
    """The change of one thing that would help most."""
    faster_flash = replace(
        profile, rates=tuple(Rate(rate.nbytes, rate.lanes, 2 * rate.bytes_per_s) for rate in profile.rates)
    )
    faster_compute = Workload(
        work.tokens,
        tuple(seconds / 2 for seconds in work.dense_s),
        tuple(seconds / 2 for seconds in work.panel_s),
        work.tail_s / 2,
    )
    options = {
        "flash twice as fast": _predict(package, faster_flash, shape, work, configuration).ttft_s,
        "compute twice as fast": _predict(package, profile, shape, faster_compute, configuration).ttft_s,
        "all experts in memory": work.compute_s,
    }
    name, seconds = min(options.items(), key=lambda pair: pair[1])
    return f"{name}: {seconds:.3g} s instead of {prediction.ttft_s:.3g} s"
