"""Activations of one prefill on htp: float32 hidden state on the host, float16 blocks at the graphs' borders."""

from __future__ import annotations

import numpy as np

from estream.layers.htp.graphs import HtpGraphs, numbered
from estream.layers.htp.weights import Bindings, HalfWeights
from estream.layers.state import check_finite
from estream.layers.weights import DenseWeights
from estream.models.base import Architecture
from estream.runtime.target import Buffer, Graph, Target, TensorInfo
from estream.runtime.tiles import half_rows

_NO_ROUTER = "no router"


class HtpState:
    """hidden float32 [max_tokens, H]; normed float16 [max_tokens, H], what experts gather; logits float32
    [max_tokens, R]; one buffer per tensor of the dense graphs. Memory that a short prompt does not touch is reserved,
    not committed.
    """

    scratch_bytes = 0  # the graphs' own memory is the NPU's

    def __init__(
        self, target: Target, arch: Architecture, graphs: HtpGraphs, weights: DenseWeights, max_tokens: int
    ) -> None:
        self.arch = arch
        self.max_tokens = max_tokens
        self.block = graphs.rows
        self.bytes_copied = self.nbytes = 0
        self.half = HalfWeights(target)
        self._target = target
        self._graph = graphs.norm
        shape = (max_tokens, arch.hidden)
        self.hidden = self.allocate("hidden", 4 * max_tokens * arch.hidden).array(np.float32, shape)
        self.normed = self.allocate("normed", 2 * max_tokens * arch.hidden).array(np.float16, shape)
        self.logits = np.zeros((max_tokens, max(arch.router_width, 1)), np.float32)
        self._rows = self.bound(graphs.norm, "hidden")
        self.block_normed = self.bound(graphs.norm, "normed")
        self._logits = self.bound(graphs.norm, "logits")
        self._logit_factor = np.float32(1)  # of the last norm's router
        self._rest = self.bound(graphs.norm, "rest")
        self._no_router = self.allocate("no router", nbytes(graphs.norm.inputs["router"]))

    def allocate(self, label: str, size: int) -> Buffer:
        """Target memory that counts as the state's. Raises TargetError."""
        self.nbytes += size
        return self._target.allocate(size, label)

    def bound(self, graph: Graph, name: str) -> Tensor:
        """A buffer for an input or output of a graph, bound for good."""
        info = graph.inputs.get(name) or graph.outputs[name]
        tensor = Tensor(self.allocate(f"{graph.name} {name}", nbytes(info)), info)
        graph.bind(name, tensor.buffer)
        return tensor

    def norm_weights(self, weights: dict[str, Buffer], norm: str, where: str) -> Bindings:
        """Of the norm graph: a norm's weight, and the router where `weights` has one."""
        names = [f"norm={norm}", "router" if "router" in weights else f"router={_NO_ROUTER}"]
        return self.half.bindings(self._graph, {**weights, _NO_ROUTER: self._no_router}, names, where)

    def norm(self, weights: Bindings, start: int, rows: int, where: str) -> np.ndarray:
        """Norms of hidden rows, float16 [rows, H], left in `block_normed`; rows of the block beyond them are zero.

        Raises NumericError where the hidden state or its norm is not finite.
        """
        hidden = self.hidden[start : start + rows]
        check_finite(hidden, start, where)
        values, _ = half_rows(hidden)
        self._rows.array[:rows] = values
        self._rows.array[rows:] = 0
        weights.bind()
        self._logit_factor = np.float32(self.half.factor(weights.buffers["router"]))
        self._graph.run()
        normed = self.block_normed.array[:rows]
        check_finite(normed, start, where)
        self.bytes_copied += values.nbytes
        return normed

    def keep(self, start: int, rows: int, where: str | None = None) -> None:
        """Copies the last norm's rows to `normed` and, with `where`, their router logits to `logits`."""
        self.normed[start : start + rows] = self.block_normed.array[:rows]
        self.bytes_copied += 2 * rows * self.arch.hidden
        if where is not None:
            check_finite(self._logits.array[:rows], start, where)
            exact = self._logits.array[:rows].astype(np.float32) + self._rest.array[:rows]
            self.logits[start : start + rows] = exact / self._logit_factor


class Tensor:
    """A buffer, and a numpy view of it in the tensor's dtype and shape."""

    __slots__ = ("array", "buffer")

    def __init__(self, buffer: Buffer, info: TensorInfo) -> None:
        self.buffer = buffer
        self.array = buffer.array(info.dtype, tuple(int(size) for size in info.shape))


def tensors(state: HtpState, graph: Graph, name: str) -> list[Tensor]:
    """Buffers of the chunks or head groups of a tensor, bound for good."""
    return [state.bound(graph, key) for key in numbered({**graph.inputs, **graph.outputs}, name)]


def nbytes(info: TensorInfo) -> int:
    """Bytes of a tensor with a static shape."""
    return int(np.prod([int(size) for size in info.shape], dtype=np.int64)) * info.dtype.itemsize
