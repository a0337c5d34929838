"""How long a prefill takes in a configuration: the flash machine itself, on a virtual clock, with a profile's times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from estream.flash.machine import Machine
from estream.flash.states import Load
from estream.flash.virtual import Timeline, simulate
from estream.package.reader import Package
from estream.solver.costs import Costs, Workload, workload
from estream.solver.holding import Holding
from estream.solver.profile import DeviceProfile, Shape

__all__ = ["Prediction", "Workload", "predict", "workload"]


@dataclass(frozen=True)
class Prediction:
    """Seconds of a prefill. flash_s: reading alone; compute_s: computing alone."""

    ttft_s: float
    wait_s: float
    flash_s: float
    compute_s: float
    bytes_read: int
    timeline: Timeline

    @property
    def bubble_rate(self) -> float:
        return self.wait_s / self.ttft_s if self.ttft_s else 0.0


def predict(
    package: Package,
    profile: DeviceProfile,
    costs: Costs | Shape,
    work: Workload,
    *,
    group: int,
    banks: int,
    lanes: int,
    prefetch: str,
    pinned: int = 0,
    paged_bytes: int = 0,
) -> Prediction:
    """Runs the machine on a virtual clock. Reading and computing slow each other down as the profile measured, in the
    share of the time in which both are busy.

    pinned: groups of every layer that are in memory already, as in the second prefill of an engine. paged_bytes: dense
    weights that are read in every prefill: the experts' reads share the flash with them."""
    pool = package.pool
    machine = Machine(pool, group=group, banks=banks, lanes=lanes, mode=prefetch, pinned=pinned)
    needed = {layer: seconds > 0 for layer, seconds in zip(pool.moe_layers, work.panel_s, strict=True)}
    if pinned:
        _fill(machine)
    kept = min(machine.homes.pinned * machine.group, pool.panels_per_layer)
    wanted = sum(int(mask[kept:].sum()) for mask in needed.values()) * pool.panel.panel_bytes
    stripe = max(1, machine.bank_bytes // lanes)
    flash_s = (wanted + paged_bytes) / profile.bytes_per_s(stripe, lanes)
    longer = max(flash_s, work.compute_s, 1e-9)
    slower = 1 + (profile.compute_slowdown - 1) * min(1.0, flash_s / longer)
    thinner = 1 + (profile.flash_slowdown - 1) * min(1.0, work.compute_s / longer)
    thinner *= 1 + paged_bytes / wanted if wanted else 1
    by_layer = dict(zip(pool.moe_layers, work.panel_s, strict=True))
    dense = dict(zip(pool.moe_layers, work.dense_s, strict=True))

    @cache  # few sizes, many reads
    def read_s(nbytes: int) -> float:
        return thinner * lanes * nbytes / profile.bytes_per_s(nbytes, lanes)

    def compute_s(load: Load) -> float:
        return slower * float(by_layer[load.layer][list(load.needed or ())].sum()) + costs.group_s

    compute: Callable[[Load], float] | Holding = compute_s
    if work.dispatches:
        compute = Holding(dict(zip(pool.moe_layers, work.dispatches, strict=True)), compute_s, slower)
    timeline = simulate(machine, needed, read_s, compute, lambda layer: slower * dense[layer])
    return Prediction(
        ttft_s=timeline.total_s + slower * work.tail_s,
        wait_s=timeline.wait_s,
        flash_s=flash_s,
        compute_s=work.compute_s,
        bytes_read=machine.counters.bytes_read + paged_bytes,
        timeline=timeline,
    )


def _fill(machine: Machine) -> None:
    """A prefill in no time, that needs everything: afterwards all pinned groups are in memory."""
    everything = np.ones(machine.layout.panels_per_layer, bool)
    simulate(machine, dict.fromkeys(machine.layout.moe_layers, everything), lambda _: 0.0, lambda _: 0.0)
