"""Progress on stderr: a bar on a terminal, a line now and then elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from estream.cli.console import Console
from estream.units import format_bytes, format_rate, format_seconds

_COUNTED = {
    "prefill": "layers",
    "calibrate": "steps",
    "bench": "measurements",
    "building graphs": "graphs",
}  # stages that are not in bytes


class Progress:
    """A context manager that is called as `progress(stage, done, total)`: in bytes, or in what `_COUNTED` says of the
    stage.

    One bar or one run of lines per stage; a stage ends when the next one starts or the context is left.
    """

    def __init__(self, console: Console, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._show: _Lines | _Bar | None = None
        if not console.quiet:
            self._show = _Bar() if self._stream.isatty() else _Lines(self._stream)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._show is not None:
            self._show.update(stage, done, total)

    def close(self) -> None:
        """Takes the bar off the terminal. Twice is harmless."""
        if self._show is not None:
            self._show.close()


class _Lines:
    """Logs and pipes: at most one line in 2 s, and only for another 10 % or after 30 s."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._stage: str | None = None
        self._started = self._spoke = 0.0
        self._started_done = self._spoke_done = 0

    def update(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if stage != self._stage:
            self._stage, self._started, self._spoke = stage, now, now
            self._started_done = self._spoke_done = done
            return
        waited = now - self._spoke
        if waited < 2 or (waited < 30 and done - self._spoke_done < 0.1 * total):
            return
        share = f"{100 * done / total:.0f} %" if total else "?"
        rate = (done - self._started_done) / (now - self._started)
        if stage in _COUNTED:
            amount = (
                f"{done} of {total} {_COUNTED[stage]}, {format_seconds((total - done) / rate) if rate else '?'} left"
            )
        else:
            amount = f"{format_bytes(done)} of {format_bytes(total)}, {format_rate(rate)}"
        print(f"estream: {stage}: {share}, {amount}", file=self._stream, flush=True)
        self._spoke, self._spoke_done = now, done

    def close(self) -> None:
        pass


class _Bar:
    """A terminal: one rich bar per stage, gone at the end."""

    def __init__(self) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=RichConsole(stderr=True),
            transient=True,
        )
        self._stage: str | None = None
        self._task: Any = None
        self._open = False

    def update(self, stage: str, done: int, total: int) -> None:
        if not self._open:
            self._bars.start()
            self._open = True
        if stage != self._stage:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._stage, self._task = stage, self._bars.add_task(stage, total=total, amount="")
        self._bars.update(self._task, completed=done, total=total, amount=self._amount(stage, done, total))

    def _amount(self, stage: str, done: int, total: int) -> str:
        if stage in _COUNTED:
            return f"{done}/{total} {_COUNTED[stage]}"
        speed = self._bars.tasks[-1].speed if self._bars.tasks else None
        return f"{format_bytes(done)} of {format_bytes(total)}" + (f", {format_rate(speed)}" if speed else "")

    def close(self) -> None:
        if self._open:
            self._bars.stop()
            self._open = False
