"""`pack`: a Hugging Face checkpoint becomes a packed model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from estream.errors import PackageError
from estream.models.base import ExpertSources, Family, Source, Sources
from estream.package.dense import DenseTensor, linear_name
from estream.package.files import Progress
from estream.package.layout import INTEGER_SCHEMES
from estream.package.outliers import WORTHWHILE, find_split, outlier_error
from estream.package.quantise import channel_magnitudes, check_finite, panel_bytes, to_float, to_int8
from estream.package.writer import Packing, PackResult, check_schemes, write_package

if TYPE_CHECKING:
    from estream.checkpoint import Checkpoint

_PIECE_ELEMENTS = 1 << 24  # of a float32 table read at a time: 64 MiB


def pack(
    checkpoint_path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    experts: str = "f16",
    dense: str | None = None,
    panel: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> PackResult:
    """Packs the checkpoint folder `checkpoint_path` into the packed model `out`.

    `experts` and `dense` are weight schemes (f32, f16, int8; experts also int4); `dense` defaults to `experts`, to int8
    beside int4. `panel` is the panel width Ip, by default what the NPU's on-chip memory holds. `force` replaces an
    existing package in one step.
    `progress(stage, done, total)` is called with bytes. Memory is bounded by one expert or one tensor.

    Raises:
        UsageError: an argument that cannot be meant, or `out` exists.
        CheckpointError, UnsupportedModelError: the checkpoint; NaN and infinity are named with their tensor.
        PackageError: not enough space.
    """
    from estream.checkpoint import Checkpoint

    check_schemes(experts, dense)
    with Checkpoint.open(Path(checkpoint_path)) as checkpoint:
        family = checkpoint.family()
        checkpoint.check(family)
        packing = Packing(family, experts, dense, panel, {"kind": "checkpoint"})
        copies = {path.name: path for path in checkpoint.tokenizer_files()}
        weights = CheckpointWeights(checkpoint, family, packing)
        packing.place_dense(weights.spare_panels())
        return write_package(Path(out), packing, weights, copies=copies, force=force, progress=progress)


class CheckpointWeights:
    """The packed weights of a checkpoint, read, quantised and cut into panels one after the other."""

    def __init__(self, checkpoint: Checkpoint, family: Family, packing: Packing) -> None:
        self._checkpoint, self._family, self._packing = checkpoint, family, packing
        self._model = family.model_sources(checkpoint.names)

    def experts(self) -> Iterator[np.ndarray]:
        """Every panel of the pool in order, U8 [panel_bytes]."""
        for layer in self._packing.architecture.moe_layers:
            for expert in range(self._packing.architecture.experts):
                sources = self._family.expert_sources(layer, expert)
                yield from self._record(sources, self._packing.pool.panels_per_expert)

    def dense(self) -> Iterator[tuple[str, np.ndarray]]:
        """(tensor name, piece) in file order."""
        for whole, group in groupby(self._packing.dense_tensors, lambda item: linear_name(item.name) or item.name):
            tensors = list(group)  # a matrix in column chunks with its magnitudes, or one tensor of any other kind
            owner, _, rest = whole.partition(".")
            if whole == "embed":
                yield from self._embedding(tensors[0])
            elif owner == "final_norm":
                yield self._plain(self._model[whole], tensors[0])
            elif owner == "head" and rest.endswith(".bias"):
                yield self._head_bias(int(rest.removesuffix(".bias")), tensors[0])
            elif owner == "head":
                yield from self._head_slice(int(rest), tensors)
            else:
                layer, _, name = rest.partition(".")
                if linear_name(tensors[0].name) is not None:
                    sources = self._family.layer_sources(int(layer))[name]
                    yield from self._linear(self._checkpoint.gather(sources), sources, tensors)
                else:
                    yield from self._layer_tensor(int(layer), name, tensors[0])

    def _layer_tensor(self, layer: int, name: str, tensor: DenseTensor) -> Iterator[tuple[str, np.ndarray]]:
        if tensor.panels:
            find = self._family.shared_sources if name == "shared" else self._family.ffn_sources
            expert = find(layer)
            if expert is None:
                raise PackageError(f"family {self._family.name} names no sources of {tensor.name}")
            for panel in self._record(expert, tensor.panels):
                yield tensor.name, panel
            return
        yield self._plain(self._family.layer_sources(layer)[name], tensor)

    def _embedding(self, tensor: DenseTensor) -> Iterator[tuple[str, np.ndarray]]:
        (source,) = self._model["embed"]
        rows, hidden = tensor.shape
        step = max(1, _PIECE_ELEMENTS // hidden)
        for start in range(0, rows, step):
            piece = self._checkpoint.read(narrowed(source, start, min(start + step, rows)))
            yield tensor.name, to_float(piece, tensor.dtype, source.name)

    def _head_slice(self, index: int, tensors: Sequence[DenseTensor]) -> Iterator[tuple[str, np.ndarray]]:
        """One column slice [H, Vs] of the head, the last one padded with zero columns."""
        sources = self._model["head"]
        (source,) = sources
        hidden, width = self._packing.architecture.hidden, self._packing.head_width
        vocab = self._packing.architecture.vocab
        start, stop = index * width, min((index + 1) * width, vocab)
        matrix = self._columns(source, start, stop)
        if stop - start < width:
            matrix = np.concatenate([matrix, np.zeros((hidden, width - (stop - start)), np.float32)], axis=1)
        yield from self._linear(matrix, sources, tensors)

    def _head_bias(self, index: int, tensor: DenseTensor) -> tuple[str, np.ndarray]:
        """The piece of the head's bias that belongs to a slice, padded with zeros."""
        width, sources = self._packing.head_width, self._model["head.bias"]
        piece = np.zeros(width, np.float32)
        own = self._checkpoint.gather(sources)[index * width : (index + 1) * width]
        piece[: len(own)] = own
        return tensor.name, to_float(piece, tensor.dtype, _names(sources))

    def _columns(self, source: Source, start: int, stop: int) -> np.ndarray:
        """Columns start … stop of what `source` gives, read alone where they are rows of the checkpoint tensor."""
        if source.transpose:
            return self._checkpoint.read(narrowed(source, start, stop))
        return np.ascontiguousarray(self._checkpoint.read(source)[:, start:stop])

    def _linear(
        self, matrix: np.ndarray, sources: Sources, tensors: Sequence[DenseTensor]
    ) -> Iterator[tuple[str, np.ndarray]]:
        names = _names(sources)
        *chunks, last = tensors
        if self._packing.dense == "int8":
            magnitude = channel_magnitudes(matrix, 0, names)
            matrix = to_int8(matrix, 0, magnitude)
        else:
            chunks.append(last)
            matrix = to_float(matrix, last.dtype, names)
        for tensor, piece in zip(chunks, np.split(matrix, len(chunks), axis=1), strict=True):
            yield tensor.name, np.ascontiguousarray(piece)
        if self._packing.dense == "int8":
            yield last.name, magnitude

    def _plain(self, sources: Sources, tensor: DenseTensor) -> tuple[str, np.ndarray]:
        values = self._checkpoint.gather(sources) if sources else np.zeros(tensor.shape, np.float32)
        return tensor.name, to_float(values, tensor.dtype, _names(sources))

    def _record(self, sources: ExpertSources, panels: int) -> Iterator[np.ndarray]:
        """The panels of one expert. gate and up are read panel by panel, down [I, H] whole.

        Channels that the panels have to spare take the outliers of down, where the scheme has scales."""
        layout = self._packing.panel
        names = (sources.gate.name, sources.up.name, sources.down.name)
        down = self._checkpoint.read(sources.down)
        channels = np.arange(len(down))
        spare = panels * layout.width - len(down)
        if spare and layout.scheme in INTEGER_SCHEMES:
            check_finite(down, sources.down.name)
            split = find_split(down, spare)
            down, channels = split.apply(down), np.concatenate([channels, split.channels])
        biases = None if sources.biases is None else [self._checkpoint.read(source) for source in sources.biases]
        for start in range(0, panels * layout.width, layout.width):
            chosen = channels[start : start + layout.width]
            gate, up = self._chosen(sources.gate, chosen), self._chosen(sources.up, chosen)
            own = None
            if biases is not None:  # down's is added once, by the first panel
                own = biases[0][chosen], biases[1][chosen], biases[2][: 0 if start else None]
            yield panel_bytes(layout, gate, up, down[start : start + layout.width], names, own)

    def _chosen(self, source: Source, channels: np.ndarray) -> np.ndarray:
        """These columns of what `source` gives, float32 [H, n]: runs of neighbours are read together."""
        if not len(channels):
            return np.zeros((self._packing.panel.hidden, 0), np.float32)
        runs = np.split(channels, np.flatnonzero(np.diff(channels) != 1) + 1)
        return np.concatenate([self._columns(source, int(run[0]), int(run[-1]) + 1) for run in runs], axis=1)

    def spare_panels(self) -> int:
        """1 if one more panel in shared and ffn records, filled with split outliers, is worth its bytes; else 0."""
        packing, arch = self._packing, self._packing.architecture
        if packing.panel.scheme not in INTEGER_SCHEMES:
            return 0
        saved = total = 0.0
        for plan in arch.layers:
            find = self._family.shared_sources if plan.ffn == "moe" else self._family.ffn_sources
            sources = find(plan.index)
            if sources is not None:
                down = self._checkpoint.read(sources.down)
                check_finite(down, sources.down.name)
                gain, error = outlier_error(down, packing.panel.width)
                saved, total = saved + gain, total + error
        return int(saved > WORTHWHILE * total)


def _names(sources: Sources) -> str:
    return " + ".join(source.name for source in sources)


def narrowed(source: Source, start: int, stop: int) -> Source:
    """`source` cut to start … stop along the first axis that its pick leaves (output columns if it transposes)."""
    pick = list(source.pick)
    slices = [(at, index) for at, index in enumerate(pick) if isinstance(index, slice)]
    axis, here = slices[0] if slices else (len(pick), slice(None))
    part = range(*here.indices(source.shape[axis]))[start:stop]
    pick[axis : axis + 1] = [slice(part.start, part.stop, part.step)]
    return replace(source, pick=tuple(pick))
