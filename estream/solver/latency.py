"""How long a prefill takes in a configuration: the flash machine itself, on a virtual clock, with a profile's times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estream.flash.machine import Machine
from estream.flash.states import Load
from estream.flash.virtual import Timeline, simulate
from estream.package.reader import Package
from estream.routing import split_rows
from estream.solver.profile import DeviceProfile, Shape


@dataclass(frozen=True)
class Workload:
    """A prompt of `tokens` on a package: seconds of compute, none of them waiting.

    dense_s: of what comes before each MoE layer's groups (its attention, router and shared expert, and dense layers
    before it). panel_s: per MoE layer, of each panel's tiles, float64 [panels]; 0 for panels without tokens. tail_s:
    after the last group.
    """

    tokens: int
    dense_s: tuple[float, ...]
    panel_s: tuple[np.ndarray, ...]
    tail_s: float

    @property
    def compute_s(self) -> float:
        return sum(self.dense_s) + sum(float(seconds.sum()) for seconds in self.panel_s) + self.tail_s


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


def workload(package: Package, shape: Shape, tokens: int, counts: Sequence[np.ndarray], max_rows: int) -> Workload:
    """counts: rows per expert of each MoE layer. max_rows: of a tile. Target cpu: one dispatch per tile."""
    arch, pool = package.architecture, package.pool

    def panel_s(rows: int) -> float:
        return sum(shape.panel_s(piece.stop - piece.start) for piece in split_rows(rows, max_rows))

    def record_s(panels: int) -> float:
        return panels * panel_s(tokens)

    dense, waiting = [], 0.0
    for plan in arch.layers:
        waiting += shape.dense_s(tokens)
        if plan.ffn == "dense":
            waiting += record_s(package.ffn_panels)
        else:
            dense.append(waiting + record_s(package.shared_panels if arch.shared_intermediate else 0))
            waiting = 0.0
    per_panel = tuple(
        np.repeat([panel_s(int(rows)) for rows in layer], pool.panels_per_expert) * 1.0 for layer in counts
    )
    return Workload(tokens, tuple(dense), per_panel, waiting + package.head_slices * shape.head_slice_s)


def predict(
    package: Package,
    profile: DeviceProfile,
    shape: Shape,
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

    def read_s(nbytes: int) -> float:
        return thinner * lanes * nbytes / profile.bytes_per_s(nbytes, lanes)

    def compute_s(load: Load) -> float:
        return slower * float(by_layer[load.layer][list(load.needed or ())].sum()) + shape.group_s

    timeline = simulate(machine, needed, read_s, compute_s, lambda layer: slower * dense[layer])
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
