"""The command line's frame: usage, exit statuses, where words go. No command does real work here."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from estream.cli import inspect, main, pack
from estream.cli.console import Console, plain
from estream.errors import PackageError, UsageError
from estream.version import __version__

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "pack",
    "synth",
    "inspect",
    "verify",
    "compile",
    "simulate",
    "prefill",
    "bench",
    "perplexity",
    "selftest",
    "doctor",
    "completion",
)


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def run(args: argparse.Namespace, console: Console) -> NoReturn:
        raise error

    return run


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `estream inspect x` with a command that raises."""

    def run(error: BaseException, *options: str) -> int:
        monkeypatch.setattr(inspect, "run", raising(error))
        return main.main(["inspect", "x", *options])

    monkeypatch.delenv("ESTREAM_DEBUG", raising=False)
    return run


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main.main([command, "--help"])
        text = capsys.readouterr().out
        assert left.value.code == 0
        assert "example:\n" in text and f"estream {command}" in text.split("example:\n")[1]
        assert "--quiet" in text and "--verbose" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"estream {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["inspekt"], "inspekt"),
        (["inspect"], "PACKAGE"),
        (["inspect", "x", "-q", "-v"], "not allowed with"),
        (["pack", "a", "b", "--experts", "int3"], "int3"),
        (["pack", "a", "b", "--pan", "32"], "--pan"),
        (["pack", "a", "b", "--panel", "0"], "must be at least 1, not 0"),
        (["pack", "a", "b", "--panel", "-32"], "must be at least 1, not -32"),
        (["synth", "olmoe-1b-7b", "b", "--layers", "1.5"], "'1.5' is not a whole number"),
        (["synth", "olmoe-1b-7b", "b", "--seed", "-1"], "--seed: must be at least 0, not -1"),
        (["inspect", ""], "PACKAGE: the name is empty"),
        (["prefill", "x", "--ids", "1", "--trace", ""], "--trace: the name is empty"),
        (["prefill", "x"], "one of the arguments --prompt --prompt-file --ids --ids-file is required"),
        (["prefill", "x", "--ids", "1", "--prompt", "a"], "not allowed with"),
        (["prefill", "x", "--ids", "1", "--memory", "lots"], "not a size"),
        (["prefill", "x", "--ids", "1", "--prefetch", "never"], "never"),
        (["prefill", "x", "--ids", "1", "--banks", "two"], "'two' is not a whole number"),
        (["completion", "powershell"], "powershell"),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(arguments)
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert out == ""
    assert err.startswith("usage: ")
    assert err.splitlines()[-1].startswith("estream: error: ")
    assert words in err.splitlines()[-1]


def test_errors_are_one_line(failing: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(PackageError("the package x is damaged", asked=1, had=2, next_step="Pack it again.")) == 1
    assert capsys.readouterr() == ("", "estream: error: the package x is damaged (asked 1, had 2). Pack it again.\n")
    assert failing(UsageError("--top is senseless")) == 2
    assert capsys.readouterr() == ("", "estream: error: --top is senseless\n")


def test_errors_leave_stdout_clean_with_json(failing: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(PackageError("damaged", next_step="Pack it again"), "--json") == 1
    assert capsys.readouterr() == ("", "estream: error: damaged. Pack it again\n")


def test_system_errors_name_the_file(failing: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(FileNotFoundError(2, "No such file or directory", "prompt.txt")) == 1
    assert capsys.readouterr().err == "estream: error: prompt.txt: No such file or directory\n"


def test_a_bug_says_so_and_shows_its_traceback_on_request(
    failing: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failing(ZeroDivisionError("division by zero")) == 1
    err = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: division by zero" in err and "-vv" in err
    assert "Traceback" not in err
    assert failing(ZeroDivisionError("division by zero"), "-v") == 1
    assert "Traceback" not in capsys.readouterr().err
    assert failing(ZeroDivisionError("division by zero"), "-vv") == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("ESTREAM_DEBUG", "1")
    assert failing(PackageError("damaged")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_is_status_130(failing: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "estream: interrupted\n")


def test_library_warnings_follow_quiet_and_verbose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace, console: Console) -> int:
        log = logging.getLogger("estream.flash")
        log.info("lanes: 2")
        log.warning("direct I/O is not available")
        return 0

    monkeypatch.setattr(pack, "run", run)
    warning = "estream: warning: direct I/O is not available\n"
    for options, expected in (([], warning), (["-q"], ""), (["-v"], "estream: info: lanes: 2\n" + warning)):
        assert main.main(["pack", "a", "b", *options]) == 0
        assert capsys.readouterr() == ("", expected)


def test_a_closed_pipe_is_silent() -> None:
    """The reader is gone before the first line is written."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "estream", "completion", "bash"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "all-logits", "before-routing"):
        assert word in script


def test_plain_turns_numpy_and_paths_into_json() -> None:
    value = {"a": np.float32(0.5), "b": (np.int64(3), None), "c": Path("x"), 4: np.arange(2), "d": np.bool_(True)}
    assert json.loads(json.dumps(plain(value))) == {"a": 0.5, "b": [3, None], "c": "x", "4": [0, 1], "d": True}
