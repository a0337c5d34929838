"""The dense half of a layer on htp, in blocks of T rows: norm, qkv and attention or conv, o, norm with the router."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from estream.layers.htp.conv import HtpConv
from estream.layers.htp.graphs import HtpGraphs
from estream.layers.htp.masks import MASKED, Masks
from estream.layers.htp.state import HtpState, Tensor, nbytes, tensors
from estream.layers.htp.weights import Bindings
from estream.layers.observe import Observer
from estream.layers.weights import DenseWeights
from estream.models.base import LayerPlan
from estream.models.rope import Tables
from estream.package.chunks import head_groups
from estream.package.reader import Package
from estream.runtime.target import Buffer

_STATE = ("max", "sum", "attn")
_QKV = tuple(
    f"{name}{part}" for name in ("q_a", "q", "kv_a", "k_rope", "k", "v") for part in ("", ".scale", ".bias", "_norm")
)


class HtpAttention:
    """Runs any layer's attention over the state. Keys and values stay in the blocks that the qkv graph wrote."""

    def __init__(self, graphs: HtpGraphs, package: Package, weights: DenseWeights, state: HtpState) -> None:
        arch = package.architecture
        self._graphs, self._state, self._rows = graphs, state, graphs.rows
        self._groups = head_groups(arch.attention)
        self._weights, self._plans, self._family = weights, arch.layers, package.family
        self._norms = [self._norm_bindings(plan) for plan in arch.layers]
        self._matrices: list[tuple[Bindings, Bindings]] = []
        self._masks = Masks(state.allocate, graphs.rows, {plan.window for plan in arch.layers})
        graphs.qkv.bind("normed", state.block_normed.buffer)
        self._cos, self._sin = state.bound(graphs.qkv, "cos"), state.bound(graphs.qkv, "sin")
        self._q = tensors(state, graphs.qkv, "q_out")
        blocks = -(-state.max_tokens // graphs.rows)
        self._k, self._v = (self._cache(name, blocks) for name in ("k_out", "v_out"))
        self._attn, self._delta = tensors(state, graphs.o, "attn"), tensors(state, graphs.o, "delta")
        self._conv = HtpConv(graphs, state, self._attn) if arch.conv_kernel else None
        core = graphs.attention
        self._start = {name: Tensor(self._scratch(name, "start"), core.inputs[name]) for name in _STATE}
        self._start["max"].array[...] = MASKED
        # A sink is a first key without a value: its score is where the running maximum starts, and the sum is 1.
        self._sinks: list[Tensor] = []
        if arch.attention.sinks:
            self._start["sum"].array[...] = 1
            names = [f"sinks {group}" for group in range(self._groups.groups)]
            self._sinks = [Tensor(self._scratch("max", name), core.inputs["max"]) for name in names]
        self._between = [{name: self._scratch(name, f"pass {turn}") for name in _STATE} for turn in (0, 1)]

    def settle(self) -> None:
        """The weights have their places."""
        self._matrices = [self._matrix_bindings(plan) for plan in self._plans]

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
        mixer, o = self._matrices[plan.index]
        mixer.bind()
        o.bind()
        self._set_sinks(plan)
        for prompt, (cos, sin) in zip(prompts, tables, strict=True):
            self._run_prompt(plan, prompt, cos, sin, observe)
        if plan.ffn == "moe":
            bias = self._weights.expert_bias(plan.index)
            rows = self._family.undecided(self._state.logits[: prompts[-1].stop], bias)
            own = self._weights.vectors(f"layers.{plan.index}")
            self._state.refine(self._norms[plan.index][1], own, rows)

    def _run_prompt(
        self, plan: LayerPlan, prompt: slice, cos: np.ndarray, sin: np.ndarray, observe: Observer | None
    ) -> None:
        state, where, tokens = self._state, f"layer {plan.index}", prompt.stop - prompt.start
        before, after = self._norms[plan.index]
        conv = self._conv if plan.mixer == "conv" else None
        if conv is not None:
            conv.start()
        for block in range(-(-tokens // self._rows)):
            position, rows = block * self._rows, min(self._rows, tokens - block * self._rows)
            start = prompt.start + position
            piece, rotated = slice(start, start + rows), slice(position, position + rows)
            state.norm(before, start, rows, f"{where}, hidden state before attention")
            if conv is None:
                self._run_attention(plan, block, piece, (cos[rotated], sin[rotated]), observe)
            else:
                conv.run()
            if observe:
                seen = {"attn": self._tokens_first(self._attn, rows)}
                observe(plan.index, "attention" if conv is None else "conv", piece, seen)
            self._graphs.o.run()
            self._add_delta(start, rows)
            state.norm(after, start, rows, f"{where}, hidden state after attention")
            state.keep(start, rows, f"{where}, router logits" if plan.ffn == "moe" else None)

    def _run_attention(
        self, plan: LayerPlan, block: int, piece: slice, tables: Tables, observe: Observer | None
    ) -> None:
        """tables: cos, sin of the rows of the piece."""
        rows = piece.stop - piece.start
        for table, part in zip((self._cos, self._sin), tables, strict=True):
            table.array[:rows] = part
        for name, cache in (("k_out", self._k), ("v_out", self._v)):
            for group, tensor in enumerate(cache[block]):
                self._graphs.qkv.bind(f"{name}.{group}", tensor.buffer)
        self._graphs.qkv.run()
        if observe:
            observe(plan.index, "qkv", piece, self._seen_qkv(block, rows))
        self._attend(plan.window, block)

    def _set_sinks(self, plan: LayerPlan) -> None:
        """The layer's sinks, to every row of their heads."""
        if not self._sinks:
            return
        heads = self._groups.heads
        own = self._weights.vectors(f"layers.{plan.index}")["sinks"].array(np.float32, (heads * len(self._sinks),))
        for group, tensor in enumerate(self._sinks):
            folded = own[group * heads : (group + 1) * heads].reshape(self._groups.kv_heads, -1)
            tensor.array[...] = np.repeat(folded, self._rows, axis=1)[..., None]

    def _attend(self, window: int | None, block: int) -> None:
        """All head groups of a query block over the key blocks that it sees, in ascending order, `steps` per call."""
        core, steps, first = self._graphs.attention, self._graphs.steps, self._masks.first(window, block)
        calls = range(first, block + 1, steps)
        for group, q in enumerate(self._q):
            core.bind("q", q.buffer)
            shared = group // self._groups.sharing
            state = {name: tensor.buffer for name, tensor in self._start.items()}
            if self._sinks:
                state["max"] = self._sinks[group].buffer
            for turn, call in enumerate(calls):
                for step in range(steps):
                    key = min(call + step, block)  # beyond the diagonal: any keys, all masked
                    core.bind(f"k.{step}", self._k[key][shared].buffer)
                    core.bind(f"v.{step}", self._v[key][shared].buffer)
                    live = call + step <= block
                    core.bind(f"mask.{step}", self._masks.of(window, block - key) if live else self._masks.nothing)
                after = dict(self._between[turn % 2])
                if call == calls[-1]:
                    after["attn"] = self._attn[group].buffer
                for name in _STATE:
                    core.bind(name, state[name])
                    core.bind(f"{name}_out", after[name])
                core.run()
                state = after

    def _add_delta(self, start: int, rows: int) -> None:
        column = 0
        for piece in self._delta:
            width = piece.array.shape[1]
            self._state.hidden[start : start + rows, column : column + width] += piece.array[:rows]
            column += width

    def _norm_bindings(self, plan: LayerPlan) -> tuple[Bindings, Bindings]:
        """Weights of the norms before and after attention, the latter with the router."""
        state, own, where = self._state, dict(self._weights.vectors(f"layers.{plan.index}")), f"layer {plan.index}"
        return (
            state.norm_weights({name: own[name] for name in own if name != "router"}, "attn_norm", where),
            state.norm_weights(own, "ffn_norm", where),
        )

    def _matrix_bindings(self, plan: LayerPlan) -> tuple[Bindings, Bindings]:
        """Weights of qkv or conv, and of o."""
        half, own, where = self._state.half, self._weights.layer(plan.index), f"layer {plan.index}"
        if plan.mixer == "conv" and self._conv is not None:
            mixer = self._conv.bindings(own, where)
        else:
            mixer = half.bindings(self._graphs.qkv, own, _QKV, where)
        return mixer, half.bindings(self._graphs.o, own, ("o", "o.scale", "o.bias"), where)

    def _cache(self, name: str, blocks: int) -> list[list[Tensor]]:
        """Keys or values of all blocks: a block's KV groups adjoin, blocks may lie in several mappings."""
        infos = [self._graphs.qkv.outputs[f"{name}.{group}"] for group in range(self._groups.kv_groups)]
        size = nbytes(infos[0])
        made = self._state.allocate_pieces(f"cache {name}", [size * len(infos)] * blocks)
        return [[Tensor(block.part(i * size, size), info) for i, info in enumerate(infos)] for block in made]

    def _scratch(self, name: str, label: str) -> Buffer:
        return self._state.allocate(f"attention {name}, {label}", nbytes(self._graphs.attention.inputs[name]))

    def _seen_qkv(self, block: int, rows: int) -> dict[str, np.ndarray]:
        """q, k, v of a block's first rows as an observer sees them, float32 [rows, width]."""
        k = np.concatenate([tensor.array for tensor in self._k[block]])  # [heads, D, T]
        v = np.concatenate([tensor.array for tensor in self._v[block]])  # [heads, T, D]
        return {
            "q": self._tokens_first(self._q, rows),
            "k": _flat(k.transpose(2, 0, 1)[:rows]),
            "v": _flat(v.transpose(1, 0, 2)[:rows]),
        }

    def _tokens_first(self, groups: list[Tensor], rows: int) -> np.ndarray:
        """Head groups [kv heads, folded · T, D] → float32 [rows, heads · D]."""
        heads = [tensor.array.reshape(-1, self._rows, tensor.array.shape[2]) for tensor in groups]
        return _flat(np.concatenate(heads).transpose(1, 0, 2)[:rows])


def _flat(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).reshape(len(values), -1)
