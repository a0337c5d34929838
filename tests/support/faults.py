"""Tiny packages to break, faults at the level of system calls, and what must not be left behind."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream.engine import Engine
from estream.package.pack import pack
from estream.runtime import open_target
from estream.runtime.mock import Faults, MockTarget
from tests.support.tiny_packages import QWEN2_MOE, save_weights, write_checkpoint

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # below 50, QWEN2_MOE's vocabulary


def make_package(folder: Path, *, seed: int = 0, experts: str = "f32", **config: Any) -> Path:
    """A packed tiny model with a dense layer, shared experts and two panels per expert."""
    write_checkpoint(folder / f"checkpoint-{seed}", {**QWEN2_MOE, **config}, seed)
    out = folder / f"model-{seed}.estream"
    pack(folder / f"checkpoint-{seed}", out, experts=experts, panel=32)
    return out


def make_overflowing_package(folder: Path, tensor: str, factor: float) -> Path:
    """A packed tiny model, one of whose weight tensors is `factor` times too large."""
    weights = write_checkpoint(folder / "checkpoint", QWEN2_MOE)
    weights[tensor] = (np.sign(weights[tensor]) * factor).astype(np.float32)
    save_weights(folder / "checkpoint", weights)
    pack(folder / "checkpoint", folder / "model.estream", experts="f32", panel=32)
    return folder / "model.estream"


def mock(faults: Faults | None = None) -> MockTarget:
    """The mock target around real graphs."""
    return MockTarget(inner=open_target("cpu", threads=1), faults=faults)


def logits_of(package: Path, ids: Sequence[int] = IDS) -> np.ndarray:
    """Logits of the last token, from a fresh engine."""
    with Engine(package, threads=1) as engine:
        return last(engine, ids)


def last(engine: Engine, ids: Sequence[int] = IDS) -> np.ndarray:
    logits = engine.prefill(ids).logits
    assert logits is not None
    return logits


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if the block leaves threads, file descriptors, or target memory that is still mapped."""
    maps: list[mmap.mmap] = []

    class Map(mmap.mmap):
        def __new__(cls, *args: Any, **options: Any) -> Map:
            made = super().__new__(cls, *args, **options)
            maps.append(made)
            return made

    gc.collect()
    threads, files = set(threading.enumerate()), descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", Map)
        yield
    assert set(threading.enumerate()) == threads
    assert descriptors() == files
    assert all(region.closed for region in maps)


class Reads:
    """Stands in for os.preadv. `fault(number, fd, buffers, offset)` may raise, or return the bytes to claim; None: the
    real call. Numbers count from 1 since `count` was last set to 0."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        fault: Callable[[int, int, Sequence[memoryview], int], int | None] | None = None,
    ) -> None:
        self.real, self.fault, self.count = os.preadv, fault, 0
        self._lock = threading.Lock()
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.count += 1
            number = self.count
        claimed = None if self.fault is None else self.fault(number, fd, buffers, offset)
        return self.real(fd, buffers, offset) if claimed is None else claimed
