from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from estream.errors import CheckpointError, PackageError, UsageError
from estream.models import family
from estream.models.base import Source
from estream.package.files import safetensors_header
from estream.package.pack import narrowed, pack
from estream.package.quantise import part_views
from estream.package.reader import Package
from estream.package.safetensors_header import read_header
from estream.package.writer import Packing
from tests.support.schemes import dense_matrix
from tests.support.tiny_packages import OLMOE, QWEN2_MOE, save_weights, write_checkpoint

REAL_GRAPHS = Packing.graphs


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are qnn_graphs' affair; here they are files like any other."""
    monkeypatch.setattr(Packing, "graphs", lambda self: {"graphs/cpu/expert.onnx": b"graph"})


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def dense_array(package: Package, name: str) -> np.ndarray:
    with safe_open(package.dense_file, "numpy") as file:
        return file.get_tensor(name)


@pytest.mark.parametrize("config", [OLMOE, QWEN2_MOE], ids=["olmoe", "qwen2_moe"])
def test_f32_package_holds_the_checkpoint(tmp_path: Path, config: dict[str, Any]) -> None:
    weights = write_checkpoint(tmp_path / "in", config)
    result = pack(tmp_path / "in", tmp_path / "out.estream", experts="f32", panel=32)
    package = Package.open(tmp_path / "out.estream")
    model, arch, layout = package.family, package.architecture, package.pool.panel

    def original(source: Source) -> np.ndarray:
        return weights[source.name].T if source.transpose else weights[source.name]

    vocab = arch.vocab
    assert np.array_equal(dense_array(package, "embed"), weights["model.embed_tokens.weight"])
    head = np.concatenate([dense_array(package, f"head.{s}") for s in range(package.head_slices)], axis=1)
    assert np.array_equal(head[:, :vocab], original(model.model_sources(weights)["head"][0]))
    assert not head[:, vocab:].any()
    for plan in arch.layers:
        for name, sources in model.layer_sources(plan.index).items():
            expected = np.concatenate([original(source) for source in sources], axis=-1)
            assert np.array_equal(dense_array(package, f"layers.{plan.index}.{name}"), expected)
        records = {f"layers.{plan.index}.shared": model.shared_sources(plan.index) if plan.ffn == "moe" else None}
        records[f"layers.{plan.index}.ffn"] = model.ffn_sources(plan.index) if plan.ffn == "dense" else None
        for name, expert in records.items():
            if expert is not None:
                check_record(
                    dense_array(package, name), layout, [original(s) for s in (expert.gate, expert.up, expert.down)]
                )
    with safe_open(package.experts_file, "numpy") as file:
        assert len(file.keys()) == len(arch.moe_layers) * arch.experts
        for layer in arch.moe_layers:
            for index in range(arch.experts):
                expert = model.expert_sources(layer, index)
                record = file.get_tensor(f"layers.{layer}.experts.{index}")
                check_record(record, layout, [original(s) for s in (expert.gate, expert.up, expert.down)])
    assert result.panels_per_expert == package.pool.panels_per_expert > 1
    assert result.total_bytes == sum(path.stat().st_size for path in result.path.rglob("*") if path.is_file())
    assert json.loads(json.dumps(result.to_dict()))["files"]["model.json"] > 0


def check_record(record: np.ndarray, layout: Any, expected: list[np.ndarray]) -> None:
    panels = [part_views(layout, panel) for panel in record.reshape(-1, layout.panel_bytes)]
    gate, up, down = expected
    channels = len(down)
    for name, matrix in (("gate", gate), ("up", up)):
        packed = np.concatenate([panel[name] for panel in panels], axis=1)
        assert np.array_equal(packed[:, :channels], matrix) and not packed[:, channels:].any()
    packed = np.concatenate([panel["down"] for panel in panels])
    assert np.array_equal(packed[:channels], down) and not packed[channels:].any()


@pytest.mark.parametrize("experts, dense, embed, q", [("f16", "f16", "F16", "F16"), ("int8", "int8", "F16", "U8")])
def test_dense_follows_experts_by_default(tmp_path: Path, experts: str, dense: str, embed: str, q: str) -> None:
    weights = write_checkpoint(tmp_path / "in", OLMOE)
    pack(tmp_path / "in", tmp_path / "out", experts=experts)
    package = Package.open(tmp_path / "out")
    assert (package.manifest.experts, package.manifest.dense) == (experts, dense)
    assert package.dense["embed"].dtype == embed and package.dense["layers.1.q"].dtype == q
    assert package.dense["layers.1.router"].dtype == package.dense["layers.1.attn_norm"].dtype == "F32"
    for name, source in (("layers.1.o", "model.layers.1.self_attn.o_proj.weight"), ("head.0", "lm_head.weight")):
        packed = dense_matrix(package, name)
        expected = weights[source].T
        assert np.abs(packed[:, : expected.shape[1]] - expected).max() < 0.005


def test_every_tensor_and_panel_is_aligned_and_safetensors_reads_both_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", QWEN2_MOE)
    pack(tmp_path / "in", tmp_path / "out", experts="int8")
    package = Package.open(tmp_path / "out")
    for file in (package.experts_file, package.dense_file):
        header = read_header(file)
        assert header.data_offset % 16384 == 0 and header.file_bytes % 16384 == 0
        starts = [entry.start for entry in header.tensors.values() if not entry.name.startswith("__pad.")]
        assert all(start % 16384 == 0 for start in starts)
        with safe_open(file, "numpy") as opened:
            assert set(opened.keys()) == set(header.tensors)
    layer = [name for name in package.dense if name.startswith("layers.")]
    assert [int(name.split(".")[1]) for name in layer] == sorted(int(name.split(".")[1]) for name in layer)
    assert list(package.dense)[:3] == ["embed", "final_norm", "head.0"]


def test_header_of_more_than_16_kib_moves_the_data() -> None:
    header = safetensors_header((f"layers.0.experts.{index}", "U8", (16384,), 16384) for index in range(1000))
    assert len(header) % 16384 == 0 and len(header) > 16384
    assert 8 + int.from_bytes(header[:8], "little") == len(header)
    assert json.loads(header[8:])["layers.0.experts.999"]["data_offsets"] == [999 * 16384, 1000 * 16384]


def test_packing_is_reproducible_and_names_no_path_or_time(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one" / "in", OLMOE)
    shutil.copytree(tmp_path / "one" / "in", tmp_path / "two" / "elsewhere")
    pack(tmp_path / "one" / "in", tmp_path / "one" / "out", experts="int8")
    pack(tmp_path / "two" / "elsewhere", tmp_path / "two" / "other", experts="int8")
    assert tree(tmp_path / "one" / "out") == tree(tmp_path / "two" / "other")
    assert str(tmp_path) not in (tmp_path / "one" / "out" / "model.json").read_text()


def test_tokenizer_and_graphs_are_in_the_package(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", OLMOE)
    pack(tmp_path / "in", tmp_path / "out")
    package = Package.open(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert package.graph("cpu", "expert").read_bytes() == b"graph"
    with pytest.raises(PackageError, match="no graph head for cpu"):
        package.graph("cpu", "head")


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", OLMOE)
    calls: list[tuple[str, int, int]] = []
    result = pack(tmp_path / "in", tmp_path / "out", progress=lambda *call: calls.append(call))
    for stage, name in (("dense", "dense.safetensors"), ("experts", "experts.safetensors")):
        done = [call[1] for call in calls if call[0] == stage]
        assert done == sorted(done) and done[-1] == result.files[name]
        assert {call[2] for call in calls if call[0] == stage} == {result.files[name]}


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.experts.2.down_proj.weight", "model.embed_tokens.weight",
                                    "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"])  # fmt: skip
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused_and_nothing_is_left(tmp_path: Path, tensor: str, value: float) -> None:
    weights = write_checkpoint(tmp_path / "in", OLMOE)
    weights[tensor].flat[11] = value
    save_weights(tmp_path / "in", weights)
    with pytest.raises(CheckpointError, match=tensor.replace(".", r"\.")):
        pack(tmp_path / "in", tmp_path / "out", experts="int8")
    assert sorted(os.listdir(tmp_path)) == ["in"]


@pytest.mark.parametrize("panel", [0, -32, 48, 33, 128])
def test_impossible_panel_widths(tmp_path: Path, panel: int) -> None:
    write_checkpoint(tmp_path / "in", OLMOE)  # intermediate 80: panels of 32, 64 or 96
    with pytest.raises(UsageError, match="panel width"):
        pack(tmp_path / "in", tmp_path / "out", panel=panel)


@pytest.mark.parametrize("schemes", [{"experts": "int3"}, {"dense": "bf16"}])
def test_unknown_schemes(tmp_path: Path, schemes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="unknown weight scheme"):
        pack(tmp_path / "in", tmp_path / "out", **schemes)  # type: ignore[arg-type]


def test_existing_package_needs_force_and_stays_when_the_new_one_fails(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "in", OLMOE)
    pack(tmp_path / "in", tmp_path / "out", experts="f32")
    before = tree(tmp_path / "out")
    with pytest.raises(UsageError, match="--force"):
        pack(tmp_path / "in", tmp_path / "out", experts="int8")
    damaged = {**weights, "lm_head.weight": np.full_like(weights["lm_head.weight"], np.nan)}
    save_weights(tmp_path / "in", damaged)
    with pytest.raises(CheckpointError):
        pack(tmp_path / "in", tmp_path / "out", experts="int8", force=True)
    assert tree(tmp_path / "out") == before
    save_weights(tmp_path / "in", weights)
    pack(tmp_path / "in", tmp_path / "out", experts="int8", force=True)
    assert Package.open(tmp_path / "out").manifest.experts == "int8"
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_interrupt_removes_the_partial_package(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", OLMOE)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "experts":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "in", tmp_path / "out", progress=interrupt)
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "in", OLMOE)
    needed = pack(tmp_path / "in", tmp_path / "measure").total_bytes
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed, 1, needed - 1))
    with pytest.raises(PackageError, match=rf"need .*\({needed} bytes\), have .*\({needed - 1} bytes\)"):
        pack(tmp_path / "in", tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed, 0, needed))
    pack(tmp_path / "in", tmp_path / "out")


def test_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "in", OLMOE)

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PackageError, match="no space left"):
        pack(tmp_path / "in", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_narrowed_cuts_the_axis_that_pick_leaves() -> None:
    table = np.arange(4 * 6 * 5).reshape(4, 6, 5)
    plain = narrowed(Source("w", (4, 6, 5)), 1, 3)
    assert np.array_equal(table[plain.pick], table[1:3])
    fused = narrowed(Source("w", (4, 6, 5), pick=(2, slice(3, 6))), 1, 2)
    assert np.array_equal(table[fused.pick], table[2, 4:5])
    striped = narrowed(Source("w", (4, 6, 5), pick=(2, slice(1, None, 2))), 1, 3)
    assert np.array_equal(table[striped.pick], table[2, 3::2])


def test_default_panel_width_is_one_shape_class_for_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", QWEN2_MOE)
    pack(tmp_path / "in", tmp_path / "out")
    package = Package.open(tmp_path / "out")
    assert package.pool.panel.width == 64  # 40, rounded up to 32s
    assert (package.pool.panels_per_expert, package.shared_panels, package.ffn_panels) == (1, 2, 2)
    assert family("qwen2_moe") is type(package.family)


def test_graphs_of_both_targets_are_written_and_repeat_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Packing, "graphs", REAL_GRAPHS)
    write_checkpoint(tmp_path / "in", QWEN2_MOE)
    for name in ("a", "b"):
        pack(tmp_path / "in", tmp_path / name, experts="int8")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    package = Package.open(tmp_path / "a")
    for target in ("cpu", "cpu-u8", "reference"):
        for graph in ("qkv", "attention", "o_router", "o_norm", "expert", "gather", "scatter_add", "head"):
            assert package.graph(target, graph).stat().st_size > 0
