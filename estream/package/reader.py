"""Opens a packed model and says where everything lies; reads only headers and embedding rows itself.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from estream.errors import PackageError, PromptError
from estream.models.base import Architecture, Family
from estream.package.dense import PAD, DenseTensor, checked_pieces, dense_specs, place
from estream.package.layout import DTYPES, PoolLayout, head_slices
from estream.package.manifest import CHECKSUMS, DENSE, POOL, Manifest
from estream.package.safetensors_header import read_header

__all__ = ["DenseTensor", "Package"]

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
        self.shared_panels = self.pool.panel.panels(self.architecture.shared_intermediate)
        self.ffn_panels = self.pool.panel.panels(self.architecture.dense_intermediate)
        specs = dense_specs(self.architecture, manifest.dense, self.pool.panel)
        self.dense: Mapping[str, DenseTensor] = {item.name: item for item in place(specs, manifest.dense_offset)}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Package:
        """Reads model.json and checks the files against it: present, of the right size, with the expected headers.

        Checksums are not computed; that is `verify`'s work.

        Raises:
            PackageError: `path` is not a packed model, of another version, incomplete or damaged.
        """
        folder = Path(path)
        package = cls(folder, Manifest.read(folder))
        for name, entry in package.manifest.files.items():
            _check_size(folder / name, entry.bytes)
        package._check_pool()
        package._check_dense()
        return package

    def _check_pool(self) -> None:
        # Not the whole header: it may have thousands of entries, and every offset is arithmetic.
        with open(self.experts_file, "rb") as file:
            data_offset = 8 + int.from_bytes(file.read(8), "little")
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
        """The ONNX file of graph `name` for a target. Raises PackageError if the package has none."""
        path = self.path / "graphs" / target_graphs_folder / f"{name}.onnx"
        if not path.is_file():
            raise PackageError(
                f"{self.path} has no graph {name} for {target_graphs_folder}", next_step="Pack the checkpoint again"
            )
        return path

    @cached_property
    def checksums(self) -> np.ndarray:
        """uint32: one CRC-32 per panel of the pool in file order, then one per piece of `checked_pieces`."""
        values = np.fromfile(self.path / CHECKSUMS, dtype="<u4")
        pieces = sum(1 for _ in checked_pieces(tuple(self.dense.values())))
        expected = len(self.pool.moe_layers) * self.pool.panels_per_layer + pieces
        if len(values) != expected:
            raise PackageError(f"{self.path}: checksums", asked=expected, had=len(values), next_step=_NEXT_STEP)
        return values

    def checksum(self, layer: int, panel: int) -> int:
        """CRC-32 of panel number `panel` (expert · panels_per_expert + p) of model layer `layer` in the pool."""
        return int(self.checksums[self.pool.moe_layers.index(layer) * self.pool.panels_per_layer + panel])

    def embedding_rows(self, ids: np.ndarray) -> np.ndarray:
        """Embeddings float32 [N, H] of token ids [N]; each distinct row is read once.

        Raises:
            PromptError: an id outside the vocabulary.
            PackageError: the file ends early or cannot be read.
        """
        tensor = self.dense["embed"]
        vocab, hidden = tensor.shape
        distinct, inverse = np.unique(np.asarray(ids, dtype=np.int64), return_inverse=True)
        if len(distinct) and (distinct[0] < 0 or distinct[-1] >= vocab):
            bad = distinct[0] if distinct[0] < 0 else distinct[-1]
            raise PromptError("token id outside the vocabulary", asked=int(bad), had=f"0 to {vocab - 1}")
        rows = np.empty((len(distinct), hidden), dtype=DTYPES[tensor.dtype])
        try:
            with open(self.dense_file, "rb", buffering=0) as file:
                for row, index in zip(rows, distinct, strict=True):
                    offset = tensor.offset + int(index) * row.nbytes
                    got = os.preadv(file.fileno(), [memoryview(row).cast("B")], offset)
                    if got != row.nbytes:
                        raise PackageError(
                            f"{self.dense_file}: short read of embedding row {index}",
                            asked=row.nbytes,
                            had=got,
                            next_step=_NEXT_STEP,
                        )
        except OSError as problem:
            raise PackageError(f"{self.dense_file}: cannot be read: {problem.strerror}") from problem
        return rows.astype(np.float32)[inverse.reshape(-1)]


def _check_size(path: Path, expected: int) -> None:
    try:
        had = path.stat().st_size
    except OSError as problem:
        raise PackageError(f"{path}: {problem.strerror}", next_step=_NEXT_STEP) from problem
    if had != expected:
        raise PackageError(f"{path}: size in bytes", asked=expected, had=had, next_step=_NEXT_STEP)
