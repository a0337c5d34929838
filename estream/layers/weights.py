"""Dense weights in target memory: read and prepared once when the engine opens, bound by address afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from estream.flash.checks import check_bytes
from estream.flash.pool import PoolFile
from estream.flash.ranges import load_ranges
from estream.layers.signs import flip_signs, panel_preparation
from estream.package.layout import WEIGHT_DTYPE, align
from estream.package.reader import DenseTensor, Package
from estream.runtime.target import Buffer, Graph, Target

Weights = Mapping[str, Buffer]


class DenseWeights:
    """Everything of dense.safetensors but the embedding, one allocation per layer and one for the model's ends.

    `layer(i)` and `head(s)` map graph input names to buffers; `nbytes` is what they hold together. `verify`: compare
    what was read with the package's CRC-32s; raises FlashError naming the tensor. int8 matrices are as the target takes
    them (`signs`), also in records.
    """

    def __init__(
        self, target: Target, package: Package, *, direct: bool = True, lanes: int = 2, verify: bool = False
    ) -> None:
        self.nbytes = 0
        self._pieces = tuple(package.dense_pieces()) if verify else ()
        self._signed = target.signed
        self._prepare_panel = panel_preparation(target, package.pool.panel)
        file = PoolFile.open(package.dense_file, direct=direct)
        try:
            by_owner: dict[str, list[DenseTensor]] = {}
            for tensor in package.dense.values():
                owner, _ = _split(tensor.name)
                if owner != "embed":
                    by_owner.setdefault(owner, []).append(tensor)
            self._owners = {
                owner: self._load(target, file, owner, tensors, lanes) for owner, tensors in by_owner.items()
            }
        finally:
            file.close()

    def layer(self, index: int) -> Weights:
        return self._owners[f"layers.{index}"]

    def head(self, index: int) -> Weights:
        return self._owners[f"head.{index}"]

    @property
    def final(self) -> Weights:
        return self._owners["final_norm"]

    def _load(
        self, target: Target, file: PoolFile, owner: str, tensors: Iterable[DenseTensor], lanes: int
    ) -> dict[str, Buffer]:
        """One buffer and one contiguous aligned read per owner: its tensors follow each other in the file."""
        ordered = sorted(tensors, key=lambda tensor: tensor.offset)
        start = ordered[0].offset
        nbytes = align(ordered[-1].offset + ordered[-1].nbytes - start)
        buffer = target.allocate(nbytes, f"dense weights of {owner}")
        load_ranges(file, [(buffer, start)], lanes=lanes)
        for label, offset, size, crc in self._pieces:
            if start <= offset < start + nbytes:
                check_bytes(f"{file.path}: {label}", buffer.part(offset - start, size).memory(), crc)
        for tensor in ordered:
            self._prepare(tensor, buffer.part(tensor.offset - start, align(tensor.nbytes)).memory())
        self.nbytes += nbytes
        return {_split(tensor.name)[1]: buffer.part(tensor.offset - start, tensor.nbytes) for tensor in ordered}

    def _prepare(self, tensor: DenseTensor, memory: memoryview) -> None:
        if tensor.panels:
            size = tensor.nbytes // tensor.panels
            if self._prepare_panel is not None:
                for at in range(0, tensor.nbytes, size):
                    self._prepare_panel(memory[at : at + size])
        elif tensor.dtype == WEIGHT_DTYPE["int8"] and self._signed:
            flip_signs(memory)


def _split(name: str) -> tuple[str, str]:
    """(owner, graph input name): layers.3.q.1 → (layers.3, q.1); head.2.scale → (head.2, head.scale)."""
    parts = name.split(".")
    if parts[0] == "layers":
        return ".".join(parts[:2]), ".".join(parts[2:])
    if parts[0] == "head":
        return ".".join(parts[:2]), ".".join(["head", *parts[2:]])
    return parts[0], name


def bind_weights(graph: Graph, weights: Weights) -> None:
    """Binds every weight that the graph takes."""
    for name in graph.inputs:
        if name in weights:
            graph.bind(name, weights[name])
