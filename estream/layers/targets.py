"""What of a prefill differs between targets, and which target gets which: the layer loop sees these contracts only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from estream.flash.states import ReadyGroup
from estream.layers.attention import AttentionLayers
from estream.layers.experts import ExpertRunner
from estream.layers.head import Head, LogitsSink
from estream.layers.htp.attention import HtpAttention
from estream.layers.htp.experts import HtpExperts
from estream.layers.htp.graphs import HtpGraphs
from estream.layers.htp.head import HtpHead
from estream.layers.htp.state import HtpState
from estream.layers.observe import Observer
from estream.layers.state import State
from estream.layers.weights import DenseWeights
from estream.models.base import LayerPlan
from estream.models.rope import Tables
from estream.package.layout import INTEGER_GRAPHS, INTEGER_SCHEMES
from estream.package.reader import Package
from estream.routing import RouteTable
from estream.runtime.target import Buffer, Target


class PrefillState(Protocol):
    """hidden float32 [max_tokens, H], normed [max_tokens, H] (float32, float16 on htp), logits float32
    [max_tokens, R]. block: rows of a pass. nbytes: reserved. scratch_bytes: what attention needs beside it."""

    hidden: np.ndarray
    normed: np.ndarray
    logits: np.ndarray
    block: int
    nbytes: int
    scratch_bytes: int
    bytes_copied: int


class AttentionPart(Protocol):
    """A layer's dense half: hidden is updated, normed and logits are filled."""

    def settle(self) -> None:
        """Once, before the first run: the weights have their places (`DenseWeights.settle`)."""

    def run(
        self,
        plan: LayerPlan,
        prompts: Sequence[slice],
        tables: Sequence[Tables],
        observe: Observer | None = None,
    ) -> None: ...


class ExpertPart(Protocol):
    """hidden[rows] += expert(normed[rows]) · gates, in the order of experts, panels, tiles.

    A layer is `start`, `run_group` for each of its groups in pool order, `finish`. The part releases a group after the
    last dispatch that used it has returned: in that group's `run_group`, a later one's, `flush` or `finish`.
    """

    rows: int  # of the largest tile
    rows_computed: int
    rows_useful: int
    configuration: Mapping[str, object]  # what of the runner results and reports carry

    def begin(self, tokens: int) -> None: ...

    def admit(self, layer: int, table: RouteTable) -> RouteTable:
        """Which of a layer's routes are computed, before any is: an exact runner gives `table` back. What is missing
        from the answer counts as dropped."""

    def needed(self, table: RouteTable) -> np.ndarray:
        """bool [panels per layer]: the panels that an admitted table's layer computes; flash brings no others."""

    def start(self, layer: int, table: RouteTable, observe: Observer | None = None) -> None: ...

    def run_group(self, ready: ReadyGroup) -> None: ...

    def flush(self) -> None:
        """Dispatches what waits until a group is released: flash has no bank for the next one."""

    def finish(self) -> None:
        """Dispatches all that waits: every group is released, every result added."""

    def run_record(
        self, layer: int, name: str, record: Buffer, gates: np.ndarray, observe: Observer | None = None
    ) -> None: ...


class HeadPart(Protocol):
    """Final norm and logits of chosen rows."""

    def settle(self) -> None:
        """As an AttentionPart's."""

    def normalise(self, first: int, last: int) -> None: ...

    def run(self, wanted: Sequence[tuple[slice, LogitsSink]]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """configuration: what of the target results and reports carry."""

    state: PrefillState
    attention: AttentionPart
    runner: ExpertPart
    head: HeadPart
    configuration: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class RunnerOpening:
    """What an expert runner is opened from. graphs: of target htp, else None. cleanup: where a runner leaves what it
    must release; after an error, too."""

    target: Target
    package: Package
    state: PrefillState
    graphs: HtpGraphs | None
    cleanup: ExitStack


def open_runner(opening: RunnerOpening) -> ExpertPart:
    """The target's own runner: call-time weights, tiles of the rows that were routed."""
    if isinstance(opening.state, HtpState):
        assert opening.graphs is not None
        return HtpExperts(opening.target, opening.graphs.rungs, opening.package.pool, opening.state)
    assert isinstance(opening.state, State)
    return ExpertRunner(opening.target, opening.package, opening.state)


def open_parts(
    target: Target,
    package: Package,
    weights: DenseWeights,
    max_tokens: int,
    graphs: HtpGraphs | None,
    cleanup: ExitStack,
    runner: Callable[[RunnerOpening], ExpertPart] = open_runner,
) -> Parts:
    """Loads the package's graphs, but for target htp, whose `graphs` are loaded; `settle` of attention and head is left
    to do. `runner`: opens what computes experts, a strategy's own. Raises EStreamError."""
    if graphs is None:
        integers = package.pool.panel.scheme in INTEGER_SCHEMES and target.graphs in INTEGER_GRAPHS
        state = State(target, package.architecture, max_tokens, integers=integers)
        attention = AttentionLayers(target, package, weights, state)
        experts = runner(RunnerOpening(target, package, state, None, cleanup))
        return Parts(state, attention, experts, Head(target, package, weights, state))
    contexts = graphs.contexts
    half = HtpState(target, package.architecture, graphs, weights, max_tokens)
    return Parts(
        half,
        HtpAttention(graphs, package, weights, half),
        runner(RunnerOpening(target, package, half, graphs, cleanup)),
        HtpHead(graphs, package, weights, half),
        {
            "soc": contexts.soc,
            "simulated": contexts.simulated,
            "shared_memory": getattr(target, "shared", False),
            "ladder": graphs.ladder,
            "qairt": contexts.qairt,
        },
    )
