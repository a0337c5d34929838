"""Damaged packages where they are run: an error that names the place, never an answer that is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from estream.cli.main import main
from estream.engine import Engine
from estream.errors import EStreamError, FlashError, PackageError
from estream.package.reader import Package
from estream.package.verify import verify
from tests.support.faults import IDS, last, make_package
from tests.support.refusals import check_command, check_error


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("whole"), experts="int8")


@pytest.fixture
def package(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "q.estream"))


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 64
    file.write_bytes(content)


def _inside(name: str, offset: int = 0) -> Callable[[Package], tuple[Path, int]]:
    return lambda package: (package.dense_file, package.dense[name].offset + offset)


DENSE = {
    "a weight": (_inside("layers.0.q", 3), "dense.safetensors: layers.0.q:"),
    "a norm": (_inside("layers.2.ffn_norm", 127), "dense.safetensors: layers.2.ffn_norm:"),
    "a shared expert": (_inside("layers.2.shared", 16384 + 5), "dense.safetensors: layers.2.shared panel 1:"),
    "the head": (_inside("head.0", 1), "dense.safetensors: head.0:"),
    "the embedding": (_inside("embed", 2999), "dense.safetensors: embed:"),
}


@pytest.mark.parametrize("case", DENSE)
def test_verify_reads_names_damaged_dense_weights_when_it_opens(
    package: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    place, label = DENSE[case]
    flip(*place(Package.open(package)))
    with pytest.raises(EStreamError) as caught:
        Engine(package, threads=1, verify_reads=True)
    assert isinstance(caught.value, FlashError | PackageError)
    check_error(caught.value, [label, "the bytes read are not those that were packed", "estream verify"])
    command = ["prefill", package, "-q", "--ids", "1 2 3", "--verify-reads"]
    check_command(capsys, command, [label], package.parent)
    assert [*verify(package).damaged] == [label.removeprefix("dense.safetensors: ").removesuffix(":")]


@pytest.mark.parametrize("resident", ["none", "all"])
def test_verify_reads_names_a_damaged_record(package: Path, capsys: pytest.CaptureFixture[str], resident: str) -> None:
    opened = Package.open(package)
    for expert in range(4):  # whichever are routed to
        flip(opened.experts_file, opened.pool.panel_offset(2, 2 * expert + 1) + 9)
    command = ["prefill", package, "-q", "--ids", "1 2 3", "--verify-reads", "--resident", resident]
    words = ["layer 2, expert ", "panel 1: the bytes read are not those that were packed", "estream verify"]
    check_command(capsys, command, words, package.parent)


def test_verify_reads_of_a_whole_package_changes_nothing(package: Path) -> None:
    with Engine(package, threads=1) as plain, Engine(package, threads=1, verify_reads=True) as checked:
        assert last(plain).tobytes() == last(checked).tobytes()


@pytest.mark.parametrize("name", ["model.json", "checksums.bin", "tokenizer.json", "graphs/cpu/qkv.onnx"])
def test_a_flipped_byte_in_a_small_file_stops_the_prefill(
    package: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    flip(package / name, (package / name).stat().st_size // 2)
    check_command(capsys, ["prefill", package, "-q", "--ids", "1 2 3"], [name], package.parent)


@pytest.mark.parametrize("name", ["experts.safetensors", "dense.safetensors", "checksums.bin", "graphs/cpu/head.onnx"])
@pytest.mark.parametrize("missing", [False, True])
def test_files_that_are_cut_or_missing_stop_the_prefill(
    package: Path, capsys: pytest.CaptureFixture[str], name: str, missing: bool
) -> None:
    content = (package / name).read_bytes()
    (package / name).unlink()
    if not missing:
        (package / name).write_bytes(content[:-1])
    word = "No such file" if missing else "size in bytes"
    check_command(capsys, ["prefill", package, "-q", "--ids", "1 2 3"], [name, word], package.parent)


def test_a_whole_package_still_answers(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same commands without the damage: what the tests above refuse is the damage."""
    for flags in ([], ["--verify-reads"], ["--verify-reads", "--resident", "all"]):
        assert main(["prefill", str(package), "--ids", " ".join(map(str, IDS)), *flags]) == 0
    assert main(["verify", str(package)]) == 0
    capsys.readouterr()
