"""Damaged packages where a user meets them: `estream verify`, `estream inspect`, `Package.open`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from estream.cli.main import main
from estream.errors import PackageError
from estream.models import family
from estream.package.manifest import Manifest
from estream.package.pack import pack
from estream.package.reader import Package
from estream.package.verify import verify
from estream.package.writer import Packing
from tests.support.refusals import check_command, check_error
from tests.support.tiny_packages import QWEN2_MOE, write_checkpoint

GRAPH = "graphs/cpu/expert.onnx"
SMALL = [GRAPH, "checksums.bin", "tokenizer.json"]
FILES = [*SMALL, "experts.safetensors", "dense.safetensors"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_checkpoint(folder / "in", QWEN2_MOE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packing, "graphs", lambda self: {GRAPH: b"graph" * 99})
        pack(folder / "in", folder / "q.estream", experts="int8", panel=32)
    return folder / "q.estream"


@pytest.fixture
def package(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "q.estream"))


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 4
    file.write_bytes(content)


def refused(package: Path, capsys: Capture, words: list[str]) -> None:
    """`Package.open` (what a prefill does first) and `inspect` refuse it in the same words."""
    with pytest.raises(PackageError) as caught:
        Package.open(package)
    check_error(caught.value, words)
    check_command(capsys, ["inspect", package], words, package.parent)


def damaged(package: Path, capsys: Capture, expected: list[str]) -> None:
    """`verify` names exactly these."""
    assert list(verify(package).damaged) == expected
    check_command(capsys, ["verify", package], ["is damaged", "Copy it again"], package.parent)
    main(["verify", str(package)])
    assert [line[9:] for line in capsys.readouterr().out.splitlines() if line.startswith("damaged: ")] == expected


# --- flipped bytes


@pytest.mark.parametrize("name", SMALL)
def test_a_flipped_byte_in_a_small_file_is_seen_when_it_opens(package: Path, capsys: Capture, name: str) -> None:
    flip(package / name, 1)
    refused(package, capsys, [name, "is damaged", "estream verify"])
    damaged(package, capsys, [name])


def test_a_flipped_byte_in_the_weights_is_named_by_verify(package: Path, capsys: Capture) -> None:
    opened = Package.open(package)
    flip(opened.experts_file, opened.pool.panel_offset(2, 5) + 77)
    flip(opened.dense_file, opened.dense["embed"].offset + 1)
    flip(opened.dense_file, opened.dense["layers.2.shared"].offset + opened.pool.panel.panel_bytes)
    damaged(package, capsys, ["embed", "layers.2.shared panel 1", "layers.2.experts.2 panel 1"])


def test_every_flipped_byte_of_model_json_is_seen(package: Path) -> None:
    text = (package / "model.json").read_bytes()
    for offset in range(0, len(text), 7):
        for bit in (1, 16):
            changed = bytearray(text)
            changed[offset] ^= bit
            try:
                manifest = Manifest.from_json(bytes(changed))
            except PackageError as error:
                check_error(error, ["model.json"])
            else:
                assert manifest.to_json() == text and changed[offset : offset + 1].isspace()


@pytest.mark.parametrize(
    "field, value",
    [("rope_theta", 10001.0), ("rms_norm_eps", 1e-5), ("num_experts_per_tok", 1), ("norm_topk_prob", True)],
)
def test_facts_that_nothing_follows_from_are_guarded(package: Path, capsys: Capture, field: str, value: Any) -> None:
    document = json.loads((package / "model.json").read_bytes())
    assert document["config"][field] != value
    document["config"][field] = value
    (package / "model.json").write_text(json.dumps(document))
    refused(package, capsys, ["model.json is damaged: it does not match its checksum", "Pack the checkpoint again"])
    check_command(capsys, ["verify", package], ["model.json is damaged"], package.parent)


# --- missing, truncated, of another kind


@pytest.mark.parametrize("name", FILES)
def test_missing_files(package: Path, capsys: Capture, name: str) -> None:
    (package / name).unlink()
    refused(package, capsys, [name, "No such file"])
    assert f"{name}: No such file or directory" in verify(package).damaged
    assert main(["verify", str(package)]) == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 0.5, -1])
def test_truncated_files(package: Path, capsys: Capture, name: str, left: float) -> None:
    size = (package / name).stat().st_size
    os.truncate(package / name, int(size * left) if left >= 0 else size - 1)
    refused(package, capsys, [name, "size in bytes", f"asked {size}"])
    assert any(name in line for line in verify(package).damaged)
    assert main(["verify", str(package)]) == 1


def test_truncated_pool_names_the_records_that_are_gone(package: Path, capsys: Capture) -> None:
    pool = package / "experts.safetensors"
    size = pool.stat().st_size
    os.truncate(pool, size - 16384 * 3)
    gone = ["layers.2.experts.2 panel 1", "layers.2.experts.3 panel 0", "layers.2.experts.3 panel 1"]
    damaged(package, capsys, [f"experts.safetensors: {size - 16384 * 3} bytes instead of {size}", *gone])


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


@pytest.mark.parametrize("put", [_pipe, _folder, _loop])
@pytest.mark.parametrize("name", FILES)
def test_something_else_under_the_name_of_a_file(
    package: Path, capsys: Capture, name: str, put: Callable[[Path], None]
) -> None:
    put(package / name)
    refused(package, capsys, [name])
    assert any(line.startswith(f"{name}: ") for line in verify(package).damaged)


def test_a_pipe_under_the_name_of_model_json(package: Path, capsys: Capture) -> None:
    _pipe(package / "model.json")
    with pytest.raises(PackageError, match=r"model\.json: is not a regular file"):
        Package.open(package)
    check_command(capsys, ["verify", package], ["model.json", "is not a regular file"], package.parent)


# --- model.json


def test_another_version(package: Path, capsys: Capture) -> None:
    document = json.loads((package / "model.json").read_bytes()) | {"version": 9, "something": "new"}
    (package / "model.json").write_text(json.dumps(document))
    words = ["version of the package", "asked 3, had 9", "Pack the checkpoint again with this version of EStream"]
    refused(package, capsys, words)
    check_command(capsys, ["verify", package], words, package.parent)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "graphs/../../x", "a\0b", "\ud800", "\x1b[2J", "a//b", ".hidden", "model.json", ""]
)
def test_files_outside_of_the_package_are_not_named(package: Path, capsys: Capture, name: str) -> None:
    document = json.loads((package / "model.json").read_bytes())
    document["files"][name] = document["files"]["checksums.bin"]
    (package / "model.json").write_text(json.dumps(document))
    refused(package, capsys, ["model.json: field files.", "a relative path inside the package"])


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": 2**24},
        {"hidden_size": 2**30, "num_attention_heads": 2**20},
        {"num_experts": 4096, "num_hidden_layers": 4096},
        {"shared_expert_intermediate_size": 2**31 - 1, "num_hidden_layers": 4000},
    ],
)
def test_enormous_models_are_refused_at_once(package: Path, capsys: Capture, config: dict[str, Any]) -> None:
    """model.json is whole and agrees with itself; the files do not agree with it. Must end, and soon."""
    manifest = replace(Manifest.read(package), family=family("qwen2_moe").from_config(QWEN2_MOE | config))
    (package / "model.json").write_bytes(manifest.to_json())
    refused(package, capsys, [str(package)])
    assert main(["verify", str(package)]) == 1
    assert "Traceback" not in capsys.readouterr().err
