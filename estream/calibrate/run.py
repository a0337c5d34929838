"""The whole measurement, in less than a minute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from estream.calibrate.reads import WARM_S, read_rate, reading
from estream.calibrate.shape import ROWS, TOKENS, ShapeTimer
from estream.calibrate.timing import timed
from estream.errors import UsageError
from estream.opening import Opened, Options, open_model
from estream.solver.profile import DeviceProfile, Rate, identify, shape_key
from estream.telemetry.memory import process_memory

READ_BYTES = (1 << 20, 4 << 20, 16 << 20)
LANES = (1, 2, 4, 8)
ENOUGH = 0.95  # of the best rate: more lanes are only more threads
_READ_S, _ROUND_S = 0.5, 0.4
_ROUNDS = 5

Progress = Callable[[str, int, int], None]


def calibrate(
    path: str | os.PathLike[str],
    backend: str = "cpu",
    *,
    threads: int | None = None,
    soc: str | None = None,
    libraries: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> DeviceProfile:
    """The profile of this machine and of the shape of the package at `path`, whose pool is what is read.

    soc, libraries: as `Engine`. progress: (stage, steps done, steps in all). Raises UsageError for a simulated target,
    and what `Engine` raises when it opens.
    """
    steps, done = len(READ_BYTES) * len(LANES) + len(ROWS) + len(TOKENS) + 3, 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("calibrate", done, steps)

    with ExitStack() as cleanup:
        folder = None if libraries is None else Path(libraries)
        options = Options(backend=backend, group=1, banks=1, threads=threads, soc=soc, libraries=folder)
        opened = open_model(Path(path), options, cleanup)
        target, package = opened.target, opened.package
        shared: int = getattr(target, "shared_bytes", None) or 0  # weights and activations
        base = max(0, (process_memory().held_bytes(shared) or 0) - max(shared, opened.weights.nbytes))
        if getattr(target, "simulated", False):
            raise UsageError("the simulator's times say nothing of the NPU", next_step="Calibrate on the phone")
        rates = []
        for nbytes in READ_BYTES:
            for lanes in LANES:
                rates.append(Rate(nbytes, lanes, read_rate(opened.file, nbytes, lanes, _READ_S)))
                step()
        best = max(rate.bytes_per_s for rate in rates)
        lanes = min(rate.lanes for rate in rates if rate.bytes_per_s >= ENOUGH * best)
        shape = ShapeTimer(opened, min(TOKENS[-1], opened.max_tokens), step).measure()
        compute, flash = _interference(opened, max(READ_BYTES), lanes)
        step()
        machine = identify(backend, target.graphs, getattr(target, "threads", None), package.experts_file)
        return DeviceProfile(machine, tuple(rates), lanes, compute, flash, base, {shape_key(package): shape})


def _interference(opened: Opened, nbytes: int, lanes: int) -> tuple[float, float]:
    """(time of computing beside reads over its time alone, the same of reading beside computing), at least 1: medians
    of rounds that take turns, since a shared machine's speed may change between two measurements."""
    runner, size = opened.parts.runner, opened.package.pool.panel.panel_bytes
    gates = np.full(min(64, runner.rows, opened.max_tokens), 0.1, np.float32)
    panel = opened.target.allocate(size, "a panel to calibrate with")  # zeros take as long as anything

    def once() -> None:
        runner.run_record(0, "calibrate", panel, gates)

    computing, flash = [], []
    for _ in range(_ROUNDS):
        alone = timed(once, _ROUND_S)
        with reading(opened.file, nbytes, lanes) as reads:
            time.sleep(WARM_S)
            rate = reads.rate(_ROUND_S)
            first = len(reads.done)
            together = timed(once, _ROUND_S)
            beside = reads.rate_since(first)
        computing.append(together / alone)
        flash.append(rate / beside)
    return max(1.0, median(computing)), max(1.0, median(flash))
