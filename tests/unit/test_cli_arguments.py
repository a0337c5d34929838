"""Arguments: types from Python, lists of ids as files hold them, and what is said about what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from estream.cli import suggest
from estream.cli.main import main
from estream.cli.prompt import parse_ids, read_text
from estream.errors import PackageError, UsageError
from estream.package.layout import PanelLayout, PoolLayout
from estream.package.manifest import Manifest
from estream.package.verify import verify
from estream.prompt import longest_prompt
from estream.runtime import open_target
from estream.solver.automatic import budget_bytes, resolve
from estream.units import format_count, format_tokens
from tests.support.tiny_packages import OLMOE, write_checkpoint


@pytest.mark.parametrize("value", [1.5, "2", True, 0, -1])
@pytest.mark.parametrize("option", ["group", "banks", "lanes"])
def test_counts_are_whole_numbers(option: str, value: Any) -> None:
    pool = PoolLayout(PanelLayout(32, 32, "f32"), 2, 4, (0, 2))
    with pytest.raises(UsageError, match=f"--{option} must be a whole number of at least 1"):
        resolve(pool, **{option: value})


@pytest.mark.parametrize("value", [1.5, True, 0, -1, "lots", [1], "0"])
def test_budgets(value: Any) -> None:
    with pytest.raises(UsageError):
        budget_bytes(value)
    assert (budget_bytes(None), budget_bytes(7), budget_bytes("1KiB")) == (None, 7, 1024)


@pytest.mark.parametrize("value", [0, 257, 10**9, "2", 1.0, True])
def test_threads_are_limited(value: Any) -> None:
    with pytest.raises(UsageError, match="--threads must be a whole number, 1 to 256"):
        open_target("mock", threads=value)
    open_target("mock", threads=256).close()


@pytest.mark.parametrize("value", ["5", 2.0, True, 0, 65])
def test_longest_prompt_is_a_whole_number(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^max_tokens must lie"):
        longest_prompt(value, 64)
    with pytest.raises(UsageError, match=r"^--tokens must lie within the model's context"):
        longest_prompt(value, 64, "--tokens")


def test_one_token_is_one() -> None:
    assert (format_tokens(1), format_tokens(2)) == ("1 token", "2 tokens")
    assert (format_count(1, "window"), format_count(0, "window")) == ("1 window", "0 windows")


def test_ids_as_json_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes(b"\xef\xbb\xbf[1, 2,\n 3]\r\n")
    assert parse_ids(read_text(path, "--ids-file"), "--ids-file") == [1, 2, 3]
    for text in ("[]", "[[1], [2]]", "[1", "1]", '["1"]', "[1.0]"):
        with pytest.raises(UsageError, match=r"not a token id|no token ids"):
            parse_ids(text, "--ids")


def test_only_what_is_missing_may_be_misspelt(tmp_path: Path) -> None:
    (tmp_path / "olmoe.estream").mkdir()
    arguments, message = {"out": tmp_path / "olmo.estream"}, f"{tmp_path / 'olmo.estream'}: nothing there"
    assert "Did you mean" in suggest.missing_path_hint(arguments, message, PackageError("x"))
    refused = PackageError("x")
    refused.__cause__ = PermissionError(13, "Permission denied")
    for error in (refused, refused.__cause__):
        assert suggest.missing_path_hint(arguments, message, error) == ""
    long = {"out": tmp_path / ("x" * 300)}
    assert suggest.missing_path_hint(long, str(long["out"]), PackageError("x")) == ""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    import estream

    write_checkpoint(tmp_path / "checkpoint", OLMOE)
    estream.pack(tmp_path / "checkpoint", tmp_path / "x.estream", experts="f32")
    return tmp_path / "x.estream"


def test_verify_tells_unreadable_from_damaged(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from estream.package.verify import open_regular

    def refuse(path: Path) -> int:
        if path.name == "experts.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return open_regular(path)

    monkeypatch.setattr("estream.package.verify.open_regular", refuse)
    report = verify(package)
    assert (report.ok, report.damaged) == (False, ())
    assert report.to_dict()["unreadable"] == ["experts.safetensors: Permission denied"]
    assert main(["verify", str(package), "-q"]) == 1
    out, err = capsys.readouterr()
    assert "1 cannot be read" in out and "damaged" not in out + err
    assert "Check the permissions" in err


def test_a_manifest_that_may_not_be_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("estream.package.manifest.read_small", refuse)
    with pytest.raises(PackageError, match=r"model.json: cannot be read: Permission denied. Check the permissions"):
        Manifest.read(package)
