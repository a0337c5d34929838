"""What test_shared_memory.py does in child processes (`standin.ask`)."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from estream import Engine
from estream.errors import EStreamError, TargetError
from estream.flash.pool import PoolFile
from estream.runtime.capi import CApi
from estream.runtime.htp import HtpTarget
from estream.runtime.mock import MockTarget
from estream.runtime.soc import DEFAULT_SOC, find_soc
from estream.runtime.target import Buffer
from tests.support.standin import Standin, serve
from tests.support.tiny_checkpoints import prompt

MIB = 1 << 20
GRAPH = {"x": (32, 64), "down": (64, 96), "y": (32, 96)}  # float16, see test_shared_memory.py


def opened(shared: bool = True) -> HtpTarget:
    return HtpTarget(find_soc(DEFAULT_SOC).provider_options, threads=1, shared=shared)


def refused(action: Any, *arguments: Any) -> str:
    """The message of the error that must come."""
    try:
        action(*arguments)
    except EStreamError as error:
        return str(error)
    raise AssertionError("no error")


def memory(graph: str, data: str) -> dict[str, Any]:
    """Small and large allocations, ownership, direct reads, binding of interior addresses, a run."""
    target, said = opened(), dict[str, Any]()
    said["before a graph"] = refused(target.allocate, 64, "too early")
    loaded = target.load(Path(graph))
    standin = Standin()
    small = [target.allocate(size, f"small {size}") for size in (100, 5000, MIB)]
    large = target.allocate(3 * MIB + 1, "large")
    said["aligned"] = all(buffer.address % 4096 == 0 for buffer in (*small, large))
    said["zeros"] = not any(np.frombuffer(buffer.memory(), np.uint8).any() for buffer in (*small, large))
    said["mappings"], said["bytes"] = target.shared_mappings, target.shared_bytes
    said["standin"] = [standin.mappings, standin.nbytes]
    ends = [large.part(large.nbytes - 1, 1), Buffer(large.address + large.nbytes - 1, 8192)]
    elsewhere = Buffer(np.zeros(64).ctypes.data, 64)
    said["owned"] = [target.in_shared_memory(one) is not None for one in (*small, large, *ends, elsewhere)]
    with PoolFile.open(data) as file:
        wanted = Path(data).read_bytes()
        file.read_into(large.part(MIB, len(wanted)).memory(), 0)
        said["read"] = [file.direct, file.direct_reason, bytes(large.part(MIB, len(wanted)).memory()) == wanted]
    size = {name: 2 * rows * columns for name, (rows, columns) in GRAPH.items()}
    loaded.bind("x", small[1].part(128, size["x"]))
    loaded.bind("down", large.part(2 * MIB, size["down"]))
    loaded.bind("y", large.part(MIB - 4096, size["y"]))
    said["run"] = refused(loaded.run)
    said["copied"] = target.npu_bytes_copied
    target.close()
    target.close()
    said["left"] = standin.left()
    said["closed"] = refused(target.allocate, 64, "too late")
    return said


def pieces(graph: str, above: str, *sizes: str) -> dict[str, Any]:
    """Pieces where mappings of more than `above` bytes are refused: which share a mapping."""
    wanted, warnings = [int(size) for size in sizes], list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("estream.memory").addHandler(handler)
    with ExitStack() as cleanup:
        cleanup.callback(logging.getLogger("estream.memory").removeHandler, handler)
        target = cleanup.enter_context(opened())
        target.load(Path(graph))
        standin = Standin()
        standin.refuse(above=int(above))
        cleanup.callback(standin.refuse)
        try:
            buffers = target.allocate_pieces(wanted, "arena")
        except TargetError as error:
            return {"error": str(error), "mappings": standin.mappings}
        said: dict[str, Any] = {"mappings": standin.mappings, "bytes": standin.nbytes}
        said["sizes"] = [buffer.nbytes for buffer in buffers] == wanted
        said["apart"] = all(
            first.address + first.nbytes <= second.address or second.address + second.nbytes <= first.address
            for number, first in enumerate(buffers)
            for second in buffers[:number]
        )
        said["owned"] = all(target.in_shared_memory(buffer) for buffer in buffers)
        said["again"] = len(target.allocate_pieces(wanted, "the same")), standin.mappings
        return {**said, "warnings": warnings}


def nth(graph: str) -> list[dict[str, Any]]:
    """Each allocation fails in turn, until none does; every round must leave nothing."""
    rounds, standin = [], None
    for number in range(1, 20):
        target, said = opened(), dict[str, Any]()
        target.load(Path(graph))
        standin = standin or Standin()
        standin.refuse(nth=number, count=1)
        before = standin.mappings
        try:
            target.allocate(1000, "vectors")
            target.allocate_pieces([8 * MIB] * 3, "arena")
            target.allocate(2 * MIB, "tiles")
        except TargetError as error:
            said["error"] = str(error)
        said["mappings"] = standin.mappings - before
        target.close()
        rounds.append({**said, "left": standin.left()})
        standin.refuse()
        if "error" not in said and said["mappings"] == 3:
            return rounds
    raise AssertionError("it never ended")


def order(graph: str) -> list[str]:
    """What is released, in order, of a target with three graphs and bound tensors."""
    events: list[str] = []
    release, call = CApi.release, CApi.call

    def released(api: CApi, kind: str, handle: int | None) -> None:
        if handle:
            events.append(kind)
        release(api, kind, handle)

    def called(api: CApi, name: str, *arguments: Any, what: str) -> None:
        if name in ("AllocatorFree", "UnregisterExecutionProviderLibrary"):
            events.append(name)
        call(api, name, *arguments, what=what)

    CApi.release, CApi.call = released, called  # type: ignore[method-assign]
    target = opened()
    graphs = [target.load(Path(graph)) for _ in range(3)]
    buffer = target.allocate(5 * MIB, "all")
    for one in graphs:
        for name in GRAPH:
            one.bind(name, buffer)
    target.allocate(100, "small")
    events.clear()
    target.close()
    return events


def without(graph: str) -> dict[str, Any]:
    """No libcdsprpc.so, or one that gives no descriptors: an error where memory is to be shared, and nothing else."""
    with ExitStack() as cleanup:
        target = cleanup.enter_context(opened())
        said = {"shared": refused(lambda: target.load(Path(graph)).bind("x", target.allocate(4096, "x")))}
    with opened(shared=False) as host:
        loaded = host.load(Path(graph))
        for name in GRAPH:
            loaded.bind(name, host.allocate(32768, name))
        loaded.run()
        said["host"] = str(host.npu_bytes_copied)
    return said


def descriptors(graph: str) -> dict[str, Any]:
    with opened() as target:
        target.load(Path(graph))
        standin = Standin()
        standin.lose_descriptors(True)
        said = refused(target.allocate, 4096, "x")
        standin.lose_descriptors(False)
    return {"error": said, "left": standin.left()}


def host_memory(graph: str) -> dict[str, Any]:
    """Graphs of a sharing target that are bound to the host's memory: they run, and what is copied is counted."""
    with opened() as target:
        loaded = target.load(Path(graph))
        arrays = {name: np.ones(shape, np.float16) for name, shape in GRAPH.items()}
        for name, array in arrays.items():
            loaded.bind(name, Buffer(array.ctypes.data, array.nbytes))
        loaded.run()
        loaded.run()
        return {"copied": target.npu_bytes_copied, "y": float(arrays["y"].max())}


def engines(package: str) -> dict[str, Any]:
    """Whole engines: opened in rounds, with an arena in several mappings, with an allocation that fails."""
    said: dict[str, Any] = {"rounds": [], "failed": []}
    first = opened()
    with Engine(package, first, max_tokens=40) as engine:
        standin = Standin()
        said["configuration"] = {key: engine.configuration[key] for key in ("shared_memory", "shared_mappings")}
        said["shared"] = first.shared_bytes == standin.nbytes > 0
        said["prefill"] = refused(engine.prefill, prompt(33))
        said["twice"] = refused(engine.prefill, prompt(33))
    said["rounds"].append(standin.left())
    for options in ({"resident": "all"}, {"dense": "paged", "pinned": 1, "group": 1, "banks": 2}):
        target = opened()
        standin.refuse(above=5 * MIB)
        with Engine(package, target, max_tokens=40, **options) as engine:
            said["rounds"].append(target.shared_mappings == standin.mappings)
        standin.refuse()
        said["rounds"].append(standin.left())
    for number in (1, 2, 3, 4):
        standin.refuse(nth=number, count=1000)
        said["failed"].append([refused(Engine, package, opened()), standin.left()])
    standin.refuse()
    said["budget"] = [refused(Engine, package, opened(), 1 << 20), standin.left()]
    return said


def agreement(package: str) -> dict[str, Any]:
    """The same logits from host memory bound in a sharing target, which counts it, as without sharing."""
    ids = prompt(33)
    with Engine(package, "htp", max_tokens=40) as engine:
        expected = engine.prefill(ids)
        unset = expected.stats.npu_bytes_copied is None and engine.configuration["shared_memory"] is False
    inner = opened()
    with Engine(package, MockTarget(inner=inner), max_tokens=40) as engine:
        logits = engine.prefill(ids).logits
    return {"equal": bool(np.array_equal(logits, expected.logits)), "copied": inner.npu_bytes_copied, "unset": unset}


if __name__ == "__main__":
    serve(globals(), sys.argv[1])
