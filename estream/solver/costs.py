"""What computing costs on a target, as the predictor needs it: seconds of a prompt's pieces of work, and bytes held.

One predictor (latency.py) and one search (search.py) serve every target; a target's cost model is what differs: `cpu`
from measured times of tiles (here), `htp` from a phone's rates and the plan of dispatches (npu.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from estream.layers.state import State
from estream.layers.weights import dense_bytes
from estream.package.layout import INTEGER_SCHEMES
from estream.package.reader import Package
from estream.routing import split_rows
from estream.runtime.mock import MockTarget
from estream.solver.automatic import held_bytes
from estream.solver.holding import Planned
from estream.solver.profile import Shape

MAX_ROWS = 512  # of a tile on target cpu


@dataclass(frozen=True)
class Workload:
    """A prompt of `tokens` on a package: seconds of compute, none of them waiting.

    dense_s: of what comes before each MoE layer's groups (its attention, router and shared expert, and dense layers
    before it). panel_s: per MoE layer, of each panel's tiles, float64 [panels]; 0 for panels without tokens. tail_s:
    after the last group. fixed_s: of all of it, what dispatches of experts take whatever their rows. dispatches: per
    MoE layer, those that tiles of several panels wait for, beside panel_s; none: a panel's tiles run when it comes.
    """

    tokens: int
    dense_s: tuple[float, ...]
    panel_s: tuple[np.ndarray, ...]
    tail_s: float
    fixed_s: float = 0.0
    dispatches: tuple[tuple[Planned, ...], ...] = ()

    @property
    def compute_s(self) -> float:
        dispatches = sum(planned.seconds for layer in self.dispatches for planned in layer)
        return sum(self.dense_s) + sum(float(seconds.sum()) for seconds in self.panel_s) + dispatches + self.tail_s

    def faster(self, times: float) -> Workload:
        """The same work in a fraction of the time."""
        return Workload(
            self.tokens,
            tuple(seconds / times for seconds in self.dense_s),
            tuple(seconds / times for seconds in self.panel_s),
            self.tail_s / times,
            self.fixed_s / times,
            tuple(tuple(Planned(one.seconds / times, one.panels) for one in layer) for layer in self.dispatches),
        )


class Costs(Protocol):
    """A cost model. group_s: what a group costs beside its dispatches."""

    @property
    def group_s(self) -> float: ...

    def workload(self, package: Package, tokens: int, counts: Sequence[np.ndarray]) -> Workload:
        """counts: rows per expert of each MoE layer, int64 [E]."""
        ...

    def held(self, package: Package, base_bytes: int, tokens: int) -> int:
        """Bytes of the process beside the arena and the matrices and records of dense weights."""
        ...


@dataclass(frozen=True)
class CpuCosts:
    """Target cpu: one dispatch per tile, with times that `calibrate` measured."""

    shape: Shape

    @property
    def group_s(self) -> float:
        return self.shape.group_s

    def workload(self, package: Package, tokens: int, counts: Sequence[np.ndarray]) -> Workload:
        return workload(package, self.shape, tokens, counts, MAX_ROWS)

    def held(self, package: Package, base_bytes: int, tokens: int) -> int:
        integers = package.pool.panel.scheme in INTEGER_SCHEMES
        state = State(MockTarget(), package.architecture, tokens, integers=integers)  # reserves, does not touch
        vectors, _, _ = dense_bytes(package)
        return held_bytes(base_bytes + vectors, state.nbytes, state.scratch_bytes, package.architecture, tokens)


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
    dispatches = sum(int(np.count_nonzero(seconds)) for seconds in per_panel)
    return Workload(
        tokens,
        tuple(dense),
        per_panel,
        waiting + package.head_slices * shape.head_slice_s,
        dispatches * (shape.panel[0][1] + shape.group_s),
    )
