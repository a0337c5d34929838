"""The configuration that finishes a prompt first within a memory budget, and what it promises."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from estream.layers.weights import dense_bytes
from estream.package.layout import PoolLayout
from estream.package.reader import Package
from estream.solver.automatic import ARENA_BYTES, GROUP_BYTES, Configuration, resolve
from estream.solver.costs import Costs, CpuCosts, Workload
from estream.solver.latency import Prediction, predict
from estream.solver.load import draw_counts
from estream.solver.profile import DeviceProfile, Rate, Shape

_LARGEST_GROUP = 64 << 20
_TIE = 0.005  # predictions closer than this are the same: fewer bytes, then the usual size of a group wins


@dataclass(frozen=True)
class Plan:
    """What `solve` chose. Seconds and bytes are predictions. again: of the prefills that follow on an open engine, with
    the pinned groups in memory. bound: "flash", "compute" or "dispatch"; advice: what would shorten it most."""

    tokens: int
    memory: int | None
    configuration: Configuration
    prediction: Prediction
    again: Prediction
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
            "again_ttft_s": self.again.ttft_s,
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
    costs: Costs | None = None,
    group: int | None = None,
    banks: int | None = None,
    prefetch: str | None = None,
    resident: str = "none",
    strategy: str | None = None,
) -> Plan:
    """counts: rows per expert of each MoE layer; None: drawn with uniform routing. Where the budget has no room for
    resident dense weights they are paged; where it has room beside the arena, groups are pinned. costs: of the target;
    None: target cpu as the profile measured it. group, banks, prefetch: kept where given; banks only with group.
    strategy: the one that fixes group or residency, for the refusal.

    Raises ProfileError where the profile lacks the package's shape, MemoryBudgetError naming the smallest workable
    budget.
    """
    arch, pool = package.architecture, package.pool
    costs = costs or CpuCosts(profile.shape(package))
    if counts is None:
        counts = draw_counts(arch.experts, arch.top_k, tokens, len(pool.moe_layers))
    work = costs.workload(package, tokens, counts)
    held = costs.held(package, profile.base_bytes, tokens)
    _, *sizes = dense_bytes(package)

    def resolved(**chosen: Any) -> Configuration:
        both = (sizes[0], sizes[1])
        return resolve(
            pool, lanes=profile.lanes, strategy=strategy, memory=memory, held=held, dense_bytes=both, **chosen
        )

    if resident == "all":
        chosen = resolved(resident="all")
        paged = sizes[0] if chosen.dense_weights == "paged" else 0
        found = Search(package, profile, costs, work, paged)
        prediction = again = found.predict(chosen)
    else:
        # A group that is asked for stands for a way of reading in which nothing stays.
        pinned = 0 if group is not None else None
        fallback = resolved(pinned=0, group=group, banks=banks)
        paged = sizes[0] if fallback.dense_weights == "paged" else 0
        found = Search(package, profile, costs, work, paged)
        arena = ARENA_BYTES
        if memory is not None:
            arena = min(max(memory - held - fallback.dense_bytes, 0), max(ARENA_BYTES, fallback.arena_bytes))
        given = None if group is None else fallback
        best, prediction = found.best(arena, prefetch=prefetch, given=given)
        chosen = resolved(group=best.group, banks=best.banks, prefetch=best.prefetch, pinned=pinned)
        again = found.predict(chosen, chosen.pinned) if chosen.pinned else prediction
    in_memory = pool.pool_bytes if resident == "all" else chosen.arena_bytes + chosen.pinned_bytes
    return Plan(
        tokens,
        memory,
        chosen,
        prediction,
        again,
        held + chosen.dense_bytes + in_memory,
        found.bound(prediction),
        found.advice(chosen, prediction),
    )


def configurations(pool: PoolLayout, arena_bytes: int, lanes: int) -> Iterator[Configuration]:
    """G in powers of two, the B that fill the arena (at least two, or one where two do not fit), both ways to start."""
    for size in sizes_that_fit(pool, arena_bytes, lanes):
        yield size
        yield replace(size, prefetch="after-routing")


def sizes_that_fit(pool: PoolLayout, arena_bytes: int, lanes: int) -> Iterator[Configuration]:
    """As `configurations`, those that read ahead."""
    panel, group = pool.panel.panel_bytes, 1
    groups_in_all = pool.panels_per_layer * len(pool.moe_layers)
    while group <= pool.panels_per_layer and group * panel <= max(arena_bytes, panel):
        bank = group * panel
        banks = min(arena_bytes // bank, -(-groups_in_all // group))
        if group == 1 or (banks >= 2 and bank <= _LARGEST_GROUP):
            banks = max(1, banks)
            yield Configuration(group, banks, lanes, "before-routing", "none", bank, banks * bank)
        group *= 2


@dataclass(frozen=True)
class Search:
    """Predictions of one workload in many configurations. paged_bytes: dense weights read in every prefill."""

    package: Package
    profile: DeviceProfile
    costs: Costs | Shape
    work: Workload
    paged_bytes: int

    def predict(self, chosen: Configuration, pinned: int = 0) -> Prediction:
        """pinned: groups of every layer that are in memory already; all of them where experts are resident."""
        if chosen.resident == "all":
            panels = self.package.pool.panels_per_layer
            chosen, pinned = replace(chosen, group=panels, banks=1, prefetch="before-routing", resident="none"), 1
        return predict(
            self.package,
            self.profile,
            self.costs,
            self.work,
            group=chosen.group,
            banks=chosen.banks,
            lanes=chosen.lanes,
            prefetch=chosen.prefetch,
            pinned=pinned,
            paged_bytes=self.paged_bytes,
        )

    def best(
        self, arena_bytes: int, *, prefetch: str | None = None, given: Configuration | None = None
    ) -> tuple[Configuration, Prediction]:
        """The fastest that fits the arena; of about equal ones, reading ahead, then fewer bytes, then the group whose
        bank is nearest the automatic size: larger ones fill before anything is computed, smaller ones ask often.

        prefetch: the only mode that is tried. given: the only sizes, in the modes that are tried."""
        # Where every panel is needed, waiting for the routes saves nothing.
        modes = ["before-routing"] + ["after-routing"] * any((seconds == 0).any() for seconds in self.work.panel_s)
        modes = modes if prefetch is None else [prefetch]
        sizes = (
            [given] if given is not None else list(sizes_that_fit(self.package.pool, arena_bytes, self.profile.lanes))
        )
        found = [(one, self.predict(one)) for mode in modes for one in (replace(size, prefetch=mode) for size in sizes)]
        least = min(prediction.ttft_s for _, prediction in found)
        equal = [pair for pair in found if pair[1].ttft_s <= (1 + _TIE) * least]

        def odd(one: Configuration) -> float:
            return abs(math.log(one.bank_bytes / GROUP_BYTES))

        return min(equal, key=lambda pair: (pair[0].prefetch != "before-routing", pair[1].bytes_read, odd(pair[0])))

    def bound(self, prediction: Prediction) -> str:
        """What limits the prefill."""
        if prediction.flash_s > self.work.compute_s:
            return "flash"
        return "dispatch" if self.work.fixed_s > 0.5 * self.work.compute_s else "compute"

    def advice(self, chosen: Configuration, prediction: Prediction) -> str:
        """The change of one thing that would help most."""
        rates = tuple(Rate(rate.nbytes, rate.lanes, 2 * rate.bytes_per_s) for rate in self.profile.rates)
        faster_flash = replace(self, profile=replace(self.profile, rates=rates))
        options = {
            "flash twice as fast": faster_flash.predict(chosen).ttft_s,
            "compute twice as fast": replace(self, work=self.work.faster(2)).predict(chosen).ttft_s,
            "all experts in memory": self.work.compute_s,
        }
        name, seconds = min(options.items(), key=lambda pair: pair[1])
        return f"{name}: {seconds:.3g} s instead of {prediction.ttft_s:.3g} s"
