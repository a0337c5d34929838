"""Interrupts, several threads and engines, closing in the middle: nothing hangs, and the engine goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from estream.engine import Engine
from estream.errors import ClosedError
from estream.runtime.mock import Faults
from tests.support.faults import IDS, Reads, last, logits_of, make_package, mock, nothing_left


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("threads"))


@pytest.fixture(scope="module")
def expected(package: Path) -> np.ndarray:
    return logits_of(package)


def test_interrupt_at_each_run(package: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real SIGINT in the middle of each graph run."""
    stop = 0

    def delay(graph: str, run: int) -> float:
        if target.runs.total() == stop:
            signal.raise_signal(signal.SIGINT)
        return 0.0

    with nothing_left(monkeypatch), mock(Faults(delay=delay)) as target, Engine(package, target, banks=1) as engine:
        last(engine)
        total = target.runs.total()
        for number in range(1, total + 1, 3):
            stop = target.runs.total() + number
            with pytest.raises(KeyboardInterrupt):
                engine.prefill(IDS)
            assert np.array_equal(last(engine), expected)


def test_interrupt_while_waiting_for_flash(
    package: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_left(monkeypatch), Engine(package, threads=1, group=1, banks=1, lanes=1) as engine:
        with monkeypatch.context() as patch:
            waiting = threading.Event()

            def slow(number: int, fd: int, buffers: object, offset: int) -> None:
                if number == 20:
                    waiting.set()
                    time.sleep(0.2)

            Reads(patch, slow)

            def interrupt() -> None:
                waiting.wait()
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                engine.prefill(IDS)
                time.sleep(60)
            thread.join()
        assert np.array_equal(last(engine), expected)


def test_interrupt_while_opening(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 9, 20):
        target = mock()
        allocate = target.allocate

        def interrupted(nbytes: int, label: str, target=target, allocate=allocate, number=number):  # type: ignore
            if len(target.allocations) == number:
                signal.raise_signal(signal.SIGINT)
            return allocate(nbytes, label)

        monkeypatch.setattr(target, "allocate", interrupted)
        threads = threading.active_count()
        with pytest.raises(KeyboardInterrupt):
            Engine(package, target)
        assert target.closed and threading.active_count() == threads


def test_prefill_from_several_threads(package: Path) -> None:
    prompts = [[(7 * prompt + token) % 50 for token in range(1, 4 + prompt)] for prompt in range(8)]
    with Engine(package, threads=1) as engine:
        expected = [last(engine, prompt) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda prompt: last(engine, prompt), prompts * 4))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected * 4, strict=True))


def test_two_engines_at_once(package: Path, expected: np.ndarray, tmp_path: Path) -> None:
    other = make_package(tmp_path, seed=1)
    expected_other = logits_of(other)
    with Engine(package, threads=1) as first, Engine(package, threads=1) as second, Engine(other, threads=1) as third:
        engines = [first, second, third] * 5
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(last, engines))
    for number, logits in enumerate(found):
        assert np.array_equal(logits, expected_other if number % 3 == 2 else expected)


@pytest.mark.parametrize("where", ["run", "read"])
def test_close_during_a_prefill(package: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    errors: list[BaseException] = []

    def slow(*_: object) -> float | None:
        started.set()
        if where == "run":
            return 0.005
        time.sleep(0.005)
        return None

    with nothing_left(monkeypatch), monkeypatch.context() as patch:
        engine = Engine(package, mock(Faults(delay=slow if where == "run" else None)), group=1, banks=1, lanes=1)
        if where == "read":
            Reads(patch, slow)

        def prefills() -> None:
            try:
                while True:
                    engine.prefill(IDS)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=prefills) for _ in range(3)]  # one runs, two wait for it
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.05)
        engine.close()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
    assert len(errors) == 3 and all(isinstance(error, ClosedError) for error in errors)
    assert {str(error) for error in errors} <= {
        "the engine was closed during the prefill. Open a new Engine",
        "the engine is closed. Open a new Engine",
    }


def test_close_from_a_signal_handler(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler runs in the thread that it interrupts: closing must not wait for the prefill below it."""

    def delay(graph: str, run: int) -> float:
        if target.runs.total() == 10:
            signal.raise_signal(signal.SIGUSR1)
        return 0.0

    with nothing_left(monkeypatch):
        target = mock(Faults(delay=delay))
        engine = Engine(package, target)
        previous = signal.signal(signal.SIGUSR1, lambda *_: engine.close())
        try:
            with pytest.raises(ClosedError, match="closed during the prefill"):
                engine.prefill(IDS)
        finally:
            signal.signal(signal.SIGUSR1, previous)
        assert target.closed
