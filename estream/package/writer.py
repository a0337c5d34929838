"""Writes a packed model from a stream of weights: sizes by arithmetic first, then every byte once."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from estream.errors import PackageError, UsageError
from estream.models.base import Architecture, Family
from estream.package.atomic import building
from estream.package.dense import DenseTensor, checked_count, dense_specs, place
from estream.package.files import HashedFile, Progress, safetensors_header, with_fills
from estream.package.layout import (
    ALIGNMENT,
    DENSE_SCHEMES,
    DTYPES,
    SCHEMES,
    PanelLayout,
    PoolLayout,
    align,
    default_dense,
    default_panel_width,
    head_slices,
)
from estream.package.manifest import CHECKSUMS, DENSE, MODEL, POOL, FileEntry, Manifest, check_panel
from estream.version import __version__


class Weights(Protocol):
    """Where packed bytes come from, in the order in which they are written."""

    def dense(self) -> Iterator[tuple[str, np.ndarray]]:
        """(tensor name, piece): the tensors of `dense_specs` in order, each in one or several pieces of its dtype.
        A record comes panel by panel, U8 [panel_bytes]."""
        ...

    def experts(self) -> Iterator[np.ndarray]:
        """Every panel of the pool in order, U8 [panel_bytes]."""
        ...


@dataclass(frozen=True)
class PackResult:
    """What was written. `files` are sizes in bytes by name; `seconds` is the wall time of the whole packing."""

    path: Path
    family: str
    experts: str
    dense: str
    panel_width: int
    panels_per_expert: int
    panel_bytes: int
    files: Mapping[str, int]
    seconds: float

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "path": str(self.path),
            "family": self.family,
            "experts": self.experts,
            "dense": self.dense,
            "panel_width": self.panel_width,
            "panels_per_expert": self.panels_per_expert,
            "panel_bytes": self.panel_bytes,
            "total_bytes": self.total_bytes,
            "files": dict(self.files),
            "seconds": self.seconds,
        }


class Packing:
    """Everything about a package to be written but its weights: layout, headers, sizes, graphs.

    Raises:
        UsageError: a scheme or a panel width that cannot be meant.
    """

    def __init__(
        self,
        family: Family,
        experts: str,
        dense: str | None,
        panel: int | None,
        source: dict[str, Any],
    ) -> None:
        self.experts, self.dense = check_schemes(experts, dense)
        self.family, self.source = family, source
        self.architecture: Architecture = family.architecture()
        arch = self.architecture
        intermediate = arch.expert_intermediate or arch.dense_intermediate
        width = default_panel_width(arch.hidden, intermediate, experts) if panel is None else panel
        self.panel = PanelLayout(arch.hidden, width, experts, arch.clamped is not None)
        check_panel(self.panel, arch, UsageError, "--panel")
        panels = self.panel.panels(arch.expert_intermediate)
        record = panels * self.panel.panel_bytes
        self.pool_header = safetensors_header(
            (f"layers.{layer}.experts.{expert}", "U8", (record,), record)
            for layer in arch.moe_layers
            for expert in range(arch.experts)
        )
        self.pool = PoolLayout(self.panel, panels, arch.experts, arch.moe_layers, len(self.pool_header))
        self.place_dense(0)

    def place_dense(self, spare: int) -> None:
        """Lays dense.safetensors out with `spare` extra panels in shared and ffn records."""
        self.spare = spare
        unplaced = place(dense_specs(self.architecture, self.dense, self.panel, spare), 0)
        self.dense_header = safetensors_header(with_fills(unplaced))
        specs = dense_specs(self.architecture, self.dense, self.panel, spare)
        self.dense_tensors = place(specs, len(self.dense_header))

    def graphs(self) -> dict[str, bytes]:
        """The ONNX graphs by file name inside the package."""
        from qnn_graphs import TARGETS, build_graphs  # heavy: needs onnx

        return {
            f"graphs/{target}/{name}.onnx": model.SerializeToString(deterministic=True)
            for target in TARGETS
            for name, model in build_graphs(
                self.architecture,
                experts=self.experts,
                dense=self.dense,
                panel_width=self.panel.width,
                head_width=self.head_width,
                target=target,
            ).items()
        }

    @property
    def head_width(self) -> int:
        return head_slices(self.architecture.vocab)[1]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the three weight files."""
        last = self.dense_tensors[-1]
        crcs = len(self.pool.moe_layers) * self.pool.panels_per_layer + checked_count(self.dense_tensors)
        return {
            POOL: self.pool.data_offset + self.pool.pool_bytes,
            DENSE: align(last.offset + last.nbytes),
            CHECKSUMS: 4 * crcs,
        }

    def manifest(self, files: Mapping[str, FileEntry]) -> Manifest:
        return Manifest(
            family=self.family,
            experts=self.experts,
            dense=self.dense,
            width=self.panel.width,
            pool_offset=self.pool.data_offset,
            dense_offset=len(self.dense_header),
            files=files,
            source=self.source,
            spare=self.spare,
            estream=__version__,
        )


def check_schemes(experts: str, dense: str | None) -> tuple[str, str]:
    """(experts, dense) with the default of dense filled in. Raises UsageError."""
    for option, scheme, known in (("--experts", experts, SCHEMES), ("--dense", dense, DENSE_SCHEMES)):
        if scheme is not None and scheme not in known:
            raise UsageError(f"{option}: unknown weight scheme", asked=scheme, had=", ".join(known))
    return experts, dense or default_dense(experts)


def write_package(
    out: Path,
    packing: Packing,
    weights: Weights,
    *,
    copies: Mapping[str, Path],
    force: bool = False,
    progress: Progress | None = None,
) -> PackResult:
    """Writes the package `out` in one step: afterwards it is complete, or what it was before.

    `copies` are files to copy into the package by name there (tokenizer).

    Raises:
        UsageError: `out` exists and may not be replaced.
        PackageError: not enough space.
        CheckpointError: what `weights` raises.
    """
    started = time.monotonic()
    contents: dict[str, bytes | Path] = {**packing.graphs(), **copies}
    sizes = packing.sizes | {
        name: content.stat().st_size if isinstance(content, Path) else len(content)
        for name, content in contents.items()
    }
    sizes[MODEL] = len(packing.manifest({name: FileEntry(size, "0" * 64) for name, size in sizes.items()}).to_json())
    step = _Steps(progress, sizes)
    with building(out, force=force, required_bytes=sum(sizes.values())) as folder:
        files: dict[str, FileEntry] = {}
        pool_crcs: list[int] = []
        dense_crcs: list[int] = []
        with HashedFile(folder / DENSE) as file:
            _write_dense(file, packing, weights, dense_crcs, step)
            files[DENSE] = file.finish()
        with HashedFile(folder / POOL) as file:
            _write_pool(file, packing, weights, pool_crcs, step)
            files[POOL] = file.finish()
        contents[CHECKSUMS] = np.array(pool_crcs + dense_crcs, dtype="<u4").tobytes()
        for name, content in contents.items():
            files[name] = _write_file(folder / name, content)
        text = packing.manifest(files).to_json()
        _write_file(folder / MODEL, text)
        written = {name: entry.bytes for name, entry in files.items()} | {MODEL: len(text)}
        if written != sizes:
            raise PackageError("the package came out in another size than computed", asked=sizes, had=written)
    return PackResult(
        path=out,
        family=packing.family.name,
        experts=packing.experts,
        dense=packing.dense,
        panel_width=packing.panel.width,
        panels_per_expert=packing.pool.panels_per_expert,
        panel_bytes=packing.panel.panel_bytes,
        files=dict(sorted(written.items())),
        seconds=time.monotonic() - started,
    )


class _Steps:
    """Calls `progress` with the bytes done in each stage."""

    def __init__(self, progress: Progress | None, sizes: Mapping[str, int]) -> None:
        self._progress, self._totals = progress, {"dense": sizes[DENSE], "experts": sizes[POOL]}

    def __call__(self, stage: str, done: int) -> None:
        if self._progress is not None:
            self._progress(stage, done, self._totals[stage])


def _write_pool(file: HashedFile, packing: Packing, weights: Weights, crcs: list[int], step: _Steps) -> None:
    file.write(packing.pool_header)
    for panel in weights.experts():
        crcs.append(zlib.crc32(panel.data))
        file.write(panel)
        step("experts", file.nbytes)


def _write_dense(file: HashedFile, packing: Packing, weights: Weights, crcs: list[int], step: _Steps) -> None:
    file.write(packing.dense_header)
    pieces = weights.dense()
    for tensor in packing.dense_tensors:
        crc = done = 0
        while done < tensor.nbytes:
            name, piece = next(pieces)
            _check_piece(tensor, name, piece)
            if tensor.panels:
                crcs.append(zlib.crc32(piece.data))
            else:
                crc = zlib.crc32(piece.data, crc)
            file.write(piece)
            done += piece.nbytes
            step("dense", file.nbytes)
        if not tensor.panels:
            crcs.append(crc)
        if done != tensor.nbytes:
            raise PackageError(f"tensor {tensor.name}: bytes", asked=tensor.nbytes, had=done)
        file.write(bytes(-done % ALIGNMENT))
    step("dense", file.nbytes)


def _check_piece(tensor: DenseTensor, name: str, piece: np.ndarray) -> None:
    if name != tensor.name or piece.dtype != DTYPES[tensor.dtype]:
        raise PackageError(
            "weights in another order or dtype than the layout",
            asked=f"{tensor.name} {tensor.dtype}",
            had=f"{name} {piece.dtype}",
        )


def _write_file(path: Path, content: bytes | Path) -> FileEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            with open(content, "rb") as source:
                while piece := source.read(1 << 22):
                    file.write(piece)
        return file.finish()
