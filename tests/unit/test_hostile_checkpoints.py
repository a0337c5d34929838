"""Hostile and damaged checkpoints where a user meets them: `estream pack`, `estream inspect`, `estream.pack`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream.cli.main import main
from estream.errors import CheckpointError
from estream.package.pack import pack
from estream.package.verify import verify
from estream.package.writer import Packing
from tests.support.refusals import check_command, checkpoint_refused
from tests.support.safetensors_files import f32, write_safetensors
from tests.support.tiny_packages import OLMOE, write_checkpoint

Weights = dict[str, np.ndarray]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packing, "graphs", lambda self: {"graphs/cpu/expert.onnx": b"graph"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "in", OLMOE)
    return tmp_path / "in"


# --- headers of shards


def _rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Applies `change` to the parsed header, or takes the header's text that it returns."""

    def damage(file: Path) -> None:
        whole = file.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:end])
        result = change(header)
        text = result if isinstance(result, bytes) else json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])

    return damage


def _twice(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()[:-1] + b', "%s": %s}' % (NORM.encode(), json.dumps(header[NORM]).encode())


def _overlap(header: dict[str, Any]) -> None:
    width = header[NORM]["data_offsets"][1] - header[NORM]["data_offsets"][0]
    header[NORM]["data_offsets"] = [0, width]


def _outside(header: dict[str, Any]) -> None:
    last = max(header.values(), key=lambda entry: entry["data_offsets"][1])
    begin, end = last["data_offsets"]
    last["data_offsets"] = [begin + (1 << 40), end + (1 << 40)]


def _length(value: int) -> Callable[[Path], None]:
    return lambda file: _overwrite(file, value.to_bytes(8, "little"))


def _overwrite(file: Path, data: bytes) -> None:
    with open(file, "r+b") as opened:
        opened.write(data)


def _cut(size: int) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, size if size >= 0 else file.stat().st_size + size)


HEADERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "huge length": (_length(2**64 - 1), "header is too long"),
    "length beyond the file": (_length(9_999_999), "truncated header"),
    "overlapping offsets": (_rewrite(_overlap), "overlaps the one before it"),
    "offsets outside the file": (_rewrite(_outside), "leaves a hole before it"),
    "shape against bytes": (_rewrite(lambda h: h[NORM].update(shape=[63])), "size does not match its shape"),
    "shape that takes hours to multiply": (
        _rewrite(lambda h: h[NORM].update(shape=[9] * 10**6)),
        "size does not match",
    ),
    "name twice": (_rewrite(_twice), "appears twice"),
    "unknown dtype": (_rewrite(lambda h: h[NORM].update(dtype="Q4_K")), "unknown dtype (had 'Q4_K')"),
    "not JSON": (_rewrite(lambda h: b"{'a': 1}"), "header is not valid JSON"),
    "not a dictionary": (_rewrite(lambda h: b"[1, 2]"), "does not start with '{'"),
    "nested deep": (_rewrite(lambda h: b'{"a":' + b"[" * 10**6), "header is not valid JSON"),
    "terminal codes in a name": (_rewrite(lambda h: h.update({"\x1b[2J": 1})), "is not described by"),
    "empty file": (_cut(0), "shorter than the 8 bytes"),
    "cut in the length": (_cut(5), "shorter than the 8 bytes"),
    "cut in the header": (_cut(300), "truncated header"),
    "cut in the data": (_cut(-1), "truncated: tensor"),
    "bytes at the end": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "bytes after the last tensor"),
    "a pickle under this name": (
        lambda file: file.write_bytes(b"PK\x03\x04\x00\x00\x08\x08" + bytes(99)),
        "is a pickle",
    ),
    "a Git LFS pointer": (
        lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "git lfs pull",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    damage, message = HEADERS[case]
    damage(folder / SINGLE)
    checkpoint_refused(capsys, folder, [SINGLE, message], CheckpointError)


# --- tensors


def _with(changes: dict[str, Any]) -> Callable[[Path, Weights], Any]:
    def write(folder: Path, weights: Weights) -> None:
        tensors = {name: f32(array) for name, array in weights.items()} | changes
        write_safetensors(folder / SINGLE, {name: tensor for name, tensor in tensors.items() if tensor is not None})

    return write


EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"  # [64, 80]
FP8 = {EXPERT: ("F8_E4M3", (64, 80), bytes(64 * 80))}
TENSORS: dict[str, tuple[Callable[[Path, Weights], Any], list[str]]] = {
    "missing": (_with({EXPERT: None}), ["1 missing", EXPERT]),
    "too many": (_with({"model.extra.weight": f32(np.zeros(3))}), ["1 unexpected", "model.extra.weight"]),
    "shape": (_with({HEAD: f32(np.zeros((69, 64)))}), [HEAD, "asked [70, 64] had [69, 64]"]),
    "transposed": (_with({EXPERT: f32(np.zeros((80, 64)))}), [EXPERT, "asked [64, 80] had [80, 64]"]),
    "integers": (_with({NORM: ("I8", (64,), bytes(64))}), ["of a dtype other than F32, F16, BF16", f"{NORM} I8"]),
    "FP8 alone": (_with(FP8), ["weight_block_size, which FP8 weights need", "asked two block sizes, had None"]),
    "FP8 of one scale": (
        _with({f"{EXPERT.removesuffix('.weight')}.weight_scale": f32(np.ones(1))}),
        ["already quantised", "weight_scale"],
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    damage, words = TENSORS[case]
    damage(folder, write_checkpoint(folder.parent / "weights", OLMOE))
    checkpoint_refused(capsys, folder, words, CheckpointError)


@pytest.mark.parametrize("experts", ["f32", "f16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [EXPERT, NORM, HEAD, "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_finite(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, value: float, experts: str
) -> None:
    weights = write_checkpoint(folder.parent / "weights", OLMOE)
    weights[name].flat[-1] = value
    _with({})(folder, weights)
    words = [name, "holds NaN" if np.isnan(value) else "holds infinity", "1 of "]
    check_command(capsys, ["pack", folder, folder.parent / "out", "--experts", experts], words, folder.parent)


# --- which files


def _shards(folder: Path, weights: Weights) -> None:
    (folder / SINGLE).unlink(missing_ok=True)
    for number, name in enumerate(SHARDS):
        write_safetensors(folder / name, {key: f32(weights[key]) for key in sorted(weights)[number::3]})


def _index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _link(folder: Path, weights: Weights) -> None:
    _shards(folder, weights)
    (folder / "sub").symlink_to(folder.parent)
    _index(folder, {HEAD: "sub/outside.safetensors"})


def _pickles(folder: Path, weights: Weights) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n")


def _lost(folder: Path, weights: Weights, index: bool = False) -> None:
    _shards(folder, weights)
    if index:
        _index(folder, {name: SHARDS[number % 3] for number, name in enumerate(sorted(weights))})
    (folder / SHARDS[1]).unlink()


def _lacking(folder: Path, weights: Weights) -> None:
    _index(folder, {name: SHARDS[number % 3] for number, name in enumerate(sorted(weights))})
    _shards(folder, {name: array for name, array in weights.items() if name != EXPERT})


def _two(folder: Path, weights: Weights) -> None:
    _shards(folder, weights)
    write_safetensors(folder / SHARDS[1], {name: f32(weights[name]) for name in sorted(weights)[0::3]})


def _pointing(name: Any) -> Callable[[Path, Weights], Any]:
    return lambda folder, weights: (_shards(folder, weights), _index(folder, {HEAD: name}))


FILES: dict[str, tuple[Callable[[Path, Weights], Any], list[str]]] = {
    "index points up": (_pointing("../outside.safetensors"), [HEAD, "not a safetensors file of this directory"]),
    "index points to a path": (
        _pointing("/etc/outside.safetensors"),
        ["/etc/outside.safetensors", "of this directory"],
    ),
    "index points through a link": (_link, ["sub/outside.safetensors", "of this directory", "Delete the index"]),
    "index points to a pickle": (_pointing("pytorch_model.bin"), ["pytorch_model.bin", "of this directory"]),
    "index points to a number": (_pointing(7), ["of this directory"]),
    "index is no map": (lambda f, w: (_shards(f, w), _index(f, [])), ["has no weight_map", "Delete the index"]),
    "index is not JSON": (lambda f, w: (_shards(f, w), (f / INDEX).write_text("{")), [INDEX, "is not JSON"]),
    "pickles only": (_pickles, ["pytorch_model.bin may be a pickle", "get the model as safetensors"]),
    "missing shard without an index": (_lost, [f"missing shards: {SHARDS[1]}", "Download the missing files"]),
    "missing shard with an index": (lambda f, w: _lost(f, w, index=True), [f"missing shards: {SHARDS[1]}"]),
    "shard lacks its tensor": (_lacking, ["1 missing", EXPERT]),
    "tensor in two shards": (_two, ["lies in two files", SHARDS[0], SHARDS[1]]),
}


@pytest.mark.parametrize("case", FILES)
def test_files(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    weights = write_checkpoint(folder.parent / "weights", OLMOE)
    write_safetensors(folder.parent / "outside.safetensors", {HEAD: f32(weights[HEAD])})
    damage, words = FILES[case]
    damage(folder, weights)
    checkpoint_refused(capsys, folder, words, CheckpointError)


def _stray(folder: Path, weights: Weights) -> None:
    _shards(folder, weights)
    write_safetensors(folder / "consolidated.safetensors", {HEAD: f32(-weights[HEAD])})


def _linked(folder: Path, weights: Weights) -> None:
    """As a download cache keeps its files."""
    _shards(folder, weights)
    for name in SHARDS:
        (folder / name).rename(folder.parent / f"blob-{name}")
        (folder / name).symlink_to(folder.parent / f"blob-{name}")


GOOD: dict[str, Callable[[Path, Weights], Any]] = {
    "single file": lambda folder, weights: None,
    "no index": _shards,
    "stale index": lambda f, w: (_shards(f, w), _index(f, {name: "old-00001-of-00009.safetensors" for name in w})),
    "wrong index": lambda f, w: (_shards(f, w), _index(f, {name: SHARDS[0] for name in w})),
    "stray second file": _stray,
    "links to a download cache": _linked,
}


@pytest.mark.parametrize("case", GOOD)
def test_the_headers_are_the_truth(folder: Path, case: str) -> None:
    """However the same tensors lie, the package is the same."""
    weights = write_checkpoint(folder.parent / "weights", OLMOE)
    pack(folder.parent / "weights", folder.parent / "expected")
    GOOD[case](folder, weights)
    assert main(["pack", str(folder), str(folder.parent / "out"), "-q"]) == 0
    for name in ("experts.safetensors", "dense.safetensors", "model.json"):
        assert (folder.parent / "out" / name).read_bytes() == (folder.parent / "expected" / name).read_bytes()
    assert verify(folder.parent / "out").ok
