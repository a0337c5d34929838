"""Activations of one prefill on htp: float32 hidden state on the host, float16 blocks at the graphs' borders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from estream.layers.htp.graphs import HtpGraphs, numbered
from estream.layers.htp.weights import Bindings, HalfWeights
from estream.layers.state import check_finite
from estream.layers.weights import DenseWeights
from estream.models.base import Architecture
from estream.routing import split_rows
from estream.runtime.target import Buffer, Graph, Target, TensorInfo
from estream.runtime.tiles import half_rows

_NO_ROUTER = "no router"
_LEAST_REST = 1e-12  # stands in for the root mean square of a rest of zeros


class HtpState:
    """hidden float32 [max_tokens, H]; normed float16 [max_tokens, H], what experts gather; logits float32
    [max_tokens, R]; one buffer per tensor of the dense graphs. Memory that a short prompt does not touch is reserved,
    not committed.
    """

    def __init__(
        self, target: Target, arch: Architecture, graphs: HtpGraphs, weights: DenseWeights, max_tokens: int
    ) -> None:
        self.arch = arch
        self.max_tokens = max_tokens
        self.block = graphs.rows
        self.bytes_copied = self.nbytes = self.scratch_bytes = 0  # the graphs' own memory is the NPU's
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

    def allocate_pieces(self, label: str, sizes: Sequence[int]) -> list[Buffer]:
        """As the target's, counted as the state's."""
        self.nbytes += sum(sizes)
        return self._target.allocate_pieces(sizes, label)

    def bound(self, graph: Graph, name: str) -> Tensor:
        """A buffer for an input or output of a graph, bound for good."""
        info = graph.inputs.get(name) or graph.outputs[name]
        tensor = Tensor(self.allocate(f"{graph.name} {name}", nbytes(info)), info)
        graph.bind(name, tensor.buffer)
        return tensor

    def norm_weights(self, weights: dict[str, Buffer], norm: str, where: str) -> Bindings:
        """Of the norm graph: a norm's weight and bias, and the router where `weights` has one."""
        names = [f"norm={norm}", f"norm.bias={norm}.bias", "router" if "router" in weights else f"router={_NO_ROUTER}"]
        return self.half.bindings(self._graph, {**weights, _NO_ROUTER: self._no_router}, names, where)

    def norm(self, weights: Bindings, start: int, rows: int, where: str) -> np.ndarray:
        """Norms of hidden rows, float16 [rows, H], left in `block_normed`; rows of the block beyond them are zero.

        Raises NumericError where the hidden state or its norm is not finite.
        """
        hidden = self.hidden[start : start + rows]
        check_finite(hidden, start, where)
        values, _ = half_rows(hidden)
        self._run_norm(weights, values)
        normed = self.block_normed.array[:rows]
        check_finite(normed, start, where)
        return normed

    def keep(self, start: int, rows: int, where: str | None = None) -> None:
        """Copies the last norm's rows to `normed` and, with `where`, their router logits to `logits`."""
        self.normed[start : start + rows] = self.block_normed.array[:rows]
        self.bytes_copied += 2 * rows * self.arch.hidden
        if where is not None:
            check_finite(self._logits.array[:rows], start, where)
            self.logits[start : start + rows] = self._block_logits(rows)

    def refine(self, weights: Bindings, own: Mapping[str, Buffer], rows: np.ndarray) -> None:
        """Adds to the router logits of `rows` what rounding kept from `normed`: the same graph on the rest.

        weights: of the norm that `normed` came from. own: the layer's float32 vectors, ffn_norm and its bias among
        them, and its router. The rest of a row is brought to a mean square of 1, at which the graph's own norm does
        next to nothing, and its logits are scaled back. A layer norm takes the mean from the rest and adds its bias:
        what that does to the logits is undone. What remains of the error of float16 is its square.
        """
        arch = self.arch
        norm = weights.buffers["norm"].array(np.float16, (arch.hidden,)).astype(np.float32)
        inverse = np.divide(1, norm, out=np.zeros_like(norm), where=norm != 0)
        centred = arch.norm == "layer"
        if centred:
            router = own["router"].array(np.float32, (arch.hidden, arch.router_width))
            bias = weights.buffers["norm.bias"].array(np.float16, (arch.hidden,)).astype(np.float32)
            of_mean, of_bias = norm @ router, bias @ router
        for piece in split_rows(len(rows), self.block):
            block = rows[piece]
            rest = (self._exact_norm(self.hidden[block], own) - self.normed[block]) * inverse
            if centred:
                mean = rest.mean(axis=1, keepdims=True)
                rest -= mean
            scale = np.maximum(_root_mean_square(rest, 0.0), np.float32(_LEAST_REST))
            values = (rest / scale).astype(np.float16)
            self._run_norm(weights, values)
            logits = self._block_logits(len(block))
            taken = values.astype(np.float32)
            if centred:
                taken -= taken.mean(axis=1, keepdims=True)
                logits -= of_bias
                self.logits[block] += mean * of_mean
            self.logits[block] += scale * _root_mean_square(taken, arch.norm_eps) * logits

    def _exact_norm(self, hidden: np.ndarray, own: Mapping[str, Buffer]) -> np.ndarray:
        """float32 [rows, H] of a layer's second norm."""
        centred = self.arch.norm == "layer"
        values = hidden - hidden.mean(axis=1, keepdims=True) if centred else hidden.copy()
        values /= _root_mean_square(values, self.arch.norm_eps)
        values *= own["ffn_norm"].array(np.float32, (self.arch.hidden,))
        if centred:
            values += own["ffn_norm.bias"].array(np.float32, (self.arch.hidden,))
        return values

    def _run_norm(self, weights: Bindings, values: np.ndarray) -> None:
        """values: float16, at most a block of rows."""
        self._rows.array[: len(values)] = values
        self._rows.array[len(values) :] = 0
        weights.bind()
        self._logit_factor = np.float32(self.half.factor(weights.buffers["router"]))
        self._graph.run()
        self.bytes_copied += values.nbytes

    def _block_logits(self, rows: int) -> np.ndarray:
        """Of the last norm's rows, float32 [rows, R]."""
        return (self._logits.array[:rows].astype(np.float32) + self._rest.array[:rows]) / self._logit_factor


def _root_mean_square(values: np.ndarray, epsilon: float) -> np.ndarray:
    """float32 [rows, 1]."""
    square = np.einsum("ij,ij->i", values, values)[:, None] / np.float32(values.shape[1])
    return np.asarray(np.sqrt(square + np.float32(epsilon)))


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
