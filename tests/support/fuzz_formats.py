"""What `scripts/fuzz.py` and the tests feed with hostile bytes, and how they tell a wrong success.

A format makes inputs from a seed and judges them: an EStreamError with a readable message refuses an input, acceptance
is compared with what the bytes say by other means. Anything else is a finding.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import safetensors

from estream.checkpoint import Checkpoint
from estream.errors import EStreamError
from estream.models.base import Source
from estream.models.config import HARMLESS
from estream.package import manifest as manifests
from estream.package.manifest import Manifest
from estream.package.pack import pack
from estream.package.reader import Package
from estream.package.safetensors_header import read_header
from estream.package.verify import verify
from estream.package.writer import Packing
from tests.support.mutations import generated_document, mutated_bytes, mutated_document, to_text, words_of
from tests.support.safetensors_files import f32, ramp, write_safetensors
from tests.support.tiny_packages import OLMOE, QWEN2_MOE, sources_of, write_checkpoint


class Format(ABC):
    """One format. `folder` is an empty directory of its own, best in memory."""

    name: ClassVar[str]
    document: Any  # a valid one, parsed

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder

    def wrap(self, text: bytes) -> bytes:
        """The input whose JSON text is this."""
        return text

    @abstractmethod
    def make(self, draw: random.Random) -> bytes:
        """A hostile input."""

    @abstractmethod
    def accept(self, data: bytes) -> None:
        """Uses the input as EStream does. Raises EStreamError, or AssertionError on a wrong success."""

    def judge(self, data: bytes) -> str | None:
        """None if the input was accepted, rightly; else the message that refuses it."""
        try:
            self.accept(data)
        except EStreamError as error:
            message = str(error)
            assert message.isprintable(), f"control characters in {message!r}"
            assert 10 < len(message) < 8000, f"message of {len(message)} characters"
            return message
        return None


class HeaderFormat(Format):
    """A whole safetensors file, as a shard of a checkpoint."""

    name = "header"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tensors = {
            "a": f32(ramp(2, 3)),
            "b.weight": ("BF16", (3, 2), bytes(range(12))),
            "empty": ("F16", (0, 4), b""),
            "scalar": ("I64", (), bytes(8)),
            "q": ("U8", (5,), b"12345"),
        }
        self._valid = write_safetensors(folder / "valid.safetensors", tensors).read_bytes()
        length = int.from_bytes(self._valid[:8], "little")
        self.document = json.loads(self._valid[8 : 8 + length]) | {"__metadata__": {"format": "pt"}}
        self._data = self._valid[8 + length :]
        self._words = [*words_of(self.document), "F8_E4M3", "I8"]
        self._file = os.open(folder / "fuzzed", os.O_RDWR | os.O_CREAT)

    def make(self, draw: random.Random) -> bytes:
        kind = draw.random()
        if kind < 0.4:
            return mutated_bytes(draw, self._valid)
        valid = kind < 0.9
        document = mutated_document(draw, self.document) if valid else generated_document(draw, self._words)
        text = to_text(draw, document) + b" " * draw.choice((0, 0, 7))
        length = (
            len(text) if draw.random() < 0.95 else draw.choice((0, 1, len(text) + 1, 10**8, 10**9, 2**63, 2**64 - 1))
        )
        data = self._data if draw.random() < 0.9 else self._data + draw.randbytes(draw.randrange(9))
        return length.to_bytes(8, "little") + text + data

    def accept(self, data: bytes) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)
        header = read_header(self._file, label="fuzzed")
        # The library's own parser must accept it as well and describe the very same bytes.
        found = {name: value for name, value in safetensors.deserialize(data)}
        assert found.keys() == header.tensors.keys()
        position = header.data_offset
        for name, entry in header.tensors.items():
            assert (entry.dtype, list(entry.shape)) == (found[name]["dtype"], found[name]["shape"])
            assert data[entry.start : entry.end] == bytes(found[name]["data"])
            assert entry.start == position
            position = entry.end
        assert position == header.file_bytes == len(data)


class IndexFormat(Format):
    """model.safetensors.index.json beside two shards and a stray file with other values."""

    name = "index"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "config.json").write_text("{}")
        names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "x.0", "x.1"]
        files = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
        for number, file in enumerate(files):
            write_safetensors(folder / file, {name: f32(ramp(2, 2)) for name in names[number::2]})
        write_safetensors(folder / "consolidated.safetensors", {name: f32(-1 - ramp(2, 2)) for name in names})
        write_safetensors(folder.parent / "outside.safetensors", {"outside": f32(ramp(1))})
        (folder / "link").symlink_to(folder.parent)
        self._names = set(names)
        self.document = {
            "metadata": {"total_size": 80},
            "weight_map": {name: files[number % 2] for number, name in enumerate(names)},
        }
        outside = ["../outside.safetensors", "link/outside.safetensors", str(folder.parent / "outside.safetensors")]
        self._words = [*words_of(self.document), *outside, "consolidated.safetensors", "config.json"]

    def make(self, draw: random.Random) -> bytes:
        kind = draw.random()
        if kind < 0.3:
            return mutated_bytes(draw, json.dumps(self.document).encode())
        document = self.document
        if kind < 0.5:
            value: Any = draw.choice(self._words)
            document = {"weight_map": {name: value for name in draw.sample(sorted(self._names), draw.randrange(1, 5))}}
        document = generated_document(draw, self._words) if kind > 0.9 else mutated_document(draw, document)
        return to_text(draw, document)

    def accept(self, data: bytes) -> None:
        (self.folder / "model.safetensors.index.json").write_bytes(data)
        with Checkpoint.open(self.folder) as checkpoint:
            assert set(checkpoint.names) == self._names
            firsts = {float(checkpoint.read(Source(name, (2, 2)))[0, 0]) for name in checkpoint.names}
            assert firsts in ({0.0}, {-1.0}), "tensors of two checkpoints mixed"


class ConfigFormat(Format):
    """config.json of a whole checkpoint, up to the layout of the package."""

    name = "config"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        extra = {"rope_theta": 10000.0, "rope_scaling": None, "hidden_act": "silu", "torch_dtype": "float32",
                 "tie_word_embeddings": False, "rms_norm_eps": 1e-5}  # fmt: skip
        self._configs = []
        for config in (OLMOE, QWEN2_MOE):
            write_checkpoint(folder / config["model_type"], config)
            self._configs.append(config | {**extra, "tie_word_embeddings": config.get("tie_word_embeddings", False)})
        self.document = self._configs[0]
        self._words = [word for config in self._configs for word in words_of(config)] + ["quantization_config", "yarn"]

    def make(self, draw: random.Random) -> bytes:
        number = draw.randrange(len(self._configs))
        config, kind = self._configs[number], draw.random()
        if kind < 0.3:
            text = mutated_bytes(draw, json.dumps(config).encode())
        elif kind < 0.9:
            text = to_text(draw, mutated_document(draw, config))
        else:
            text = to_text(
                draw, config | {"x": 1} | dict.fromkeys(draw.sample(self._words, 3), draw.choice(self._words))
            )
        return bytes([number]) + text

    def wrap(self, text: bytes) -> bytes:
        return b"\0" + text

    def accept(self, data: bytes) -> None:
        folder = self.folder / self._configs[data[0]]["model_type"]
        (folder / "config.json").write_bytes(data[1:])
        with Checkpoint.open(folder) as checkpoint:
            family = checkpoint.family()
            checkpoint.check(family)
            shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
        # Every field of the document is in the family's configuration, or cannot change the arithmetic.
        raw, taken = json.loads(data[1:]), vars(family.config)
        for name, value in raw.items():
            if name in taken:
                number = isinstance(taken[name], float) and value is not None
                exact = float(value) if number else value  # JSON's numbers are doubles
                same = taken[name] == (tuple(exact) if isinstance(exact, list) else exact)
                assert same or (name == "rope_theta" and value is None), f"{name}: {value!r} became {taken[name]!r}"
            else:
                rope = name in ("rope_scaling", "rope_parameters", "partial_rotary_factor")
                assert value is None or name in HARMLESS or rope, f"{name} was overlooked"
        assert all(shapes[source.name] == source.shape for source in sources_of(family))
        assert Packing(family, "int8", None, None, {"kind": "checkpoint"}).sizes["experts.safetensors"] < 1 << 24


class _PackageFormat(Format):
    """A whole tiny package in `folder`; `self.package` is what it says when it is whole."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_checkpoint(folder / "in", QWEN2_MOE)
        self.path = folder / "q.estream"
        pack(folder / "in", self.path, experts="int8", panel=32)
        shutil.rmtree(folder / "in")
        self.package = Package.open(self.path)

    def check_package(self, package: Package) -> None:
        """Everything that a prefill would read lies inside of the files."""
        dense, pool = package.dense_file.stat().st_size, package.experts_file.stat().st_size
        for tensor in package.dense.values():
            assert tensor.offset >= 0 and tensor.nbytes > 0 and tensor.offset + tensor.nbytes <= dense
        assert package.pool.data_offset + package.pool.pool_bytes == pool
        assert len(package.checksums) * 4 == (package.path / "checksums.bin").stat().st_size


class ModelJsonFormat(_PackageFormat):
    """model.json: damaged, or changed by somebody who computed its checksum anew."""

    name = "model-json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._text = (self.path / "model.json").read_bytes()
        self.document = json.loads(self._text)
        self._words = words_of(self.document)

    def make(self, draw: random.Random) -> bytes:
        kind = draw.random()
        if kind < 0.4:
            return mutated_bytes(draw, self._text)
        if kind > 0.97:
            return to_text(draw, generated_document(draw, self._words))
        document = mutated_document(draw, self.document)
        if kind < 0.7 and isinstance(document, dict):  # signed again
            document.pop("checksum", None)
            try:
                document["checksum"] = manifests._checksum(document)
            except ValueError:
                document["checksum"] = "0" * 64
        return to_text(draw, document)

    def accept(self, data: bytes) -> None:
        manifest = Manifest.from_json(data)
        document = json.loads(data)
        assert _same(document, manifest.to_dict()), "model.json was read as something else than it says"
        if document["checksum"] == self.document["checksum"]:
            assert _same(document, self.document), "damage went unnoticed"
        (self.path / "model.json").write_bytes(data)
        try:
            package = Package.open(self.path)
            self.check_package(package)
            verify(self.path)
        finally:
            (self.path / "model.json").write_bytes(self._text)


class DenseHeaderFormat(_PackageFormat):
    """The header of a package's dense.safetensors, in place: the file keeps its size."""

    name = "dense-header"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._whole = self.package.dense_file.read_bytes()
        size = self.package.manifest.dense_offset
        self._head = self._whole[:size]
        self.document = json.loads(self._head[8:])
        self._used = 8 + len(self._head[8:].rstrip())
        self._file = os.open(self.package.dense_file, os.O_RDWR)

    def make(self, draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            head = mutated_bytes(draw, self._head[: self._used + draw.choice((0, 40))])
        else:
            head = self._head[:8] + to_text(draw, mutated_document(draw, self.document))
        return head[: len(self._head)].ljust(len(self._head))

    def accept(self, data: bytes) -> None:
        os.pwrite(self._file, data, 0)
        try:
            package = Package.open(self.path)
            self.check_package(package)
            tensors = json.loads(data[8:])
            for tensor in package.dense.values():
                start = tensor.offset - len(data)
                told = {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "data_offsets": [start, start + tensor.nbytes],
                }
                assert tensors[tensor.name] == told
            assert verify(self.path).ok == (data == self._head), "verify did not see the damage"
        finally:
            os.pwrite(self._file, self._head, 0)


def _same(one: Any, other: Any) -> bool:
    """Equality in which 1, 1.0 and true differ."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


FORMATS: dict[str, type[Format]] = {
    kind.name: kind for kind in (HeaderFormat, IndexFormat, ConfigFormat, ModelJsonFormat, DenseHeaderFormat)
}


def generator(seed: int, number: int) -> random.Random:
    """The generator of input `number`: each can be made again alone."""
    return random.Random((seed << 32) + number)
