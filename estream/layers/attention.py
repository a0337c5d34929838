"""The dense half of a layer: norm, projections, attention or convolution, output projection, norm, router logits.
Block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from estream.layers.observe import Observer
from estream.layers.state import State
from estream.layers.weights import DenseWeights, bind_weights
from estream.models.base import LayerPlan
from estream.models.rope import Tables
from estream.package.reader import Package
from estream.routing import split_rows
from estream.runtime.target import Graph, Target

# Fills the block buffer `attn` from `hidden`: (position of the block in its prompt, its rows, who observes).
Mixer = Callable[[int, slice, Observer | None], None]


class AttentionLayers:
    """Runs any layer's attention or convolution over the state: hidden is updated, normed and router logits are
    filled."""

    def __init__(self, target: Target, package: Package, weights: DenseWeights, state: State) -> None:
        arch = package.architecture
        self._weights = weights
        self._state = state

        def load(name: str) -> Graph:
            return target.load(package.graph(target.graphs, name))

        self._qkv = load("qkv")
        self._conv = load("conv") if arch.conv_kernel else None
        windows = {plan.window for plan in arch.layers if plan.mixer == "attention"}
        self._attention = {window: load(attention_graph(window)) for window in windows}
        self._closing = {ffn: load(closing_graph(ffn)) for ffn in {plan.ffn for plan in arch.layers}}

    def settle(self) -> None:
        """Nothing to do: weights are looked up whenever they are bound."""

    def run(
        self,
        plan: LayerPlan,
        prompts: Sequence[slice],
        tables: Sequence[Tables],
        observe: Observer | None = None,
    ) -> None:
        """`prompts`: rows of each prompt of the pass; none sees another's. `tables`: the rotary tables of each.

        Raises NumericError when the layer's input or output is not finite.
        """
        weights = self._weights.layer(plan.index)
        for graph in (*self._mixers(plan), self._closing[plan.ffn]):
            bind_weights(graph, weights)
        for prompt, (cos, sin) in zip(prompts, tables, strict=True):
            self._run_prompt(plan, prompt, cos, sin, observe)

    def _mixers(self, plan: LayerPlan) -> tuple[Graph, ...]:
        """The graphs before the closing one; the attention core takes weights, too: sinks."""
        if plan.mixer == "conv" and self._conv is not None:
            return (self._conv,)
        return self._qkv, self._attention[plan.window]

    def _run_prompt(
        self, plan: LayerPlan, prompt: slice, cos: np.ndarray, sin: np.ndarray, observe: Observer | None
    ) -> None:
        state, tokens = self._state, prompt.stop - prompt.start
        closing, where = self._closing[plan.ffn], f"layer {plan.index}"
        mix = self._start_conv(plan) if plan.mixer == "conv" else self._start_attention(plan, tokens, cos, sin)
        for block in split_rows(tokens, state.block):
            position, rows = block.start, block.stop - block.start
            start = prompt.start + position
            state.load(state.hidden, "hidden", start, rows)
            state.check_finite("hidden", start, rows, f"{where}, hidden state before attention")
            mix(position, slice(start, start + rows), observe)
            self._bind(closing, rows, attn="attn", hidden="hidden", hidden_out="hidden", normed="normed")
            if plan.ffn == "moe":
                self._bind(closing, rows, logits="logits")
            closing.run()
            state.check_finite("normed", start, rows, f"{where}, hidden state after attention")
            state.store("hidden", state.hidden, start, rows)
            state.store("normed", state.normed, start, rows)
            if plan.ffn == "moe":
                state.check_finite("logits", start, rows, f"{where}, router logits")
                state.store("logits", state.logits, start, rows)

    def _start_attention(self, plan: LayerPlan, tokens: int, cos: np.ndarray, sin: np.ndarray) -> Mixer:
        """A prompt of `tokens` tokens starts."""
        state, attention = self._state, self._attention[plan.window]
        for name, buffer in (("past_key", state.keys), ("past_value", state.values)):
            attention.bind(name, buffer, rows=tokens)
            attention.bind(name.replace("past", "present"), buffer, rows=tokens)
        attention.bind("last", state.last)
        attention.bind("total", state.total)

        def mix(position: int, piece: slice, observe: Observer | None) -> None:
            rows = piece.stop - piece.start
            state.load(cos, "cos", position, rows)
            state.load(sin, "sin", position, rows)
            self._bind(self._qkv, rows, hidden="hidden", cos="cos", sin="sin", q_out="q", k_out="k", v_out="v")
            self._qkv.run()
            if observe:
                observe(plan.index, "qkv", piece, {name: state.view(name, rows) for name in "qkv"})
            state.set_keys(position + rows)
            self._bind(attention, rows, q_in="q", k_in="k", v_in="v", attn="attn")
            attention.run()
            if observe:
                observe(plan.index, "attention", piece, {"attn": state.view("attn", rows)})

        return mix

    def _start_conv(self, plan: LayerPlan) -> Mixer:
        """A prompt starts: what the block before left is forgotten, and from then on carried from block to block."""
        state, conv = self._state, self._conv
        assert conv is not None and state.past is not None, "the architecture has a convolution's taps"
        state.forget()
        conv.bind("past", state.past)
        conv.bind("past_out", state.past)

        def mix(position: int, piece: slice, observe: Observer | None) -> None:
            rows = piece.stop - piece.start
            self._bind(conv, rows, hidden="hidden", attn="attn")
            conv.run()
            if observe:
                observe(plan.index, "conv", piece, {"attn": state.view("attn", rows)})

        return mix

    def _bind(self, graph: Graph, rows: int, **names: str) -> None:
        for tensor, block in names.items():
            graph.bind(tensor, self._state.blocks[block], rows=rows)


def attention_graph(window: int | None) -> str:
    """Name of the attention graph for a window."""
    return "attention" if window is None else f"attention.w{window}"


def closing_graph(ffn: str) -> str:
    """Name of the graph that ends a layer's dense half: with router logits where experts follow."""
    return "o_router" if ffn == "moe" else "o_norm"
