"""Opens a packed model and says where everything lies; reads only headers itself.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from estream.errors import PackageError
from estream.models.base import Architecture, Family
from estream.package.dense import PAD, DenseTensor, checked_count, checked_pieces, dense_specs, place
from estream.package.embedding import Embedding, Identity, identity
from estream.package.layout import PoolLayout, head_slices
from estream.package.manifest import CHECKSUMS, DENSE, MODEL, POOL, Manifest
from estream.package.safetensors_header import read_header
from estream.small_file import open_regular, read_small

__all__ = ["DenseTensor", "Package", "Piece"]

Piece = tuple[str, int, int, int]  # label, offset in its file, bytes, CRC-32

_NEXT_STEP = "Copy the package again, or check it with estream verify"


class Package:
    """A packed model on disk. Holds no open files. Made by `Package.open`.

    `dense` maps names to the tensors of dense.safetensors, without fills, in file order.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.family: Family = manifest.family
        self.architecture: Architecture = manifest.family.architecture()
        self.pool: PoolLayout = manifest.pool
        self.experts_file = path / POOL
        self.dense_file = path / DENSE
        self.head_slices, self.head_width = head_slices(self.architecture.vocab)
        self.shared_panels = manifest.record_panels(self.architecture.shared_intermediate)
        self.ffn_panels = manifest.record_panels(self.architecture.dense_intermediate)
        specs = dense_specs(self.architecture, manifest.dense, self.pool.panel, manifest.spare)
        self._identities: dict[str, Identity | None] = {}
        self.dense: Mapping[str, DenseTensor] = {item.name: item for item in place(specs, manifest.dense_offset)}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Package:
        """Reads model.json and checks the files against it: present, of the right size, with the expected headers.

        The small files (graphs, tokenizer, checksums), which decide the arithmetic, are compared with their SHA-256;
        the weights are not: that is `verify`'s work.

        Raises:
            PackageError: `path` is not a packed model, of another version, incomplete or damaged.
        """
        folder = Path(path)
        model = _identity(folder / MODEL)  # before it is read: see check_unchanged
        package = cls(folder, Manifest.read(folder))
        for name, entry in package.manifest.files.items():
            package._identities[name] = _identity(folder / name)
            _check_size(folder / name, entry.bytes)
            if name not in (POOL, DENSE):
                _check_hash(folder / name, entry.sha256)
        package._identities[MODEL] = model
        try:
            package._check_pool()
            package._check_dense()
        except OSError as problem:
            raise PackageError(f"{folder} cannot be read: {problem.strerror}", next_step=_NEXT_STEP) from problem
        return package

    def _check_pool(self) -> None:
        # Not the whole header: it may have thousands of entries, and every offset is arithmetic.
        try:
            with open(open_regular(self.experts_file), "rb") as file:
                data_offset = 8 + int.from_bytes(file.read(8), "little")
        except OSError as problem:
            raise PackageError(f"{self.experts_file}: {problem.strerror}", next_step=_NEXT_STEP) from problem
        if data_offset != self.pool.data_offset:
            raise PackageError(
                f"{self.experts_file}: start of the data",
                asked=self.pool.data_offset,
                had=data_offset,
                next_step=_NEXT_STEP,
            )
        expected = self.pool.data_offset + self.pool.pool_bytes
        if self.manifest.files[POOL].bytes != expected:
            raise PackageError(
                f"{self.path}: size of {POOL}",
                asked=expected,
                had=self.manifest.files[POOL].bytes,
                next_step=_NEXT_STEP,
            )

    def _check_dense(self) -> None:
        header = read_header(self.dense_file)
        if header.data_offset != self.manifest.dense_offset:
            raise PackageError(
                f"{self.dense_file}: start of the data",
                asked=self.manifest.dense_offset,
                had=header.data_offset,
                next_step=_NEXT_STEP,
            )
        for tensor in self.dense.values():
            entry = header.tensors.get(tensor.name)
            had = None if entry is None else f"{entry.dtype} {list(entry.shape)} at {entry.start}"
            asked = f"{tensor.dtype} {list(tensor.shape)} at {tensor.offset}"
            if had != asked:
                raise PackageError(
                    f"{self.dense_file}: tensor {tensor.name}", asked=asked, had=had or "nothing", next_step=_NEXT_STEP
                )
        for name in header.tensors:
            if name not in self.dense and not name.startswith(PAD):
                raise PackageError(f"{self.dense_file}: unknown tensor {name}", next_step=_NEXT_STEP)

    def graph(self, target_graphs_folder: str, name: str) -> Path:
        """The ONNX file of graph `name` for a target, compared with its SHA-256: a few KB that decide the arithmetic.

        Raises PackageError if the package has none, or it is damaged."""
        file = f"graphs/{target_graphs_folder}/{name}.onnx"
        entry = self.manifest.files.get(file)
        if entry is None:
            raise PackageError(
                f"{self.path} has no graph {name} for {target_graphs_folder}", next_step="Pack the checkpoint again"
            )
        _check_hash(self.path / file, entry.sha256)
        return self.path / file

    @cached_property
    def checksums(self) -> np.ndarray:
        """uint32: one CRC-32 per panel of the pool in file order, then one per piece of `checked_pieces`."""
        data = _check_hash(self.path / CHECKSUMS, self.manifest.files[CHECKSUMS].sha256)
        expected = 4 * (self._pool_panels + checked_count(self.dense.values()))
        if len(data) != expected:
            raise PackageError(f"{self.path / CHECKSUMS}: bytes", asked=expected, had=len(data), next_step=_NEXT_STEP)
        return np.frombuffer(data, dtype="<u4")

    @property
    def _pool_panels(self) -> int:
        return len(self.pool.moe_layers) * self.pool.panels_per_layer

    def dense_pieces(self) -> Iterator[Piece]:
        """Every piece of dense.safetensors that has a CRC-32 of its own, in file order."""
        for index, piece in enumerate(checked_pieces(tuple(self.dense.values()))):
            yield *piece, int(self.checksums[self._pool_panels + index])

    def checksum(self, layer: int, panel: int) -> int:
        """CRC-32 of panel number `panel` (expert · panels_per_expert + p) of model layer `layer` in the pool."""
        return int(self.checksums[self.pool.moe_layers.index(layer) * self.pool.panels_per_layer + panel])

    def open_embedding(self) -> Embedding:
        """The embedding table, to be closed by the caller. Raises PackageError if the file cannot be opened."""
        return Embedding(self.dense_file, self.dense["embed"])

    def check_unchanged(self) -> None:
        """For whoever has just opened the files by name: they are those that `open` saw, not those of another package.

        Raises PackageError naming the first file that was replaced, written to or removed.
        """
        for name, before in self._identities.items():
            if _identity(self.path / name) != before:
                raise PackageError(
                    f"{self.path} was replaced, changed or removed while it was being opened: {name}",
                    next_step="Open the package again",
                )


def _identity(path: Path) -> Identity | None:
    try:
        return identity(os.stat(path))
    except OSError:
        return None


def _check_hash(path: Path, expected: str) -> bytes:
    """The content of a small file. Raises PackageError if it is not what was packed."""
    try:
        content = read_small(path)
    except OSError as problem:
        raise PackageError(f"{path}: {problem.strerror}", next_step=_NEXT_STEP) from problem
    if hashlib.sha256(content).hexdigest() != expected:
        raise PackageError(f"{path} is damaged: its SHA-256 is another one", next_step=_NEXT_STEP)
    return content


def _check_size(path: Path, expected: int) -> None:
    try:
        had = path.stat().st_size
    except OSError as problem:
        raise PackageError(f"{path}: {problem.strerror}", next_step=_NEXT_STEP) from problem
    if had != expected:
        raise PackageError(f"{path}: size in bytes", asked=expected, had=had, next_step=_NEXT_STEP)
