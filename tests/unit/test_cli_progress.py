"""Progress: a line now and then in a log, a bar on a terminal, nothing with --quiet."""

from __future__ import annotations

import io

import pytest

from estream.cli.console import Console
from estream.cli.progress import Progress, _Lines


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(rate: int, total: int, step: float = 0.1) -> list[str]:
    """What is printed while `total` bytes are done at `rate` bytes/s, with an update every `step` seconds."""
    stream, clock = io.StringIO(), Clock()
    show = _Lines(stream, clock)
    steps = round(total / rate / step)
    for number in range(steps + 1):
        clock.now = 100 + number * step
        show.update("experts", total * number // steps, total)
    return stream.getvalue().splitlines()


def test_short_work_prints_nothing() -> None:
    assert lines(rate=1 << 20, total=1 << 20) == []


def test_a_line_in_two_seconds() -> None:
    printed = lines(rate=100 << 20, total=1000 << 20)  # 10 s: 20 % in 2 s
    assert printed[0] == "estream: experts: 20 %, 200 MiB of 1000 MiB, 105 MB/s"
    assert 4 <= len(printed) <= 5


def test_a_line_in_ten_percent_of_long_work() -> None:
    assert 9 <= len(lines(rate=10 << 20, total=2000 << 20)) <= 10  # 200 s: 10 % in 20 s


def test_a_line_in_thirty_seconds_of_very_long_work() -> None:
    assert 19 <= len(lines(rate=1 << 20, total=600 << 20, step=1)) <= 20  # 600 s: 10 % in 60 s


def test_each_stage_starts_again() -> None:
    stream, clock = io.StringIO(), Clock()
    show = _Lines(stream, clock)
    show.update("experts", 0, 100)
    clock.now += 5
    show.update("dense", 50, 100)
    assert stream.getvalue() == ""
    clock.now += 5
    show.update("dense", 100, 100)
    assert stream.getvalue() == "estream: dense: 100 %, 100 B of 100 B, 10 B/s\n"


def test_layers_are_counted_as_layers() -> None:
    stream, clock = io.StringIO(), Clock()
    show = _Lines(stream, clock)
    for done in range(3):
        show.update("prefill", done, 12)
        clock.now += 5
    assert stream.getvalue().splitlines() == [
        "estream: prefill: 17 %, 2 of 12 layers, 50.0 s left",
    ]


def test_quiet_prints_nothing() -> None:
    stream = io.StringIO()
    with Progress(Console(quiet=True), stream) as progress:
        progress("experts", 1, 2)
    assert stream.getvalue() == ""


def test_the_bar_follows_stages_and_goes_away_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyError), Progress(Console()) as progress:
        for stage in ("experts", "prefill"):
            for done in range(3):
                progress(stage, done, 2)
        raise KeyError
    progress.close()
    shown = terminal.getvalue()
    assert "prefill" in shown and "2/2 layers" in shown
    assert shown.endswith(("\x1b[2K", "\x1b[?25h"))  # line erased, or cursor shown again: nothing is left
