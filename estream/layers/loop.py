"""The layer loop: where flash and graphs meet. The same for every target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from estream.flash.stream import ExpertStream
from estream.flash.whole_layers import WholeLayers
from estream.layers.attention import closing_graph
from estream.layers.observe import Observer
from estream.layers.targets import Parts
from estream.layers.weights import DenseWeights
from estream.models.rope import prompt_tables
from estream.package.reader import Package
from estream.routing import RouteTable
from estream.telemetry.stats import Stopwatch


class LayerLoop:
    """All layers of a model over one prompt at a time; the hidden state goes in and comes out in `parts.state`.

    check: called between groups; what it raises ends the prefill. progress: called with ("prefill", done, layers).
    routed, dropped: pairs of a token and an expert in the running or the last prefill, and those not computed.
    """

    def __init__(
        self,
        package: Package,
        weights: DenseWeights,
        parts: Parts,
        check: Callable[[], None],
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._progress = progress
        self._package = package
        self._weights = weights
        self._parts = parts
        self._check = check
        self.routed = self.dropped = 0

    def run(
        self,
        prompts: Sequence[slice],
        experts: ExpertStream | WholeLayers,
        watch: Stopwatch,
        observe: Observer | None = None,
    ) -> None:
        """The layer loop: attention, choice of experts, then every group of the layer as flash delivers it.

        `prompts`: rows of each prompt of the pass, one after the other; each record is read once for all of them.
        """
        tokens = prompts[-1].stop
        arch, state, runner = self._package.architecture, self._parts.state, self._parts.runner
        self.routed = self.dropped = 0
        lengths = [prompt.stop - prompt.start for prompt in prompts]
        tables = prompt_tables(arch.attention.rope, arch.attention.rotated, lengths)
        for done, plan in enumerate(arch.layers):
            self._check()
            if self._progress is not None:
                self._progress("prefill", done, len(arch.layers))
            self._weights.enter_layer(plan.index)
            records = self._weights.layer(plan.index)
            if observe:
                observe(plan.index, "input", slice(0, tokens), {"hidden": state.hidden[:tokens]})
            with watch("attention_s", f"attention {plan.index}"):
                self._parts.attention.run(plan, prompts, tables, observe)
            if observe:
                names = ("hidden", "normed", "logits") if plan.ffn == "moe" else ("hidden", "normed")
                arrays = {name: getattr(state, name)[:tokens] for name in names}
                observe(plan.index, closing_graph(plan.ffn), slice(0, tokens), arrays)
            if plan.ffn == "dense":
                with watch("dispatch_s", f"ffn {plan.index}"):
                    runner.run_record(plan.index, "ffn", records["ffn"], np.ones(tokens, np.float32), observe)
                continue
            with watch("router_s", f"router {plan.index}"):
                bias = self._weights.expert_bias(plan.index)
                choice = self._package.family.route(state.logits[:tokens], bias)
                routes = RouteTable.build(choice, arch.experts)
                table = runner.admit(plan.index, routes)
                self.routed += len(routes.rows)
                self.dropped += len(routes.rows) - len(table.rows)
                experts.routes(plan.index, runner.needed(table))
            if arch.shared_intermediate:
                gates = choice.shared if choice.shared is not None else np.ones(tokens, np.float32)
                with watch("dispatch_s", f"shared expert {plan.index}"):
                    runner.run_record(plan.index, "shared", records["shared"], gates, observe)
            runner.start(plan.index, table, observe)
            for ready in experts.groups(plan.index, self._flush(watch)):
                with watch("dispatch_s", f"layer {plan.index} group {ready.group}"):
                    runner.run_group(ready)
                self._check()
            with watch("dispatch_s", f"layer {plan.index}, what waited"):
                runner.finish()
        if observe:
            observe(len(arch.layers), "input", slice(0, tokens), {"hidden": state.hidden[:tokens]})

    def _flush(self, watch: Stopwatch) -> Callable[[], None]:
        """What flash calls when it has no bank left to fill."""

        def starved() -> None:
            with watch("dispatch_s", "what waited, for a bank"):
                self._parts.runner.flush()

        return starved
