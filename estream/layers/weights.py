"""Dense weights in target memory: vectors for good, matrices and records for good or page by page, ahead of use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from estream.flash.checks import check_bytes
from estream.flash.pages import Page, Pages
from estream.flash.pool import PoolFile
from estream.flash.ranges import load_ranges
from estream.layers.signs import flip_signs, panel_preparation
from estream.package.dense import linear_name
from estream.package.layout import WEIGHT_DTYPE, align
from estream.package.reader import DenseTensor, Package, Piece
from estream.runtime.target import Buffer, Graph, Target
from estream.telemetry.trace import Trace

Weights = Mapping[str, Buffer]
SLOTS = 2  # one layer is computed while the next is read


class DenseWeights:
    """Everything of dense.safetensors but the embedding: `layer(i)` and `head(s)` map graph input names to buffers.

    Opened with its vectors and routers, which stay in memory. `settle` decides where matrices and records go: all of
    them in memory, or each layer's and each head slice's in one of two slots when its turn comes. Buffers are known
    from then on. Between `begin` and `end`, `enter_layer` or `enter_head` comes before any use of them, in order.

    resident_bytes, paged_bytes: what `settle` takes. nbytes: what is held. `verify`: compare what is read with the
    package's CRC-32s; raises FlashError naming the tensor. int8 matrices are as the target takes them (`signs`), also
    in records.
    """

    def __init__(
        self, target: Target, package: Package, *, direct: bool = True, lanes: int = 2, verify: bool = False
    ) -> None:
        self._target, self._lanes = target, lanes
        self._layers = len(package.architecture.layers)
        self._heads = package.head_slices
        self._pieces: dict[str, list[Piece]] = {}  # by tensor; empty: nothing is verified
        for piece in package.dense_pieces() if verify else ():
            self._pieces.setdefault(piece[0].partition(" ")[0], []).append(piece)  # `layers.3.ffn panel 1`
        self._signed = target.signed
        self._prepare_panel = panel_preparation(target, package.pool.panel)
        self._pages: Pages | None = None
        self._small: dict[str, dict[str, Buffer]] = {}
        self._large: dict[str, list[DenseTensor]] = {}  # in file order
        self._owners: dict[str, Weights] = {}
        small: list[DenseTensor] = []
        for tensor in package.dense.values():
            owner, _ = _split(tensor.name)
            if owner != "embed":
                self._small.setdefault(owner, {})
                (self._large.setdefault(owner, []) if _is_large(tensor) else small).append(tensor)
        _, self.resident_bytes, self.paged_bytes = dense_bytes(package)
        self._file = PoolFile.open(package.dense_file, direct=direct)
        try:
            self._load_small(small)
        except BaseException:
            self._file.close()
            raise

    def settle(self, paged: bool, trace: Trace | None = None) -> None:
        """Once: reads the matrices and records, or makes their slots. Raises FlashError, TargetError."""
        places: dict[str, Buffer] = {}
        if paged:
            slots = [self._target.allocate(self.paged_bytes // SLOTS, f"dense slot {slot}") for slot in range(SLOTS)]
            order = [f"layers.{index}" for index in range(self._layers)]
            order += [f"head.{index}" for index in range(self._heads)]
            pages = [Page(owner, _ranges(self._large[owner]), partial(self._finish, owner)) for owner in order]
            places = {owner: slots[number % SLOTS] for number, owner in enumerate(order)}
            self._pages = Pages(self._file, pages, slots, trace=trace)
            self.nbytes += self.paged_bytes
        else:
            for owner, tensors in self._large.items():
                places[owner] = self._target.allocate(_span(tensors), f"dense weights of {owner}")
            load_ranges(
                self._file,
                [
                    (places[owner].part(at, nbytes), offset)
                    for owner, tensors in self._large.items()
                    for at, offset, nbytes in _ranges(tensors)
                ],
                lanes=self._lanes,
            )
            self._file.close()
            for owner, place in places.items():
                self._finish(owner, place.memory())
            self.nbytes += self.resident_bytes
        for owner, small in self._small.items():
            tensors = self._large.get(owner, [])
            large = {
                _split(tensor.name)[1]: places[owner].part(tensor.offset - tensors[0].offset, tensor.nbytes)
                for tensor in tensors
            }
            self._owners[owner] = {**small, **large}

    def layer(self, index: int) -> Weights:
        return self._owners[f"layers.{index}"]

    def head(self, index: int) -> Weights:
        return self._owners[f"head.{index}"]

    def vectors(self, owner: str) -> Weights:
        """What stays in memory of `layers.{i}`, `head.{s}` or `final_norm`; known before `settle`."""
        return self._small[owner]

    def expert_bias(self, layer: int) -> np.ndarray | None:
        """What `Family.route` takes as bias, float32 [E]; None where the layer has none."""
        bias = self._small[f"layers.{layer}"].get("expert_bias")
        return None if bias is None else bias.array(np.float32, (bias.nbytes // 4,))

    def begin(self, head: bool) -> None:
        """A prefill starts: all layers in order, then all head slices if `head`. Raises FlashError."""
        if self._pages is not None:
            self._pages.begin(self._layers + (self._heads if head else 0))

    def enter_layer(self, index: int) -> None:
        """The layer's weights are in their buffers until the next `enter`. Raises FlashError."""
        if self._pages is not None:
            self._pages.enter(index)

    def enter_head(self, index: int) -> None:
        """As `enter_layer`, for a slice of the head."""
        if self._pages is not None:
            self._pages.enter(self._layers + index)

    def end(self) -> None:
        """The prefill is complete. Raises FlashError if layers or slices are left."""
        if self._pages is not None:
            self._pages.end()

    def abort(self) -> None:
        """Gives the prefill up from any state."""
        if self._pages is not None:
            self._pages.abort()

    @property
    def bytes_read(self) -> int:
        """In the running or the last prefill."""
        return 0 if self._pages is None else self._pages.bytes_read

    @property
    def staged_bytes(self) -> int:
        """Copied because target memory takes no direct reads, since the engine opened."""
        return self._file.staged_bytes

    @property
    def wait_s(self) -> float:
        """Seconds in which the compute waited for a page, in the running or the last prefill."""
        return 0.0 if self._pages is None else self._pages.wait_s

    def close(self) -> None:
        """Ends reading. Twice is harmless; the memory is the target's."""
        if self._pages is not None:
            self._pages.close()
        self._file.close()

    def _load_small(self, tensors: Iterable[DenseTensor]) -> None:
        ordered = list(tensors)
        sizes = [align(tensor.nbytes) for tensor in ordered]
        self.nbytes = sum(sizes)
        whole = self._target.allocate(self.nbytes, "dense vectors")
        parts = [whole.part(sum(sizes[:number]), size) for number, size in enumerate(sizes)]
        load_ranges(
            self._file,
            [(part, tensor.offset) for part, tensor in zip(parts, ordered, strict=True)],
            lanes=self._lanes,
        )
        for part, tensor in zip(parts, ordered, strict=True):
            self._check(part.memory(), tensor.offset, tensor)
            owner, name = _split(tensor.name)
            self._small[owner][name] = part.part(0, tensor.nbytes)

    def _finish(self, owner: str, memory: memoryview) -> None:
        """Verifies and prepares an owner's matrices and records, in memory that starts with the first of them."""
        tensors = self._large[owner]
        for tensor in tensors:
            self._check(memory, tensors[0].offset, tensor)
            start = tensor.offset - tensors[0].offset
            self._prepare(tensor, memory[start : start + align(tensor.nbytes)])

    def _check(self, memory: memoryview, start: int, tensor: DenseTensor) -> None:
        """`memory` holds the file from offset `start`."""
        for label, offset, size, crc in self._pieces.get(tensor.name, ()):
            check_bytes(f"{self._file.path}: {label}", memory[offset - start :][:size], crc)

    def _prepare(self, tensor: DenseTensor, memory: memoryview) -> None:
        if tensor.panels:
            size = tensor.nbytes // tensor.panels
            if self._prepare_panel is not None:
                for at in range(0, tensor.nbytes, size):
                    self._prepare_panel(memory[at : at + size])
        elif tensor.dtype == WEIGHT_DTYPE["int8"] and self._signed:
            flip_signs(memory)


def dense_bytes(package: Package) -> tuple[int, int, int]:
    """Bytes of target memory of what always stays, and of matrices and records when resident and when paged."""
    vectors, owners = 0, dict[str, list[DenseTensor]]()
    for tensor in package.dense.values():
        owner, _ = _split(tensor.name)
        if owner != "embed" and _is_large(tensor):
            owners.setdefault(owner, []).append(tensor)
        elif owner != "embed":
            vectors += align(tensor.nbytes)
    spans = [_span(tensors) for tensors in owners.values()]
    return vectors, sum(spans), SLOTS * max(spans)


def _is_large(tensor: DenseTensor) -> bool:
    """Matrices and records. Vectors and routers, which the NPU's targets copy as float16 when they open, stay."""
    return tensor.panels > 0 or (linear_name(tensor.name) is not None and not tensor.name.endswith(".scale"))


def _span(tensors: list[DenseTensor]) -> int:
    """Bytes from the first to the last of an owner's matrices and records, with the vectors' places between them."""
    return align(tensors[-1].offset + tensors[-1].nbytes - tensors[0].offset)


def _ranges(tensors: list[DenseTensor]) -> tuple[tuple[int, int, int], ...]:
    """(offset from the first tensor, offset in the file, bytes) of each run of tensors without others between them."""
    runs: list[tuple[int, int, int]] = []
    for tensor in tensors:
        size = align(tensor.nbytes)
        if runs and sum(runs[-1][1:]) == tensor.offset:
            at, offset, nbytes = runs.pop()
            runs.append((at, offset, nbytes + size))
        else:
            runs.append((tensor.offset - tensors[0].offset, tensor.offset, size))
    return tuple(runs)


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
