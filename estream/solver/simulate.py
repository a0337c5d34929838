"""A prompt on a phone that is not at hand: solver and flash machine on a virtual clock, in a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from estream.errors import UsageError
from estream.layers.htp.ladder import Ladder
from estream.package.reader import Package
from estream.solver.npu import NpuCosts
from estream.solver.phone import Phone
from estream.solver.search import Plan, solve


@dataclass(frozen=True)
class Strategy:
    """What a way of prefilling decides; None: left to the solver. group: the unit of reading is one expert, or a whole
    layer, two of them in the arena. padded: every expert computes as many rows as the prompt has."""

    prefetch: str | None = None
    group: Literal["expert", "layer"] | None = None
    resident: bool = False
    padded: bool = False


STRATEGIES = {
    "estream": Strategy(),
    "on-demand": Strategy(prefetch="on-demand", group="expert"),
    "layer-streaming": Strategy(prefetch="before-routing", group="layer"),
    "padded": Strategy(prefetch="before-routing", padded=True),
    "resident": Strategy(resident=True),
}


def simulate_prefill(
    package: Package,
    phone: Phone,
    tokens: int,
    counts: Sequence[np.ndarray],
    ladder: Ladder,
    *,
    memory: int | None = None,
    strategy: str = "estream",
    prefetch: str | None = None,
) -> Plan:
    """What `solve` says of a phone. counts: rows per expert of each MoE layer. ladder: (slots, rows) of the expert
    graphs, largest rows first. prefetch: the only mode that is tried.

    Raises UsageError for an unknown strategy or one that excludes `prefetch`, MemoryBudgetError as `solve`.
    """
    if strategy not in STRATEGIES:
        raise UsageError("unknown strategy", asked=strategy, had=", ".join(STRATEGIES))
    way, pool = STRATEGIES[strategy], package.pool
    if prefetch is not None and (way.resident or way.prefetch not in (None, prefetch)):
        raise UsageError(
            f"--strategy {strategy} and --prefetch {prefetch} exclude each other",
            had=f"{strategy} has no prefetch" if way.resident else f"prefetch is {way.prefetch}",
            next_step="Leave one of the two out",
        )
    if way.padded:
        counts = [np.full(len(layer), tokens) for layer in counts]
    sizes = {"expert": pool.panels_per_expert, "layer": pool.panels_per_layer}
    return solve(
        package,
        phone.profile,
        tokens,
        memory=memory,
        counts=counts,
        costs=NpuCosts(phone, ladder),
        group=sizes[way.group] if way.group else None,
        banks=2 if way.group == "layer" else None,
        prefetch=way.prefetch or prefetch,
        resident="all" if way.resident else "none",
    )
