"""model.json: what a packed model says about itself.

Only a few fields are facts (`Manifest`'s own); the rest (parts, offsets, layer plan, head slices) follows from them and
is written for other readers. On reading, the whole document is derived again from the facts and compared, so an unknown
key, a wrong type and a wrong number are all errors that name the field.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from estream.errors import EStreamError, PackageError, brief
from estream.models import family as find_family
from estream.models.base import Architecture, Family
from estream.package.layout import (
    ALIGNMENT,
    DENSE_SCHEMES,
    SCHEMES,
    ZERO_POINT,
    PanelLayout,
    PoolLayout,
    head_slices,
    holds,
    panel_granule,
)
from estream.small_file import JSON_BYTES, read_small

FORMAT = "estream"
VERSION = 3
MODEL, POOL, DENSE, CHECKSUMS = "model.json", "experts.safetensors", "dense.safetensors", "checksums.bin"


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """Size and lower-case hexadecimal SHA-256 of one file of the package."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The facts of a packed model; everything else follows from them.

    `experts` and `dense` are weight schemes, `width` is the panel width Ip, the offsets are where the data of the two
    safetensors files start. `source` is {"kind": "checkpoint"} or {"kind": "synth", "preset": …, "seed": …}. `spare` is
    1 where shared and ffn records have a panel more than their channels fill (`outliers`), else 0.
    """

    family: Family
    experts: str
    dense: str
    width: int
    pool_offset: int
    dense_offset: int
    files: Mapping[str, FileEntry]
    source: Mapping[str, Any]
    estream: str
    spare: int = 0

    @property
    def panel(self) -> PanelLayout:
        arch = self.family.architecture()
        return PanelLayout(arch.hidden, self.width, self.experts, arch.clamped is not None)

    @property
    def pool(self) -> PoolLayout:
        arch = self.family.architecture()
        panels = self.panel.panels(arch.expert_intermediate)
        return PoolLayout(self.panel, panels, arch.experts, arch.moe_layers, self.pool_offset)

    def record_panels(self, intermediate: int) -> int:
        """Panels of a shared or ffn record, 0 where the model has none."""
        return self.panel.panels(intermediate) + self.spare if intermediate else 0

    def to_dict(self) -> dict[str, Any]:
        """The whole document, in the order in which it is written. `checksum` is that of everything before it."""
        arch, panel, pool = self.family.architecture(), self.panel, self.pool
        slices, head_width = head_slices(arch.vocab)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "family": self.family.name,
            "config": _plain(dataclasses.asdict(self.family.config)),
            "experts": self.experts,
            "dense": self.dense,
            "int8_zero_point": ZERO_POINT,
            "panel": {
                "hidden": panel.hidden,
                "width": panel.width,
                "chunks": panel.chunks,
                "bytes": panel.panel_bytes,
                "parts": [
                    {"name": part.name, "dtype": part.dtype, "shape": list(part.shape), "offset": part.offset}
                    for part in panel.parts
                ],
            },
            "pool": {
                "data_offset": pool.data_offset,
                "layers": list(pool.moe_layers),
                "experts": pool.experts,
                "panels_per_expert": pool.panels_per_expert,
                "record_bytes": pool.record_bytes,
            },
            "dense_data_offset": self.dense_offset,
            "head": {"slices": slices, "width": head_width},
            "layers": _plain([dataclasses.asdict(plan) for plan in arch.layers]),
            "spare_panels": self.spare,
            "shared_panels": self.record_panels(arch.shared_intermediate),
            "ffn_panels": self.record_panels(arch.dense_intermediate),
            "files": {name: dataclasses.asdict(entry) for name, entry in sorted(self.files.items())},
            "source": dict(self.source),
            "estream": self.estream,
        }
        return document | {"checksum": _checksum(document)}

    def to_json(self) -> bytes:
        return (json.dumps(self.to_dict(), indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")

    @classmethod
    def from_json(cls, text: bytes, label: str = MODEL) -> Manifest:
        """Reads model.json; `label` names it in messages. Raises PackageError naming the field that is wrong."""
        try:
            raw = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as problem:
            raise PackageError(f"{label} is not valid JSON: {problem}", next_step=_NEXT_STEP) from problem
        read = _Fields(raw, label)
        if read.get("format", str) != FORMAT:
            read.refuse("format", FORMAT, raw["format"])
        if read.get("version", int) != VERSION:
            raise PackageError(
                f"{label}: version of the package",
                asked=VERSION,
                had=raw["version"],
                next_step="Pack the checkpoint again with this version of EStream",
            )
        try:
            family = find_family(read.get("family", str)).from_config(read.get("config", dict))
            arch = family.architecture()
        except EStreamError as problem:
            thing = f"{label}: config: {problem.thing}"
            raise PackageError(thing, asked=problem.asked, had=problem.had, next_step=_NEXT_STEP) from problem
        manifest = cls(
            family=family,
            experts=(experts := read.scheme("experts", SCHEMES)),
            dense=read.scheme("dense", DENSE_SCHEMES),
            width=read.multiple("panel", "width", panel_granule(experts)),
            pool_offset=read.multiple("pool", "data_offset", ALIGNMENT),
            dense_offset=read.multiple("dense_data_offset", None, ALIGNMENT),
            files=_files(read),
            source=_source(read),
            estream=read.word("estream"),
            spare=read.flag("spare_panels"),
        )
        check_panel(manifest.panel, arch, PackageError, label)
        derived = manifest.to_dict()
        # The facts that nothing follows from (an epsilon, a rope theta) have no other check than this one.
        asked, had = derived.pop("checksum"), read.get("checksum", str)
        _compare({name: value for name, value in raw.items() if name != "checksum"}, derived, label, "")
        if had != asked:
            raise PackageError(
                f"{label} is damaged: it does not match its checksum", asked=asked, had=brief(had), next_step=_NEXT_STEP
            )
        return manifest

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the packed model `folder`. Raises PackageError."""
        if not folder.is_dir():
            raise PackageError(
                f"{folder} is not a packed model: no such folder", next_step="Pack one with estream pack"
            )
        path = folder / MODEL
        try:
            text = read_small(path, JSON_BYTES)
        except PermissionError as problem:
            raise PackageError(
                f"{path}: cannot be read: {problem.strerror}", next_step="Check the permissions of the package"
            ) from problem
        except OSError as problem:
            raise PackageError(
                f"{folder} is not a packed model: {MODEL}: {problem.strerror}",
                next_step="Give the folder that estream pack wrote",
            ) from problem
        return cls.from_json(text, str(path))


def check_panel(panel: PanelLayout, arch: Architecture, error: type[EStreamError], thing: str) -> None:
    """Raises `error` unless the scheme can hold the hidden size and the width is a multiple of the scheme's granule in
    granule … the expert intermediate (rounded up). `thing` names the width."""
    granule = panel_granule(panel.scheme)
    if not holds(arch.hidden, panel.scheme):
        raise error(
            f"experts in {panel.scheme}: hidden size",
            asked=arch.hidden,
            had=f"whole groups, multiples of {granule}",
            next_step="Pack with --experts int8",
        )
    intermediate = arch.expert_intermediate or arch.dense_intermediate
    most = -(-intermediate // granule) * granule
    if panel.width % granule or not 0 < panel.width <= most:
        raise error(f"{thing}: panel width", asked=panel.width, had=f"a multiple of {granule} of at most {most}")


_NEXT_STEP = "Pack the checkpoint again"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PATH = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)  # no way out of the folder, nothing that a terminal obeys

_WORD = re.compile(r"[\w.+-]{1,80}", re.ASCII)


def _checksum(document: Mapping[str, Any]) -> str:
    """SHA-256 of the document, however it is laid out as text."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class _Fields:
    """Typed access to the document's own fields, with errors that name them."""

    def __init__(self, raw: Any, label: str) -> None:
        self.label = label
        if not isinstance(raw, dict):
            self.refuse("the document", "an object", type(raw).__name__)
        self.raw = raw

    def refuse(self, field: str, asked: object, had: object) -> NoReturn:
        raise PackageError(f"{self.label}: field {field}", asked=asked, had=brief(had), next_step=_NEXT_STEP)

    def get(self, name: str, kind: type) -> Any:
        if name not in self.raw:
            self.refuse(name, kind.__name__, "nothing")
        # type(), not isinstance: JSON's true is no number
        if type(self.raw[name]) is not kind:
            self.refuse(name, kind.__name__, self.raw[name])
        return self.raw[name]

    def word(self, name: str) -> str:
        value = self.get(name, str)
        if not _WORD.fullmatch(value):
            self.refuse(name, "a short word", value)
        return str(value)

    def scheme(self, name: str, known: tuple[str, ...]) -> str:
        value = self.get(name, str)
        if value not in known:
            self.refuse(name, "|".join(known), value)
        return str(value)

    def flag(self, name: str) -> int:
        value = self.get(name, int)
        if value not in (0, 1):
            self.refuse(name, "0 or 1", value)
        return int(value)

    def multiple(self, name: str, inner: str | None, of: int) -> int:
        value = self.get(name, int if inner is None else dict)
        if inner is not None:
            value = value.get(inner)
        if type(value) is not int or value <= 0 or value % of:
            self.refuse(f"{name}.{inner}" if inner else name, f"a positive multiple of {of}", value)
        return value


def _files(read: _Fields) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for name, entry in read.get("files", dict).items():
        at = f"files.{name}"
        if not _PATH.fullmatch(name) or name == MODEL:
            read.refuse(at, "a relative path inside the package", name)
        if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"}:
            read.refuse(at, "bytes and sha256", entry)
        if type(entry["bytes"]) is not int or entry["bytes"] < 0:
            read.refuse(f"{at}.bytes", "a size", entry["bytes"])
        if not isinstance(entry["sha256"], str) or not _SHA256.fullmatch(entry["sha256"]):
            read.refuse(f"{at}.sha256", "64 hexadecimal digits", entry["sha256"])
        files[name] = FileEntry(entry["bytes"], entry["sha256"])
    for name in (POOL, DENSE, CHECKSUMS):
        if name not in files:
            read.refuse(f"files.{name}", "bytes and sha256", "nothing")
    return files


_SOURCES: dict[str, dict[str, type]] = {
    "checkpoint": {"kind": str},
    "synth": {"kind": str, "preset": str, "seed": int},
}


def _source(read: _Fields) -> dict[str, Any]:
    source = read.get("source", dict)
    kind = source.get("kind")
    if not isinstance(kind, str) or kind not in _SOURCES:
        read.refuse("source.kind", "|".join(_SOURCES), kind)
    wanted = _SOURCES[kind]
    for key in wanted.keys() | source.keys():
        value = source.get(key)
        if key not in wanted or type(value) is not wanted[key] or (type(value) is str and not _WORD.fullmatch(value)):
            asked = wanted[key].__name__ if key in wanted else "no such field"
            read.refuse(f"source.{key}", asked, value)
    return dict(source)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return result


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples become lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _compare(had: Any, asked: Any, label: str, at: str) -> None:
    """Raises PackageError naming the first field in which the document differs from what its facts say."""
    if isinstance(had, dict) and isinstance(asked, dict):
        for key in [*asked, *(key for key in had if key not in asked)]:
            field = f"{at}.{key}" if at else key
            if key not in asked:
                raise PackageError(f"{label}: unknown field {field}", next_step=_NEXT_STEP)
            if key not in had:
                raise PackageError(f"{label}: field {field} is missing", next_step=_NEXT_STEP)
            _compare(had[key], asked[key], label, field)
    elif isinstance(had, list) and isinstance(asked, list) and len(had) == len(asked):
        for index, (one, other) in enumerate(zip(had, asked, strict=True)):
            _compare(one, other, label, f"{at}.{index}")
    elif type(had) is not type(asked) or had != asked:
        raise PackageError(f"{label}: field {at}", asked=brief(asked), had=brief(had), next_step=_NEXT_STEP)
