"""How every refusal must look, from Python and from the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from estream.cli.main import main
from estream.errors import CheckpointError, EStreamError
from estream.package.pack import pack


def check_error(error: EStreamError, words: Sequence[str]) -> None:
    """One readable message that holds `words` and a next step."""
    message = str(error)
    assert message.isprintable() and len(message) < 8000
    assert error.next_step, f"no next step: {message}"
    for word in words:
        assert word in message, message


def check_command(capsys: pytest.CaptureFixture[str], argv: list[Any], words: Sequence[str], left: Path) -> None:
    """Exit status 1, one line on stderr that holds `words`, no traceback, and nothing new in the folder `left`."""
    before = sorted(left.iterdir())
    capsys.readouterr()
    status = main([str(word) for word in argv])
    error = capsys.readouterr().err
    assert status == 1, error
    assert error.startswith("estream: error: ") and error.count("\n") == 1
    assert "Traceback" not in error and "unexpected" not in error.replace("1 unexpected:", "")
    for word in words:
        assert word in error
    assert sorted(left.iterdir()) == before


def checkpoint_refused(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    words: list[str],
    error: type[CheckpointError],
    inspect: bool = True,
) -> None:
    """Python and both commands refuse the checkpoint in the same words, and leave nothing behind."""
    out = folder.parent / "out.estream"
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error) as caught:
        pack(folder, out, experts="int8")
    check_error(caught.value, words)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    check_command(capsys, ["pack", folder, out], words, folder.parent)
    if inspect:
        check_command(capsys, ["inspect", folder], words, folder.parent)
