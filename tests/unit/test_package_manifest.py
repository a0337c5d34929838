from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from estream.errors import PackageError
from estream.models import family
from estream.package.manifest import FileEntry, Manifest
from tests.support.tiny_packages import OLMOE, QWEN2_MOE

FILES = {
    name: FileEntry(16384, "0123456789abcdef" * 4)
    for name in ("experts.safetensors", "dense.safetensors", "checksums.bin", "graphs/cpu/expert.onnx")
}


def manifest(config: dict[str, Any] = OLMOE, source: dict[str, Any] | None = None) -> Manifest:
    return Manifest(
        family=family(config["model_type"]).from_config(config),
        experts="int8",
        dense="f16",
        width=32,
        pool_offset=32768,
        dense_offset=16384,
        files=FILES,
        source=source or {"kind": "checkpoint"},
        estream="0.1.0",
    )


@pytest.mark.parametrize("config", [OLMOE, QWEN2_MOE], ids=["olmoe", "qwen2_moe"])
@pytest.mark.parametrize("source", [{"kind": "checkpoint"}, {"kind": "synth", "preset": "tiny", "seed": 3}])
def test_survives_the_round_trip(config: dict[str, Any], source: dict[str, Any]) -> None:
    text = manifest(config, source).to_json()
    read = Manifest.from_json(text)
    assert read.to_json() == text
    assert read.family.architecture() == manifest(config).family.architecture()
    assert read.pool == manifest(config).pool and read.files == FILES and read.source == source


def test_document_golden() -> None:
    document = manifest(QWEN2_MOE).to_dict()
    assert (document["format"], document["version"], document["family"]) == ("estream", 3, "qwen2_moe")
    assert document["int8_zero_point"] == 128
    assert document["panel"] == {
        "hidden": 32,
        "width": 32,
        "chunks": 1,
        "bytes": 16384,
        "parts": [
            {"name": "gate", "dtype": "U8", "shape": [32, 32], "offset": 0},
            {"name": "up", "dtype": "U8", "shape": [32, 32], "offset": 1024},
            {"name": "down", "dtype": "U8", "shape": [32, 32], "offset": 2048},
            {"name": "gate_scale", "dtype": "F16", "shape": [32], "offset": 3072},
            {"name": "mid_scale", "dtype": "F16", "shape": [32], "offset": 3200},
        ],
    }
    pool = {"data_offset": 32768, "layers": [0, 2], "experts": 4, "panels_per_expert": 2, "record_bytes": 32768}
    assert document["pool"] == pool
    assert [layer["ffn"] for layer in document["layers"]] == ["moe", "dense", "moe"]
    assert (document["shared_panels"], document["ffn_panels"]) == (4, 3)
    assert document["head"] == {"slices": 1, "width": 64}


Change = Callable[[dict[str, Any]], Any]
CHANGES: list[tuple[Change, str]] = [
    (lambda d: d.update(format="gguf"), "format"),
    (lambda d: d.update(version=1), "version"),
    (lambda d: d.update(version=True), "version"),
    (lambda d: d.pop("version"), "version"),
    (lambda d: d.update(colour="blue"), "unknown field colour"),
    (lambda d: d.pop("layers"), "layers"),
    (lambda d: d.update(family="unknown"), "unknown_model|unknown model_type"),
    (lambda d: d.update(family=3), "family"),
    (lambda d: d.update(config=[]), "config"),
    (lambda d: d["config"].update(hidden_size="64"), "hidden_size"),
    (lambda d: d["config"].update(hidden_size=0), "hidden_size"),
    (lambda d: d["config"].update(new_field=1), "new_field"),
    (lambda d: d["config"].update(new_field=None), "config.new_field"),
    (lambda d: d["config"].pop("num_experts"), "num_experts|pool.experts"),
    (lambda d: d.update(experts="int3"), "experts"),
    (lambda d: d.update(dense=None), "dense"),
    (lambda d: d["panel"].update(width=48), "panel.width"),
    (lambda d: d["panel"].update(width=32.0), "panel.width"),
    (lambda d: d["panel"].update(width=1 << 40), "panel width"),
    (lambda d: d["panel"].update(bytes=1), "panel.bytes"),
    (lambda d: d["panel"].update(chunks=2), "panel.chunks"),
    (lambda d: d.update(int8_zero_point=0), "int8_zero_point"),
    (lambda d: d["panel"]["parts"][2].update(offset=0), "panel.parts.2.offset"),
    (lambda d: d["panel"]["parts"].pop(), "panel.parts"),
    (lambda d: d["panel"].update(extra=1), "unknown field panel.extra"),
    (lambda d: d["pool"].update(data_offset=100), "pool.data_offset"),
    (lambda d: d["pool"].update(data_offset=-16384), "pool.data_offset"),
    (lambda d: d["pool"].update(experts=4), "pool.experts"),
    (lambda d: d["pool"].update(layers=[0]), "pool.layers"),
    (lambda d: d.update(dense_data_offset=True), "dense_data_offset"),
    (lambda d: d["layers"][1].update(window=5), "layers.1.window"),
    (lambda d: d["head"].update(width=64), "head.width"),
    (lambda d: d.update(shared_panels=1), "shared_panels"),
    (lambda d: d["files"].pop("checksums.bin"), "files.checksums.bin"),
    (lambda d: d["files"]["checksums.bin"].update(sha256="ABC"), "files.checksums.bin.sha256"),
    (lambda d: d["files"]["checksums.bin"].update(bytes=-1), "files.checksums.bin.bytes"),
    (lambda d: d["files"]["checksums.bin"].update(mtime=1), "files.checksums.bin"),
    (lambda d: d["files"].update({"../x": d["files"]["checksums.bin"]}), "files.../x"),
    (lambda d: d["files"].update({"/etc/passwd": d["files"]["checksums.bin"]}), "files./etc/passwd"),
    (lambda d: d["source"].update(kind="magic"), "source.kind"),
    (lambda d: d["source"].update(path="/home"), "source.path"),
    (lambda d: d.update(source={"kind": "synth", "preset": "x", "seed": "1"}), "source.seed"),
    (lambda d: d.update(estream=1), "estream"),
]


@pytest.mark.parametrize("change, field", CHANGES, ids=[f"{index}-{field}" for index, (_, field) in enumerate(CHANGES)])
def test_refuses_and_names_the_field(change: Change, field: str) -> None:
    document = json.loads(manifest().to_json())
    change(document)
    with pytest.raises(PackageError) as caught:
        Manifest.from_json(json.dumps(document).encode())
    assert any(word in str(caught.value) for word in field.split("|")), caught.value


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff", b'{"format": "estream", "format": "estream"}', b"[" * 99999]
)
def test_refuses_what_is_no_document(text: bytes) -> None:
    with pytest.raises(PackageError, match=r"model\.json"):
        Manifest.from_json(text)


def test_other_version_says_what_to_do() -> None:
    document = json.loads(manifest().to_json()) | {"version": 7}
    with pytest.raises(PackageError, match=r"asked 3, had 7.*Pack the checkpoint again"):
        Manifest.from_json(json.dumps(document).encode())
