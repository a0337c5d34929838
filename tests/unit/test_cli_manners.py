"""What people expect of any command line: examples, near names, JSON, sizes, completion, progress."""

from __future__ import annotations

import argparse
import io
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from estream.cli import progress
from estream.cli.console import Console
from estream.cli.main import build_parser, main

ROOT = Path(__file__).resolve().parents[2]


def parsers(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """Every command's parser, also of commands within commands."""
    for action in (parser or build_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield sub
                yield from parsers(sub)


def is_group(parser: argparse.ArgumentParser) -> bool:
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_every_command_has_an_example_that_parses() -> None:
    found = list(parsers())
    assert len(found) >= 6
    for parser in found:
        _, _, examples = parser.format_help().partition("example:\n")
        lines = [line.strip() for line in examples.splitlines() if line.strip()]
        assert lines, parser.prog
        for line in lines:
            words = shlex.split(line.removeprefix('eval "$(').removesuffix(')"'))
            assert words[0] == "estream", line
            assert build_parser().parse_args(words[1:]).command == parser.prog.split()[1]


def test_every_command_is_quiet_verbose_and_speaks_json() -> None:
    for parser in parsers():
        if is_group(parser):
            continue
        assert {"-q", "--quiet", "-v", "--verbose"} <= options(parser)
        assert "--json" in options(parser) or parser.prog == "estream completion"


def test_every_option_has_help() -> None:
    for parser in parsers():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, f"{parser.prog}: {action.option_strings or action.dest}"


def near(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        status = main(list(arguments))
    except SystemExit as left:
        status = int(left.code or 0)
    return status, capsys.readouterr().err.splitlines()[-1]


def test_near_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "olmoe.estream").mkdir()
    (tmp_path / "prompt.txt").touch()
    missing = str(tmp_path / "olmo.estream")
    for arguments, status, expected in (
        (("inspekt", "x"), 2, "Did you mean inspect?"),
        (("pack", "a", "b", "--exprts=f16"), 2, "Did you mean --experts?"),
        (("prefill", "x", "--ids", "1", "--grup", "3"), 2, "Did you mean --group?"),
        (("pack", "a", "b", "--experts", "int9"), 2, "Did you mean int8"),
        (("synth", "olmoe-1b", str(tmp_path / "new")), 2, "Did you mean olmoe-1b-7b"),
        (("inspect", missing), 2, "no such file or folder. Did you mean olmoe.estream?"),
        (("verify", missing), 1, "Did you mean olmoe.estream?"),
        (("prefill", missing, "--ids", "1"), 1, "Did you mean olmoe.estream?"),
        (("pack", missing, "x"), 1, "Did you mean olmoe.estream?"),
    ):
        got, line = near(capsys, *arguments)
        assert (got, line[: len("estream: error: ")]) == (status, "estream: error: ")
        assert expected in line, line
    assert "mean" not in near(capsys, "verify", str(tmp_path / "something else"))[1]
    assert "mean" not in near(capsys, "verify", str(tmp_path / "none" / "olmo"))[1]
    (tmp_path / "mk.py").touch()
    same = str(tmp_path / "m.py")
    status, line = near(capsys, "prefill", missing, "--ids", "1", "--trace", same, "--plot", same)
    assert status == 2 and "name the same file" in line and "mean" not in line


@pytest.mark.parametrize(("text", "nbytes"), [("1.5GiB", 3 << 29), ("800M", 800 << 20), ("2GB", 2 * 10**9)])
def test_sizes(text: str, nbytes: int) -> None:
    assert build_parser().parse_args(["prefill", "x", "--ids", "1", "--memory", text]).memory == nbytes


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_a_script_that_the_shell_takes(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    assert main(["completion", shell]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    if shell == "bash":
        # As bash does when TAB is pressed after `estream pref`, and after `estream prefill --ban`.
        lines = """source "$1"
complete -p estream >/dev/null
function=$(complete -p estream | sed 's/.*-F \\([^ ]*\\).*/\\1/')
mkdir here; cd here; mkdir folder; touch file
for words in "estream pref" "estream prefill x --ban" "estream pack f" "estream prefill x --ids-file f" \\
    "estream synth o"; do
    COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    COMP_LINE=$words; COMP_POINT=${#words}
    $function estream "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
    echo $(printf '%s\n' "${COMPREPLY[@]}" | sort)
done"""
        command = [program, "-ec", lines, "x", str(script)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        *rest, presets = done.stdout.splitlines()
        assert rest == ["prefill", "--banks", "folder", "file folder"]
        assert "olmoe-1b-7b" in presets.split()
    else:
        done = subprocess.run([program, "-n", str(script)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_progress_is_lines_in_a_log_and_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(progress.Progress(Console(), io.StringIO())._show, progress._Lines)
    assert isinstance(progress.Progress(Console(), Terminal())._show, progress._Bar)
    assert progress.Progress(Console(quiet=True), Terminal())._show is None


def test_exit_statuses_are_documented() -> None:
    text = (ROOT / "README.md").read_text()
    _, _, statuses = text.partition("Exit status")
    for status in ("0", "1", "2", "129", "130", "141", "143"):
        assert f"{status} " in statuses.split("\n\n")[0]


def test_interrupt_while_the_arguments_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: argparse.ArgumentParser, argv: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", interrupted)
    assert main(["verify", "x"]) == 130
    assert capsys.readouterr().err == "estream: interrupted\n"
