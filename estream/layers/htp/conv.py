"""The short convolution in the place of attention on htp: one call per block, the rows before it kept on the host."""

from __future__ import annotations

from collections.abc import Mapping

from estream.errors import TargetError
from estream.layers.htp.graphs import HtpGraphs
from estream.layers.htp.state import HtpState, Tensor, tensors
from estream.layers.htp.weights import Bindings
from estream.package.chunks import CONV_LINEARS
from estream.runtime.target import Buffer

_WEIGHTS = (*(f"{name}{part}" for name in CONV_LINEARS for part in ("", ".scale", ".bias")), "conv", "conv.bias")


class HtpConv:
    """attn: what the graph fills, head group by head group."""

    def __init__(self, graphs: HtpGraphs, state: HtpState, attn: list[Tensor]) -> None:
        """Raises TargetError: the contexts hold no convolution."""
        if graphs.conv is None:
            raise TargetError("the contexts hold no graph conv", next_step="Compile again")
        self._graph, self._state = graphs.conv, state
        self._graph.bind("normed", state.block_normed.buffer)
        for group, tensor in enumerate(attn):
            self._graph.bind(f"attn.{group}", tensor.buffer)
        self._past, self._past_out = (tensors(state, self._graph, name) for name in ("past", "past_out"))

    def bindings(self, weights: Mapping[str, Buffer], where: str) -> Bindings:
        """Of a layer's weights."""
        return self._state.half.bindings(self._graph, weights, _WEIGHTS, where)

    def start(self) -> None:
        """A prompt starts: nothing comes before it."""
        for tensor in self._past:
            tensor.array[...] = 0

    def run(self) -> None:
        """From the normed rows of a block; the next block begins where this one ends."""
        self._graph.run()
        for before, after in zip(self._past, self._past_out, strict=True):
            before.array[...] = after.array
