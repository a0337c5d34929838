"""Before the command line is imported: closed streams, Ctrl-C; and what is told about output that fails."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from estream import __main__ as entry
from estream.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("arguments", "status"), [("--version", 0), ("inspect absent", 2), ("inspect", 2)])
def test_closed_streams(closed: str, arguments: str, status: int, tmp_path: Path) -> None:
    line = f'exec "$0" -m estream {arguments} {closed}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    if closed != ">&-":
        assert done.stderr == ""


def test_what_libraries_print_to_descriptor_1_is_not_output(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, sys, estream.__main__ as entry, estream.cli.main as cli;"
        "cli.main = lambda: os.write(1, b'noise') and print('said') or 0;"
        "sys.exit(entry.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "")


def test_ctrl_c_while_importing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "estream.cli.main", Interrupted())
    assert entry.main() == 130
    assert capsys.readouterr() == ("", "estream: interrupted\n")


def test_nothing_large_is_imported_before_ctrl_c_is_handled() -> None:
    code = "import sys, estream.__main__; print({'numpy', 'argparse', 'estream.engine'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_output_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    dropped: list[bool] = []
    monkeypatch.setattr("estream.cli.main._drop_output", lambda: dropped.append(True))
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == "estream: error: standard output: No space left on device\n"
    assert dropped == [True]
