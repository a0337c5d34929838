"""`npumoe`: static capacities from calibration, overflow pruned, experts in groups, cold ones on the processor.

After NPUMoE (arXiv 2604.18788); docs/strategies.md says what is simplified. On both targets a layer is planned from
its routes (tiers.py), and results are added in pool order: the same bytes however weights are paged.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from estream.errors import TargetError, UsageError
from estream.layers.experts import ExpertRunner
from estream.layers.htp.experts import Dispatcher, HtpExperts
from estream.layers.htp.graphs import Rung
from estream.layers.htp.ladder import Dispatch
from estream.layers.htp.slots import Work
from estream.layers.htp.state import HtpState
from estream.layers.observe import Observer
from estream.layers.signs import panel_preparation
from estream.layers.state import State
from estream.layers.targets import ExpertPart, RunnerOpening
from estream.opening import Options
from estream.package.reader import Package
from estream.routing import RouteTable, Tile, split_rows
from estream.runtime import open_target
from estream.runtime.target import Buffer, Graph, Target
from estream.strategies.cpu_slots import Cold, CpuSlots, Tier, taking_floats, taking_integers, taking_tiles
from estream.strategies.loads import ExpertLoads
from estream.strategies.npumoe_options import NpuMoeOptions
from estream.strategies.tiers import REACH, Tiers, group_tiles, prune

GROUP = 4  # experts per dispatch on cpu


def open_npumoe(opening: RunnerOpening, options: Options) -> ExpertPart:
    """The runner of the opening's target. Raises UsageError, TargetError, OSError."""
    assert options.npumoe is not None, "the strategy's own option is there"
    chosen = NpuMoeOptions.of(options.npumoe)
    loads = ExpertLoads.read(chosen.calibration, opening.package)
    tiers = Tiers.choose(loads, chosen.tiers, chosen.capacity_quantile, chosen.cold_below)
    if isinstance(opening.state, HtpState):
        return StaticHtpExperts(opening, opening.state, tiers, chosen, options.threads)
    assert isinstance(opening.state, State)
    return StaticCpuExperts(opening, opening.state, tiers, chosen)


class StaticExperts(HtpExperts):
    """What both targets share. A rung per static graph, the last one of cold experts.

    `_shapes`, by tier: (rung, rows of a tile, tiles of an expert), set in `begin`.
    """

    def __init__(
        self,
        target: Target,
        rungs: Sequence[Rung],
        package: Package,
        state: HtpState | State,
        more: Sequence[Dispatcher],
        tiers: Tiers,
        chosen: NpuMoeOptions,
        cold_rows: int,
    ) -> None:
        super().__init__(target, rungs, package.pool, state, more)
        self._tiers, self._unlimited, self._cold_rows = tiers, chosen.unlimited, cold_rows
        self._shapes: list[tuple[int, int, int]] = []
        self._tokens = 0
        self._cold = len(self._rungs) - 1  # its rung, where experts are cold
        # Results that wait for their turn: of tiles within reach of each other.
        most = REACH * max(rung.slots for rung in self._rungs) * max(self.rows, cold_rows)
        state.nbytes += 4 * package.pool.panel.hidden * min(most, package.architecture.top_k * state.max_tokens)
        # Tiers, and what the last prefill made of them: capacities for its length, groups of tiles and those that
        # fill a dispatch, as planned; calls on the processor, pairs of a token and an expert computed there.
        self._facts: dict[str, Any] = {
            "tier_rows": list(tiers.rows),
            "tier_window": tiers.window,
            "tier_experts": tiers.hot(),
            "cold_experts": tiers.cold(),
            "cold_target": "cpu",
            "capacity": "unlimited" if chosen.unlimited else chosen.capacity_quantile,
        }
        self.configuration = self._facts

    def shapes(self, capacities: Sequence[int]) -> list[tuple[int, int, int]]:
        """By tier: (rung, rows of a tile, tiles of an expert), for so many rows."""
        raise NotImplementedError

    def begin(self, tokens: int) -> None:
        super().begin(tokens)
        self._tokens = tokens
        self._shapes = self.shapes(self._tiers.capacities(tokens))
        self._capacity = [min(rows * tiles, tokens) for _, rows, tiles in self._shapes]
        self._facts |= {"capacities": self._capacity, "groups": 0, "full_groups": 0, "cold_calls": 0, "cold_pairs": 0}
        self._queue: list[Tile] | None = None

    def admit(self, layer: int, table: RouteTable) -> RouteTable:
        """The routes that fit the capacities of their experts, the most salient: gate times norm of the row."""
        if self._unlimited:
            return table
        capacity = np.array([*self._capacity, -1])[self._tiers.of[layer]]
        norms = np.linalg.norm(self._state.normed[: self._tokens].astype(np.float32), axis=1)
        return prune(table, np.abs(table.gates) * norms[table.rows], capacity)

    def start(self, layer: int, table: RouteTable, observe: Observer | None = None) -> None:
        """Plans the layer's dispatches, and the order in which their results are added."""
        self._tier = self._tiers.of[layer]
        super().start(layer, table, observe)
        self._queue = [tile for panel in sorted(self._tiles) for _, tile in self._tiles[panel]]
        self._turn = 0
        self._early: dict[int, tuple[Work, np.ndarray]] = {}  # by id of the tile

    def dispatches(self, table: RouteTable) -> list[Dispatch]:
        """Groups of experts with tiles of one size; a cold expert's tiles one by one."""
        found = group_tiles(self._layer_tiles(table), [rung.slots for rung in self._rungs])
        cold = sum(dispatch.rung == self._cold for dispatch in found) if self._tiers.cold() else 0
        self._facts["cold_calls"] += cold
        self._facts["groups"] += len(found) - cold
        self._facts["full_groups"] += (
            sum(len(dispatch.tiles) == self._rungs[dispatch.rung].slots for dispatch in found) - cold
        )
        self._facts["cold_pairs"] += int(table.counts[self._tier < 0].sum())
        return found

    def _layer_tiles(self, table: RouteTable) -> Iterator[tuple[int, int, slice]]:
        """(panel, rung, rows of its expert) in pool order. A capacity is computed whole, and again for what exceeds it
        where nothing is pruned; an expert without tokens is not computed."""
        for expert, count in enumerate(table.counts.tolist()):
            tier = int(self._tier[expert])
            if tier < 0:
                rung, pieces = self._cold, list(split_rows(count, self._cold_rows))
            else:
                rung, rows, tiles = self._shapes[tier]
                starts = range(0, max(rows * tiles, count) if count else 0, rows)
                pieces = [slice(min(start, count), min(start + rows, count)) for start in starts]
            for panel in range(expert * self._panels_per_expert, (expert + 1) * self._panels_per_expert):
                for piece in pieces:
                    yield panel, rung, piece

    def run_record(
        self, layer: int, name: str, record: Buffer, gates: np.ndarray, observe: Observer | None = None
    ) -> None:
        """As everywhere: shared experts and dense FFNs take every token."""
        self._queue = None
        super().run_record(layer, name, record, gates, observe)

    def _add(self, results: Iterable[tuple[Work, np.ndarray]]) -> None:
        """Routed experts' in pool order: what comes too early waits."""
        if self._queue is None:
            super()._add(results)
            return
        for work, y in results:
            self._early[id(work.tile)] = work, y
        while self._turn < len(self._queue) and id(self._queue[self._turn]) in self._early:
            super()._add([self._early.pop(id(self._queue[self._turn]))])
            self._turn += 1

    def finish(self) -> None:
        """Every result was added."""
        super().finish()
        assert self._queue is None or self._turn == len(self._queue), "a result was not added"


class StaticHtpExperts(StaticExperts):
    """On htp: the ladder's graphs are the static ones, and a second target, cpu, computes cold experts."""

    def __init__(
        self, opening: RunnerOpening, state: HtpState, tiers: Tiers, chosen: NpuMoeOptions, threads: int | None
    ) -> None:
        assert opening.graphs is not None
        if chosen.group_experts is not None:
            had = ", ".join(f"{rung.slots} of {rung.rows} rows" for rung in opening.graphs.rungs)
            raise UsageError("--group-experts: on htp the compiled graphs say how many experts share a call", had=had)
        more: list[Dispatcher] = []
        rows = 1
        if tiers.cold():
            cpu = open_target("cpu", threads=threads)
            opening.cleanup.callback(cpu.close)
            rows, panel = cpu.max_rows, opening.package.pool.panel
            graph = cpu.load(opening.package.graph(cpu.graphs, "expert"))
            integers = "x_scale" in graph.inputs
            quantise = cpu.load(opening.package.graph(cpu.graphs, "quantise")) if integers else None
            take = taking_floats(state) if quantise is None else taking_tiles(cpu, quantise, state, rows)
            ring = CpuSlots(cpu, graph, 1, panel, rows, take)
            prepare = panel_preparation(cpu, panel)
            own = None if prepare is None else cpu.allocate(panel.panel_bytes, "panel of a cold expert")
            more.append(Cold(ring, state, own, prepare))
            state.nbytes += ring.nbytes + (own.nbytes if own is not None else 0)
        package = opening.package
        super().__init__(opening.target, opening.graphs.rungs, package, state, more, tiers, chosen, rows)
        self._facts["group_experts"] = [slots for slots, _ in self._ladder]

    def shapes(self, capacities: Sequence[int]) -> list[tuple[int, int, int]]:
        """Of the ladder's sizes the one that pads a capacity least; of equals the largest."""

        def whole(capacity: int, rung: int) -> int:
            return -(-capacity // self._ladder[rung][1]) * self._ladder[rung][1]

        found = []
        for capacity in capacities:
            rung = min(range(len(self._ladder)), key=lambda rung: (whole(capacity, rung), rung))
            rows = self._ladder[rung][1]
            found.append((rung, rows, whole(capacity, rung) // rows))
        return found


class StaticCpuExperts(StaticExperts):
    """On cpu: a graph of several experts with weights bound when it is called, run with each tier's rows; cold experts
    have the same processor, without padding and one by one."""

    def __init__(self, opening: RunnerOpening, state: State, tiers: Tiers, chosen: NpuMoeOptions) -> None:
        target, package = opening.target, opening.package
        slots = chosen.group_experts or GROUP
        panel, rows = package.pool.panel, target.max_rows
        single = target.load(package.graph(target.graphs, "expert"))
        grouped = single if slots == 1 else _grouped(target, package, slots)
        take = taking_floats(state) if state.rows8 is None else taking_integers(state)
        rings = CpuSlots(target, grouped, slots, panel, rows, take), CpuSlots(target, single, 1, panel, rows, take)
        self._least = rings[0].least_rows
        self._static = [Tier(*rings) for _ in tiers.rows]
        more: list[Dispatcher] = [*self._static, Cold(rings[1], state)]
        super().__init__(target, (), package, state, more, tiers, chosen, rows)
        self.rows = rows
        self._dense = ExpertRunner(target, package, state)
        state.nbytes += sum(ring.nbytes for ring in rings)
        self._facts["group_experts"] = slots

    def begin(self, tokens: int) -> None:
        super().begin(tokens)
        self._dense.begin(tokens)
        for tier, (_, rows, _) in zip(self._static, self._shapes, strict=True):
            tier.rows = rows

    def shapes(self, capacities: Sequence[int]) -> list[tuple[int, int, int]]:
        """A graph of its own for each tier, in the fewest even tiles that a dispatch takes."""
        found = []
        for tier, capacity in enumerate(capacities):
            tiles = -(-capacity // self._cold_rows)
            found.append((tier, max(-(-capacity // tiles), self._least), tiles))
        return found

    def start(self, layer: int, table: RouteTable, observe: Observer | None = None) -> None:
        """Rows for integer products are quantised once per layer."""
        self._dense.start(layer, table, observe)
        super().start(layer, table, observe)

    def run_record(
        self, layer: int, name: str, record: Buffer, gates: np.ndarray, observe: Observer | None = None
    ) -> None:
        """As everywhere, by the target's own runner."""
        before = self._dense.rows_computed, self._dense.rows_useful
        self._dense.run_record(layer, name, record, gates, observe)
        self.rows_computed += self._dense.rows_computed - before[0]
        self.rows_useful += self._dense.rows_useful - before[1]


def _grouped(target: Target, package: Package, slots: int) -> Graph:
    """The package's expert graph `slots` times in one. Raises TargetError where that cannot be built."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "qnn_graphs")):
        raise TargetError(
            "--strategy npumoe builds a graph of several experts for cpu, which this machine cannot",
            had="no onnx",
            next_step="Give --group-experts 1, or run it on a workstation: pip install onnx",
        )
    import onnx

    from qnn_graphs.grouped import group

    with tempfile.TemporaryDirectory(prefix="estream-experts-") as folder:
        path = Path(folder, f"expert.x{slots}.onnx")
        onnx.save(group(onnx.load(package.graph(target.graphs, "expert")), slots), path)
        return target.load(path)
