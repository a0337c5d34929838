from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from estream.errors import PackageError, PromptError
from estream.package.pack import pack
from estream.package.reader import Package
from estream.package.verify import verify
from estream.package.writer import Packing
from tests.support.tiny_packages import QWEN2_MOE, write_checkpoint

MOE_LAYER, PANELS = 2, 2  # layer 1 of three is dense; an expert of 40 channels is two panels of 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Packing, "graphs", lambda self: {"graphs/cpu/expert.onnx": b"graph"})
    write_checkpoint(tmp_path / "in", QWEN2_MOE)
    pack(tmp_path / "in", tmp_path / "out", experts="int8", panel=32)
    return tmp_path / "out"


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("dense", ["f32", "f16"])
def test_embedding_rows(tmp_path: Path, dense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packing, "graphs", lambda self: {})
    weights = write_checkpoint(tmp_path / "in", QWEN2_MOE)["model.embed_tokens.weight"]
    pack(tmp_path / "in", tmp_path / "out", experts="f32", dense=dense)
    with Package.open(tmp_path / "out").open_embedding() as embedding:
        rows = embedding.rows(np.array([49, 0, 7, 49, 7]))
    expected = weights[[49, 0, 7, 49, 7]]
    assert rows.dtype == np.float32 and rows.flags.c_contiguous
    assert np.array_equal(rows, expected if dense == "f32" else expected.astype(np.float16).astype(np.float32))


def test_embedding_rows_of_nothing_and_of_bad_ids(folder: Path) -> None:
    with Package.open(folder).open_embedding() as embedding:
        assert embedding.rows(np.array([], np.int64)).shape == (0, 32)
        for bad in (-1, 50):
            with pytest.raises(PromptError, match=f"asked {bad}, had 0 to 49"):
                embedding.rows(np.array([1, bad]))


def test_checksums_are_those_of_the_panels(folder: Path) -> None:
    package = Package.open(folder)
    data = package.experts_file.read_bytes()
    for layer in package.pool.moe_layers:
        for panel in range(package.pool.panels_per_layer):
            start = package.pool.panel_offset(layer, panel)
            assert package.checksum(layer, panel) == zlib.crc32(data[start : start + package.pool.panel.panel_bytes])


@pytest.mark.parametrize("name", ["experts.safetensors", "dense.safetensors", "checksums.bin", "tokenizer.json"])
def test_open_refuses_missing_and_truncated_files(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(PackageError, match=f"{name}: size in bytes .asked {len(content)}, had {len(content) - 1}"):
        Package.open(folder)
    (folder / name).unlink()
    with pytest.raises(PackageError, match=f"{name}: No such file"):
        Package.open(folder)


def test_open_refuses_what_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="no such folder"):
        Package.open(tmp_path / "none")
    with pytest.raises(PackageError, match=r"model\.json: No such file"):
        Package.open(tmp_path)


def test_open_compares_headers_with_the_architecture(folder: Path) -> None:
    dense = folder / "dense.safetensors"
    content = dense.read_bytes()
    dense.write_bytes(content.replace(b'"layers.2.router"', b'"layers.2.rooter"', 1))
    with pytest.raises(PackageError, match=r"layers\.2\.router .asked F32 \[32, 5\] at \d+, had nothing"):
        Package.open(folder)
    dense.write_bytes(content)
    flip(folder / "experts.safetensors", 2)
    with pytest.raises(PackageError, match="start of the data"):
        Package.open(folder)


def test_verify_of_a_good_package(folder: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    report = verify(folder, progress=lambda *call: calls.append(call))
    assert report.ok and report.damaged == () and report.to_dict()["ok"] is True
    sizes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert report.bytes == calls[-1][1] == calls[-1][2] == sizes - (folder / "model.json").stat().st_size


def test_verify_names_each_damaged_record(folder: Path) -> None:
    package = Package.open(folder)
    pool = package.pool
    flip(package.experts_file, pool.panel_offset(MOE_LAYER, 3 * PANELS + 1) + 5)
    flip(package.experts_file, pool.panel_offset(0, 0) + pool.panel.panel_bytes - 1)
    flip(package.dense_file, package.dense["layers.0.q"].offset + 9)
    flip(package.dense_file, package.dense["layers.1.ffn"].offset + pool.panel.panel_bytes + 9)
    Package.open(folder)  # sizes and headers are as they were
    assert verify(folder).damaged == (
        "layers.0.q",
        "layers.1.ffn panel 1",
        "layers.0.experts.0 panel 0",
        "layers.2.experts.3 panel 1",
    )


def test_verify_sees_headers_fills_and_other_files(folder: Path) -> None:
    package = Package.open(folder)
    norm = package.dense["final_norm"]
    flip(package.dense_file, norm.offset + norm.nbytes)
    flip(folder / "tokenizer.json", 0)
    (folder / "graphs" / "cpu" / "expert.onnx").unlink()
    assert verify(folder).damaged == (
        "dense.safetensors: header or fill",
        "graphs/cpu/expert.onnx: No such file or directory",
        "tokenizer.json",
    )


def test_verify_of_truncated_pool_names_the_records_that_are_gone(folder: Path) -> None:
    package = Package.open(folder)
    size = package.experts_file.stat().st_size
    with open(package.experts_file, "r+b") as file:
        file.truncate(size - package.pool.panel.panel_bytes - 1)
    assert verify(folder).damaged == (
        f"experts.safetensors: {size - package.pool.panel.panel_bytes - 1} bytes instead of {size}",
        "layers.2.experts.3 panel 0",
        "layers.2.experts.3 panel 1",
    )


def test_verify_does_not_blame_records_for_damaged_checksums(folder: Path) -> None:
    flip(folder / "checksums.bin", 3)
    assert verify(folder).damaged == ("checksums.bin",)
    flip(folder / "experts.safetensors", -1 + (folder / "experts.safetensors").stat().st_size)
    assert verify(folder).damaged == ("checksums.bin", "experts.safetensors")
