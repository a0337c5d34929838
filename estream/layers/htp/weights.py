"""Dense weights as the HTP graphs take them: matrices where they lie, vectors and routers in float16."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from estream.errors import PackageError
from estream.package.layout import align
from estream.runtime.target import Buffer, Graph, Target, TensorInfo

_ALIGN = 128


@dataclass(frozen=True)
class Bindings:
    """What a graph takes of a layer's weights: buffers by input name."""

    graph: Graph
    buffers: Mapping[str, Buffer]

    def bind(self) -> None:
        for name, buffer in self.buffers.items():
            self.graph.bind(name, buffer)


class HalfWeights:
    """Finds the inputs of HTP graphs among a layer's weights, and keeps float16 copies of what is stored in float32."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._copies: dict[int, Buffer] = {}  # by address of the float32 original
        self._factors: dict[int, float] = {}  # by address of a router's copy
        self.nbytes = 0

    def factor(self, router: Buffer) -> float:
        """What a router's weights, and so its logits, were multiplied by: a power of two."""
        return self._factors.get(router.address, 1.0)

    def bindings(self, graph: Graph, weights: Mapping[str, Buffer], names: Iterable[str], where: str) -> Bindings:
        """names: graph inputs that are weights, as `input` or `input=name in the package`; chunks of `name` count.

        Raises PackageError naming a weight that is missing or has another size than the graph takes.
        """
        renamed = dict((pair.split("=") * 2)[:2] for pair in names)
        buffers: dict[str, Buffer] = {}
        for name, info in graph.inputs.items():
            base, _, number = name.rpartition(".")
            base, chunk = (base, int(number)) if number.isdigit() else (name, None)
            if base in renamed:
                key = renamed[base]
                chunks = (
                    sum(re.fullmatch(rf"{re.escape(base)}\.\d+", other) is not None for other in graph.inputs)
                    if chunk is not None
                    else 1
                )
                buffers[name] = self._find(weights, key, chunk, chunks, info, where)
        return Bindings(graph, buffers)

    def _find(
        self, weights: Mapping[str, Buffer], key: str, chunk: int | None, chunks: int, info: TensorInfo, where: str
    ) -> Buffer:
        count = math.prod(int(size) for size in info.shape)
        nbytes = count * info.dtype.itemsize
        if key == "router" and key in weights and weights[key].nbytes == 2 * count:
            return self._router(weights[key], f"{where}, {key}")
        own = weights.get(key if chunk is None else f"{key}.{chunk}")
        if own is not None and own.nbytes == nbytes:
            return own
        whole = weights.get(key)
        if whole is not None and info.dtype == np.float16:
            if whole.nbytes == 4 * count * chunks:
                whole = self._half(whole, f"{where}, {key}")
            # Chunks of a vector are parts of it; those of a matrix are tensors of their own.
            if whole.nbytes == nbytes * chunks and (chunks == 1 or info.shape[0] == 1):
                return whole.part((chunk or 0) * nbytes, nbytes)
        had = own if own is not None else whole
        raise PackageError(
            f"{where}: weight {key if chunk is None else f'{key}.{chunk}'}",
            asked=f"{info.dtype}{list(info.shape)} for the NPU",
            had="nothing" if had is None else f"{had.nbytes} bytes",
            next_step="Pack the checkpoint again with --experts f16, int8 or int4",
        )

    def _half(self, whole: Buffer, what: str) -> Buffer:
        count = whole.nbytes // 4
        return self._copy(whole, whole.array(np.float32, (count,)), what)

    def _router(self, whole: Buffer, what: str) -> Buffer:
        """float16 [2H, R]: a router's weights, and below them what rounding took away. They are brought near 1/4: where
        weights are small, float16 has few bits for them and for their logits."""
        exact = whole.array(np.float32, (whole.nbytes // 4,))
        _, exponent = np.frexp(np.abs(exact).max(initial=0.0))
        factor = float(np.ldexp(1.0, -2 - int(exponent))) if exact.any() else 1.0
        scaled = exact * np.float32(factor)
        rounded = scaled.astype(np.float16).astype(np.float32)
        copy = self._copy(whole, np.concatenate([rounded, scaled - rounded]), what)
        self._factors[copy.address] = factor
        return copy

    def _copy(self, whole: Buffer, exact: np.ndarray, what: str) -> Buffer:
        """Values in float16, once per original. Raises PackageError where they do not fit."""
        if whole.address not in self._copies:
            copy = self._target.allocate(align(2 * exact.size, _ALIGN), f"float16 {what}").part(0, 2 * exact.size)
            with np.errstate(over="ignore"):
                values = exact.astype(np.float16)
            if not np.isfinite(values).all():
                raise PackageError(f"{what} does not fit float16", next_step="Use --backend cpu")
            copy.array(np.float16, (exact.size,))[...] = values
            self._copies[whole.address] = copy
            self.nbytes += copy.nbytes
        return self._copies[whole.address]
