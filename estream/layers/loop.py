"""The layer loop: where flash and graphs meet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from estream.flash.resident import ResidentExperts
from estream.flash.stream import ExpertStream
from estream.layers.attention import AttentionLayers, closing_graph
from estream.layers.experts import ExpertRunner
from estream.layers.observe import Observer
from estream.layers.state import State
from estream.layers.weights import DenseWeights
from estream.models.rope import rope_tables
from estream.package.reader import Package
from estream.routing import RouteTable, Tile, split_rows
from estream.runtime.target import Target
from estream.telemetry.stats import Stopwatch


class LayerLoop:
    """All layers of a model over one prompt at a time; the hidden state goes in and comes out in `state`.

    check: called between groups; what it raises ends the prefill.
    """

    def __init__(
        self,
        target: Target,
        package: Package,
        weights: DenseWeights,
        state: State,
        check: Callable[[], None],
    ) -> None:
        self._package = package
        self._weights = weights
        self._state = state
        self._attention = AttentionLayers(target, package, weights, state)
        self._check = check
        self.runner = ExpertRunner(target, package, state)

    def run(
        self,
        tokens: int,
        experts: ExpertStream | ResidentExperts,
        watch: Stopwatch,
        observe: Observer | None = None,
    ) -> None:
        """The layer loop: attention, choice of experts, then every group of the layer as flash delivers it."""
        arch, state, runner = self._package.architecture, self._state, self.runner
        panels = self._package.pool.panels_per_expert
        cos, sin = rope_tables(arch.attention.rope, arch.attention.head_dim, np.arange(tokens))
        for plan in arch.layers:
            self._check()
            if observe:
                observe(plan.index, "input", slice(0, tokens), {"hidden": state.hidden[:tokens]})
            with watch("attention_s", f"attention {plan.index}"):
                self._attention.run(plan, tokens, cos, sin, observe)
            if observe:
                names = ("hidden", "normed", "logits") if plan.ffn == "moe" else ("hidden", "normed")
                arrays = {name: getattr(state, name)[:tokens] for name in names}
                observe(plan.index, closing_graph(plan.ffn), slice(0, tokens), arrays)
            if plan.ffn == "dense":
                with watch("dispatch_s", f"ffn {plan.index}"):
                    self._run_record(plan.index, "ffn", np.ones(tokens, np.float32), observe)
                continue
            with watch("router_s", f"router {plan.index}"):
                choice = self._package.family.route(state.logits[:tokens])
                table = RouteTable.build(choice, arch.experts)
                experts.routes(plan.index, table.needed_panels(panels))
            if arch.shared_intermediate:
                gates = choice.shared if choice.shared is not None else np.ones(tokens, np.float32)
                with watch("dispatch_s", f"shared expert {plan.index}"):
                    self._run_record(plan.index, "shared", gates, observe)
            for ready in experts.groups(plan.index):
                with watch("dispatch_s", f"layer {plan.index} group {ready.group}"):
                    for panel, buffer in ready.panels:
                        runner.bind_panel(buffer)
                        for tile in table.tiles(panel // panels, runner.rows):
                            runner.run(tile)
                            if observe:
                                observe(plan.index, "expert", tile.rows, {"y": runner.y(len(tile.rows))}, panel)
                self._check()
        if observe:
            observe(len(arch.layers), "input", slice(0, tokens), {"hidden": state.hidden[:tokens]})

    def _run_record(self, layer: int, name: str, gates: np.ndarray, observe: Observer | None) -> None:
        """Every token through every panel of a shared expert or dense FFN. gates: float32 [N]."""
        record = self._weights.layer(layer)[name]
        size = self._package.pool.panel.panel_bytes
        rows = np.arange(len(gates), dtype=np.int32)
        for offset in range(0, record.nbytes, size):
            self.runner.bind_panel(record.part(offset, size))
            for piece in split_rows(len(rows), self.runner.rows):
                self.runner.run(Tile(rows[piece], gates[piece]))
                if observe:
                    arrays = {"y": self.runner.y(piece.stop - piece.start)}
                    observe(layer, name, piece, arrays, offset // size)
