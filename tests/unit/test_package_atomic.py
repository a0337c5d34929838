from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from estream.errors import PackageError, UsageError
from estream.package import atomic
from estream.package.atomic import building

ROOT = Path(__file__).resolve().parents[2]


def fill(folder: Path, content: str) -> None:
    (folder / "graphs").mkdir()
    (folder / "graphs" / "data").write_text(content)
    (folder / "model.json").write_text('{"format": "estream"}')


def make(out: Path, content: str, *, force: bool = False) -> None:
    with building(out, force=force) as folder:
        fill(folder, content)


def content(out: Path) -> str:
    return (out / "graphs" / "data").read_text()


@pytest.fixture(params=["exchange", "two renames"])
def replacing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    return str(request.param)


def test_new_package_appears_complete(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "parents" / "m.estream"
    with building(out) as folder:
        fill(folder, "new")
        assert not out.exists() and folder.parent == out.parent and folder.name.startswith(".")
    assert content(out) == "new" and os.listdir(out.parent) == ["m.estream"]


def test_force_replaces(tmp_path: Path, replacing: str) -> None:
    out = tmp_path / "m"
    make(out, "old")
    with building(out, force=True) as folder:
        fill(folder, "new")
        assert content(out) == "old"
    assert content(out) == "new" and os.listdir(tmp_path) == ["m"]


def test_exchange_swaps_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    if not atomic._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system has no renameat2 with RENAME_EXCHANGE")
    assert os.listdir(tmp_path / "a") == ["file"] and os.listdir(tmp_path / "b") == []
    with pytest.raises(FileNotFoundError):
        atomic._exchange(tmp_path / "a", tmp_path / "none")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_failure_leaves_the_old_one_and_no_rest(tmp_path: Path, error: type[BaseException]) -> None:
    make(tmp_path / "m", "old")
    with pytest.raises(error), building(tmp_path / "m", force=True) as folder:
        fill(folder, "new")
        raise error
    assert content(tmp_path / "m") == "old" and os.listdir(tmp_path) == ["m"]


def test_refuses_what_exists(tmp_path: Path) -> None:
    make(tmp_path / "m", "old")
    with pytest.raises(UsageError, match="--force"):
        make(tmp_path / "m", "new")
    assert content(tmp_path / "m") == "old"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "other json"])
def test_never_replaces_what_is_not_a_package(tmp_path: Path, kind: str, force: bool) -> None:
    out = tmp_path / "m"
    if kind == "file":
        out.write_text("precious")
    else:
        out.mkdir()
        if kind == "folder":
            (out / "photo").write_text("precious")
        elif kind == "other json":
            (out / "model.json").write_text('{"format": "something else"}')
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="not a packed model"):
        make(out, "new", force=force)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_follows_a_symbolic_link(tmp_path: Path) -> None:
    make(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    make(tmp_path / "link", "new", force=True)
    assert (tmp_path / "link").is_symlink() and content(tmp_path / "real") == "new"


def test_out_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UsageError), building(tmp_path / "m") as folder:
        fill(folder, "slow")
        make(tmp_path / "m", "quick")
    assert content(tmp_path / "m") == "quick" and os.listdir(tmp_path) == ["m"]


def test_no_space(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"need .* have "), building(tmp_path / "m", required_bytes=1 << 62):
        pass
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from estream.package import atomic
out, moment = Path(sys.argv[1]), sys.argv[2]
kill = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
if moment == "between renames":
    atomic._exchange = lambda first, second: False
    rename, calls = os.rename, []
    os.rename = lambda *args: (kill() if calls else calls.append(rename(*args)))
if moment == "after exchange":
    atomic._sync = lambda path: kill() if path == out.parent else None
with atomic.building(out, force=True) as folder:
    (folder / "model.json").write_text('{"format": "estream"}')
    if moment == "writing":
        kill()
    (folder / "graphs").mkdir()
    (folder / "graphs" / "data").write_text("new")
"""


def killed(out: Path, moment: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(out), moment], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment, left", [("writing", "old"), ("after exchange", "new"), ("between renames", None)])
def test_killed_at_any_moment(tmp_path: Path, moment: str, left: str | None) -> None:
    out = tmp_path / "m"
    make(out, "old")
    killed(out, moment)
    assert len(os.listdir(tmp_path)) == 2  # one of them is a rest
    assert (content(out) if out.exists() else None) == left
    make(tmp_path / "other", "x")  # the next packing in this folder cleans up
    if left is None:
        with pytest.raises(UsageError, match="--force"):  # the old package is back
            make(out, "new")
        assert content(out) == "old"
    assert sorted(os.listdir(tmp_path)) == ["m", "other"]


def test_rest_of_a_live_packing_is_left_alone(tmp_path: Path) -> None:
    with building(tmp_path / "a") as folder:
        fill(folder, "a")
        make(tmp_path / "b", "b")
        assert folder.is_dir()
    assert content(tmp_path / "a") == "a" and content(tmp_path / "b") == "b"


def test_only_folders_with_our_own_names_are_cleaned(tmp_path: Path) -> None:
    names = [".m.estream-packing-", ".m.estream-packing-0123456", "m.estream-packing-01234567", ".hidden"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".m.estream-packing-01234567").write_text("a file")
    (tmp_path / ".m.estream-packing-89abcdef").mkdir()
    make(tmp_path / "m", "m")
    assert sorted(os.listdir(tmp_path)) == sorted([*names, ".m.estream-packing-01234567", "m"])


def test_without_flock_nothing_is_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / ".m.estream-packing-89abcdef").mkdir()
    monkeypatch.setattr(atomic.fcntl, "flock", unsupported)
    make(tmp_path / "m", "m")
    assert sorted(os.listdir(tmp_path)) == [".m.estream-packing-89abcdef", "m"]


def test_second_rename_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "m", "old")
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    rename: Callable[..., None] = os.rename

    def refuse(source: Path, target: Path) -> None:
        if "packing" in str(source):
            raise PermissionError(1, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PackageError, match="packing failed: no"):
        make(tmp_path / "m", "new", force=True)
    assert content(tmp_path / "m") == "old" and os.listdir(tmp_path) == ["m"]
