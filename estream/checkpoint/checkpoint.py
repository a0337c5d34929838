"""Reads tensors of a Hugging Face checkpoint, one at a time, as float32."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from estream.checkpoint import fp8, mxfp4
from estream.checkpoint.dtypes import STORED
from estream.checkpoint.files import read_json, shards, some, tokenizer_files
from estream.checkpoint.reading import copy_widened, pread, window
from estream.errors import CheckpointError, ClosedError, UnsupportedModelError, brief
from estream.models import families, family
from estream.models.base import ExpertSources, Family, LayerPlan, Source, Sources
from estream.package.safetensors_header import Entry, read_header

_BLOCK_BYTES = 4 << 20  # read and widened at a time: memory stays at the result plus a few blocks
# What quantised checkpoints add to their weights: FP8 by blocks, GPTQ, AWQ, compressed-tensors, bitsandbytes.
_SCALES = (
    ".weight_scale_inv",
    ".weight_scale",
    ".scales",
    ".qzeros",
    ".weight_packed",
    ".SCB",
    ".absmax",
    ".quant_map",
)
_ENOUGH = 1000  # missing tensors: a config of millions of experts must not keep anybody waiting


class Checkpoint:
    """An open checkpoint directory. `config` is config.json. Headers are read at once, tensors when asked for."""

    def __init__(
        self, path: Path, config: dict[str, Any], entries: dict[str, tuple[int, Entry]], fds: list[int]
    ) -> None:
        self.path = path
        self.config = config
        self._entries = entries
        self._fds = fds
        self._expert: tuple[str, int | slice, np.ndarray] | None = None  # the last one that MXFP4 gave

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Opens all shards and checks their headers. Raises CheckpointError."""
        directory = Path(path)
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "no such directory"
            raise CheckpointError(f"{directory}: {what}", next_step="Give the directory of a downloaded checkpoint")
        config = read_json(directory / "config.json")
        entries: dict[str, tuple[int, Entry]] = {}
        homes: dict[str, Path] = {}
        fds: list[int] = []
        try:
            for shard in shards(directory):
                try:
                    fds.append(os.open(shard, os.O_RDONLY | os.O_CLOEXEC))
                except OSError as problem:
                    raise CheckpointError(f"{shard}: cannot be opened: {problem.strerror}") from problem
                for name, entry in read_header(fds[-1], label=str(shard), error=CheckpointError).tensors.items():
                    if name in entries:
                        raise CheckpointError(
                            f"{directory}: tensor {brief(name)} lies in two files: {homes[name].name} and {shard.name}",
                            next_step="Remove the file that is not of this checkpoint",
                        )
                    entries[name] = (fds[-1], entry)
                    homes[name] = shard
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return cls(directory, config, entries, fds)

    def close(self) -> None:
        """Closes the files; twice is harmless."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1].shape

    def dtype(self, name: str) -> str:
        """The safetensors name of the stored dtype."""
        return self._entry(name)[1].dtype

    def tokenizer_files(self) -> list[Path]:
        return tokenizer_files(self.path)

    def family(self) -> Family:
        """The model family of config.json. Raises UnsupportedModelError or CheckpointError."""
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise CheckpointError(
                f"{self.path / 'config.json'}: has no model_type",
                had=brief(model_type),
                next_step=f"Known ones: {', '.join(families())}",
            )
        return family(model_type).from_config(self.config)

    def read(self, source: Source) -> np.ndarray:
        """The tensor as float32, picked, transposed and scaled, C-contiguous.

        Without `order`, only the picked bytes are read as long as they are one piece (indices, then at most one slice).
        Memory is the result plus a few MiB.

        Raises CheckpointError: no such tensor, another shape, not a float dtype, I/O.
        """
        if self._is_mxfp4(source.name, source.shape):
            return self._from_mxfp4(source)
        fd, entry = self._entry(source.name)
        if entry.shape != source.shape:
            raise CheckpointError(f"tensor {source.name!r}", asked=list(source.shape), had=list(entry.shape))
        if entry.dtype not in STORED:
            raise CheckpointError(
                f"tensor {source.name!r} has dtype {entry.dtype}",
                asked=", ".join(STORED),
                next_step="Use the original f32, f16 or bf16 checkpoint",
            )
        if source.order:
            return _finished(self.read(Source(source.name, source.shape))[list(source.order)], source)
        first, shape, rest = window(source)
        if entry.dtype == fp8.DTYPE:
            return self._dequantised(source, first, shape, rest)
        transpose = source.transpose and not rest
        result = np.empty(shape[::-1] if transpose else shape, np.float32)
        self._fill(fd, entry, first, np.atleast_1d(result.T if transpose else result))
        if rest:
            result = result[rest]
            result = np.ascontiguousarray(result.T if source.transpose else result)
        if source.scale != 1.0:
            result *= np.float32(source.scale)
        return result

    def _is_mxfp4(self, name: str, shape: tuple[int, ...]) -> bool:
        blocks, _ = mxfp4.part_names(name)
        return name not in self._entries and blocks in self._entries and len(shape) == 3

    def _from_mxfp4(self, source: Source) -> np.ndarray:
        """As `read`. The last expert is kept: gate, up and each panel pick from the same one."""
        expert, *rest = source.pick
        if self._expert is None or self._expert[:2] != (source.name, expert):
            parts = zip(mxfp4.part_names(source.name), mxfp4.part_shapes(source.shape), strict=True)
            words = [self._bytes(name, shape, expert) for name, shape in parts]
            self._expert = source.name, expert, mxfp4.dequantised(*words)
        return _finished(self._expert[2][tuple(rest)], source)

    def _bytes(self, name: str, shape: tuple[int, ...], index: int | slice) -> np.ndarray:
        """One of the first axis of a U8 tensor."""
        fd, entry = self._entry(name)
        if (entry.shape, entry.dtype) != (shape, "U8"):
            raise CheckpointError(
                f"tensor {name!r}", asked=f"U8 {list(shape)}", had=f"{entry.dtype} {list(entry.shape)}"
            )
        assert isinstance(index, int)
        words = np.empty(shape[1:], np.uint8)
        pread(fd, words, entry.start + index * words.nbytes, name)
        return words

    def _dequantised(
        self, source: Source, first: int, shape: tuple[int, ...], rest: tuple[int | slice, ...]
    ) -> np.ndarray:
        """As `read`, of an FP8 matrix and the window of it that `source` picks from."""
        fd, entry = self._entry(source.name)
        block = fp8.block_size(self.config)
        of_scales = fp8.scale_shape(source.name, source.shape, block)
        scales = self.read(Source(fp8.scale_name(source.name), of_scales))
        result = np.empty(shape, np.float32)
        self._fill(fd, entry, first, result)
        fp8.scaled(result, first // source.shape[1], scales, block)
        return _finished(result[rest] if rest else result, source)

    def gather(self, sources: Sources) -> np.ndarray:
        """The sources side by side along the last axis, float32, C-contiguous."""
        if len(sources) == 1:
            return self.read(sources[0])
        return np.ascontiguousarray(np.concatenate([self.read(source) for source in sources], axis=-1))

    def check(self, family: Family) -> None:
        """Every tensor that the family expects is here with its shape and a float dtype, and no other one is.

        Raises CheckpointError listing the first offenders of each kind and how many there are; UnsupportedModelError
        where they are quantised weights.
        """
        expected: dict[str, tuple[int, ...]] = {}
        missing: list[str] = []
        quantised: set[str] = set()
        for source in _expected(family, self.names):
            if self._is_mxfp4(source.name, source.shape):
                names, shapes = mxfp4.part_names(source.name), mxfp4.part_shapes(source.shape)
                expected |= dict(zip(names, shapes, strict=True))
                quantised.update(names)
                continue
            if source.name not in expected and source.name not in self._entries:
                missing.append(source.name)
                if len(missing) == _ENOUGH:
                    break
            expected[source.name] = source.shape
        missing += sorted(quantised - set(self.names))
        eighths = [name for name in expected if name in self._entries and self.dtype(name) == fp8.DTYPE]
        for name in eighths:
            expected[fp8.scale_name(name)] = fp8.scale_shape(name, expected[name], fp8.block_size(self.config))
            missing += [fp8.scale_name(name)] * (fp8.scale_name(name) not in self._entries)
        shaped = [
            f"{name} asked {list(shape)} had {list(self.shape(name))}"
            for name, shape in expected.items()
            if name in self._entries and self.shape(name) != shape
        ]
        typed = [
            f"{name} {self.dtype(name)}"
            for name in expected
            if name in self._entries and self.dtype(name) not in (("U8",) if name in quantised else STORED)
        ]
        unexpected = sorted(
            name for name in self.names if len(missing) < _ENOUGH and name not in expected and not family.ignored(name)
        )
        scales = [name for name in unexpected if name.endswith(_SCALES)]
        if scales:
            raise UnsupportedModelError(
                f"{self.path}: the weights are already quantised: {len(scales)} tensors of scales: {some(scales)}",
                had=", ".join(sorted({self.dtype(name) for name in expected if name in self._entries})),
                next_step="Pack the original f32, f16 or bf16 checkpoint; EStream quantises by itself (--experts int8)",
            )
        kinds = (
            ("missing", missing),
            ("with another shape", shaped),
            (f"of a dtype other than {', '.join(STORED)}", typed),
            ("unexpected", unexpected),
        )
        offences = [
            f"{len(names)}{' or more' if len(names) == _ENOUGH else ''} {kind}: {some(names)}"
            for kind, names in kinds
            if names
        ]
        if offences:
            raise CheckpointError(
                f"{self.path}: tensors do not match config.json ({family.name}): {'; '.join(offences)}",
                next_step="Check that config.json and all shards are of the same checkpoint",
            )

    def _entry(self, name: str) -> tuple[int, Entry]:
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return self._entries[name]

    def _fill(self, fd: int, entry: Entry, first: int, view: np.ndarray) -> None:
        """Reads elements `first`, ... of a tensor into `view`, a float32 array in the order of the file."""
        if not self._fds:
            raise ClosedError(f"checkpoint {self.path} is closed")
        stored = STORED[entry.dtype]
        row = math.prod(view.shape[1:])
        step = max(1, _BLOCK_BYTES // max(1, row * stored.itemsize))
        position = entry.start + first * stored.itemsize
        block = np.empty((min(step, len(view)), *view.shape[1:]), stored)
        for start in range(0, len(view), step):
            words = block[: len(view) - start]
            pread(fd, words, position, entry.name)
            position += words.nbytes
            copy_widened(view[start : start + step], words, entry.dtype)


def _finished(values: np.ndarray, source: Source) -> np.ndarray:
    """What `source` picked, transposed and scaled. Never a view of what is kept."""
    return np.multiply(values.T if source.transpose else values, np.float32(source.scale), order="C")


def _expected(family: Family, names: Collection[str]) -> Iterator[Source]:
    """Every source of every packed tensor of the model, layer by layer."""
    architecture = family.architecture()
    for sources in family.model_sources(names).values():
        yield from sources
    for plan in architecture.layers:
        for sources in family.layer_sources(plan.index).values():
            yield from sources
        for expert in _records(family, plan, architecture.experts):
            if expert is not None:
                yield from (expert.gate, expert.up, expert.down, *(expert.biases or ()))


def _records(family: Family, plan: LayerPlan, experts: int) -> Iterator[ExpertSources | None]:
    if plan.ffn == "dense":
        yield family.ffn_sources(plan.index)
        return
    for expert in range(experts):
        yield family.expert_sources(plan.index, expert)
    yield family.shared_sources(plan.index)
