"""Output files: what may be replaced, where links lead, which name an error tells."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from estream.cli.main import main
from estream.cli.npy_sink import NpySink
from estream.cli.options import check_outputs
from estream.errors import PackageError, UsageError
from estream.package.atomic import building
from estream.telemetry.trace import Trace


@pytest.mark.parametrize("option", ["--all-logits", "--trace"])
@pytest.mark.parametrize("name", ["pipe", "link to the pipe"])
def test_only_regular_files_are_replaced(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to the pipe").symlink_to("pipe")
    assert main(["prefill", str(tmp_path / "no package"), "--ids", "1", option, str(tmp_path / name)]) == 2
    assert f"{option}: {tmp_path / name} is not a regular file" in capsys.readouterr().err
    with pytest.raises(UsageError, match="not a regular file"):
        Trace().write(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "trace.json", tmp_path / "link"
    link.symlink_to(target)
    for _ in ("the target is absent", "and there"):
        check_outputs({"--trace": link}, tmp_path / "x.estream")
        Trace().write(link)
        assert link.is_symlink() and "traceEvents" in json.loads(target.read_text())
    assert [entry.name for entry in target.parent.iterdir()] == ["trace.json"]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"):
        check_outputs({"--trace": loop}, tmp_path)


def test_the_package_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, link = tmp_path / "x.estream", tmp_path / "link"
    (package / "graphs").mkdir(parents=True)
    (package / "model.json").write_text("{}")
    link.symlink_to(package / "model.json")
    for path in (package / "model.json", package / "graphs" / "new", link, package / "graphs" / ".." / "new"):
        assert main(["prefill", str(package), "--ids", "1", "--trace", str(path)]) == 2
        assert f"--trace: {path} is inside the package" in capsys.readouterr().err
    alias = tmp_path / "alias"
    alias.symlink_to(package)
    with pytest.raises(UsageError, match="inside the package"):
        check_outputs({"--trace": package / "new"}, alias)
    check_outputs({"--trace": tmp_path / "x.estream.json"}, package)
    assert (package / "model.json").read_text() == "{}"


def test_two_outputs_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UsageError, match="--all-logits and --trace name the same file"):
        check_outputs({"--all-logits": tmp_path / "file", "--trace": tmp_path / "link"}, tmp_path / "x.estream")
    check_outputs({"--all-logits": tmp_path / "file", "--trace": tmp_path / "other"}, tmp_path / "x.estream")


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError) as logits:
        NpySink(tmp_path / "x.npy", 1, 1)
    with pytest.raises(OSError) as trace:
        Trace().write(tmp_path / "x.json")
    assert [error.value.filename for error in (logits, trace)] == [str(tmp_path / "x.npy"), str(tmp_path / "x.json")]
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_is_taken_and_a_longer_one_is_told(tmp_path: Path) -> None:
    Trace().write(tmp_path / ("x" * 255))
    with pytest.raises(OSError) as long:
        Trace().write(tmp_path / ("x" * 256))
    assert long.value.filename == str(tmp_path / ("x" * 256))


@pytest.mark.parametrize(
    ("code", "step"), [(errno.ENAMETOOLONG, "shorter name"), (errno.EACCES, "permissions"), (errno.ENOSPC, "space")]
)
def test_a_package_that_cannot_be_created(
    code: int, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PackageError, match=f"cannot be created: {os.strerror(code)}") as told, building(tmp_path / "x"):
        pass
    assert step in str(told.value) and "verify" not in str(told.value)
