"""A prompt on a phone that is not at hand: solver and flash machine on a virtual clock, in a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from estream.errors import UsageError
from estream.layers.htp.ladder import Ladder
from estream.package.reader import Package
from estream.solver.npu import NpuCosts
from estream.solver.phone import Phone
from estream.solver.search import Plan, solve
from estream.strategies import find_strategy

# Of `estream.strategies`: those that pages, tiles and dispatches tell apart. cpu-only is no phone's NPU; expert graphs
# of a model that a phone runs are beyond its contexts; what npumoe drops depends on the routing of real text.
SIMULATED = ("estream", "on-demand", "layer-streaming", "padded", "resident")


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
    if strategy not in SIMULATED:
        raise UsageError("unknown strategy, or one that is not simulated", asked=strategy, had=", ".join(SIMULATED))
    chosen = find_strategy(strategy)
    values: dict[str, Any] = chosen.resolve({} if prefetch is None else {"prefetch": prefetch}, package.pool)
    if strategy == "padded":
        counts = [np.full(len(layer), tokens) for layer in counts]
    return solve(
        package,
        phone.profile,
        tokens,
        memory=memory,
        counts=counts,
        costs=NpuCosts(phone, ladder),
        **{name: values[name] for name in ("group", "banks", "resident") if name in values},
        prefetch=values.get("prefetch", prefetch),
        strategy=strategy if chosen.own_budget else None,
    )
