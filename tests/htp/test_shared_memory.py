"""Memory that host and NPU share, on a host: a stand-in libcdsprpc.so, in child processes.

The simulator has no shared memory: what runs here ends at QnnMem_register, which answers 1000 (not supported).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from estream.errors import UsageError
from estream.runtime import open_target
from estream.runtime.htp import HtpTarget
from qnn_graphs.builder import Builder
from tests.support import standin
from tests.support.htp_packages import compiled
from tests.support.shared_child import GRAPH, MIB
from tests.support.standin import Answer

PIECES = {
    "split": (7 * MIB, *[3 * MIB] * 10),
    "refused": (4 * MIB, 2 * MIB, 2 * MIB, 6 * MIB, 2 * MIB),
    "one of 2 GiB": (1 << 40, 1 << 31),
    "two of 1 GiB": (1 << 40, 1 << 30, 1 << 30),  # reserved, not touched
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in, and a small graph beside it."""
    folder = standin.build(tmp_path_factory.mktemp("standin"))
    b = Builder("product")
    x, w = (b.input(name, GRAPH[name], np.float16) for name in ("x", "down"))
    b.node("MatMul", x, w, out=b.output("y", GRAPH["y"], np.float16))
    onnx.save(b.model(), folder / "product.onnx")
    (folder / "data").write_bytes(os.urandom(MIB))
    return folder


@pytest.fixture(scope="module")
def answers(library: Path) -> dict[str, Answer]:
    """Of one child to everything that takes a graph."""
    graph = library / "product.onnx"
    calls: dict[str, list[object]] = {"memory": ["memory", graph, library / "data"]}
    calls |= {name: ["pieces", graph, *sizes] for name, sizes in PIECES.items()}
    calls |= {name: [name, graph] for name in ("nth", "order", "descriptors", "host_memory")}
    return dict(zip(calls, standin.ask(library, library / "log", *calls.values()), strict=True))


def test_allocation_ownership_reading_and_release(answers: dict[str, Answer]) -> None:
    answer = answers["memory"]
    said = answer.value
    assert said["before a graph"] == "no memory for too early: it comes from a session. Load a graph first"
    assert said["aligned"] and said["zeros"]
    # Small ones share a block of 4 MiB; the large one is rounded up to a page.
    assert said["mappings"] == 2 and said["bytes"] == 4 * MIB + 3 * MIB + 4096
    assert said["standin"] == [said["mappings"], said["bytes"]]
    assert said["owned"] == [True, True, True, True, True, False, False]
    assert said["read"] == [True, None, True]
    assert re.search(r"graph product: .*(1000|memRegister)", said["run"]) and said["copied"] == 0
    assert said["left"] == [0, 0, 0, 0]
    assert said["closed"] == "cannot allocate too late: the target is closed"
    sizes = [int(size) for _, size, *_ in answer.calls("alloc")]
    assert sizes == [4 * MIB, 3 * MIB + 4096]
    assert [address for address, *_ in answer.calls("free")] == [address for address, *_ in answer.calls("alloc")][::-1]
    assert not answer.calls("refused") and not answer.calls("stray")


def test_mappings_are_split_where_large_ones_are_refused(answers: dict[str, Answer]) -> None:
    answer = answers["split"]
    said = answer.value
    assert said["sizes"] and said["apart"] and said["owned"] and said["bytes"] == 30 * MIB
    assert [int(size) // MIB for (size,) in answer.calls("refused")] == [30, 15]
    assert {int(size) // MIB for _, size, *_ in answer.calls("alloc")} == {6} and said["mappings"] == 5
    assert said["again"] == [10, 10]  # and nothing larger was tried
    assert len(said["warnings"]) == 1 and "a mapping of 31457280 bytes was refused" in said["warnings"][0]


def test_a_piece_that_is_refused_leaves_nothing_and_is_told(answers: dict[str, Answer]) -> None:
    said = answers["refused"].value
    assert said["mappings"] == 0
    assert re.search(
        r"shared memory for arena was refused \(.*rpcmem_alloc.*\): mappings of 12582912, 6291456 bytes "
        r"\(asked 12582912 bytes, had 4194304 of them mapped, 0 bytes before\)",
        said["error"],
    )


def test_more_than_two_gibibytes_in_one_piece_is_an_error(answers: dict[str, Answer]) -> None:
    answer = answers["one of 2 GiB"]
    assert "mappings of 2147483648 bytes" in answer.value["error"]
    assert not answer.calls("alloc") and not answer.calls("refused")  # the provider was not asked


def test_two_gibibytes_in_pieces_are_two_mappings(answers: dict[str, Answer]) -> None:
    answer = answers["two of 1 GiB"]
    assert answer.value["mappings"] == 2 and answer.value["bytes"] == 1 << 31


def test_each_allocation_fails_in_turn(answers: dict[str, Answer]) -> None:
    rounds = answers["nth"].value
    assert all(one["left"] == [0, 0, 0, 0] for one in rounds)
    assert "shared memory for vectors was refused" in rounds[0]["error"] and rounds[0]["mappings"] == 0
    # The arena goes on in smaller mappings.
    assert "error" not in rounds[1] and rounds[1]["mappings"] > 3
    assert "shared memory for tiles was refused" in rounds[2]["error"] and rounds[2]["mappings"] == 2
    assert len(rounds) == 4


def test_release_order(answers: dict[str, Answer]) -> None:
    events = answers["order"].value
    assert events.count("Value") == 9 and events.count("Session") == 3
    assert events[:9] == ["Value"] * 9
    # Memory and its allocator go while the session that they came from lives; the provider's library goes last.
    memory = ["AllocatorFree", "AllocatorFree", "Allocator"]
    assert events[9:15] == ["Session", "Session", *memory, "Session"]
    assert events[15:] == ["MemoryInfo", "SessionOptions", "UnregisterExecutionProviderLibrary", "Env"]


def test_without_the_library(library: Path) -> None:
    (answer,) = standin.ask(None, library / "log", ["without", library / "product.onnx"])
    assert "libcdsprpc.so cannot be loaded" in answer.value["shared"]
    assert "ESTREAM_SHARED_MEMORY=off" in answer.value["shared"] and answer.value["host"] == "None"


def test_without_descriptors(answers: dict[str, Answer]) -> None:
    said = answers["descriptors"].value
    assert "shared memory for x was refused" in said["error"] and "rpcmem_to_fd" in said["error"]
    assert said["left"] == [0, 0, 0, 0]


def test_host_memory_bound_in_a_sharing_target_is_counted(answers: dict[str, Answer]) -> None:
    said = answers["host_memory"].value
    assert said == {"copied": 2 * 2 * sum(rows * columns for rows, columns in GRAPH.values()), "y": 64.0}


def test_engines_return_everything(library: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    package, _ = compiled(tmp_path_factory.mktemp("shared"), "mixtral", num_hidden_layers=1)
    engines, agreement = standin.ask(library, library / "log", ["engines", package], ["agreement", package])
    said = engines.value
    assert said["configuration"]["shared_memory"] is True and said["configuration"]["shared_mappings"] > 1
    assert said["shared"]
    assert re.search(r"graph norm: .*(1000|memRegister)", said["prefill"]) and said["twice"] == said["prefill"]
    clean = [0, 0, 0, 0]
    assert said["rounds"] == [clean, True, clean, True, clean]
    for error, left in said["failed"]:
        assert "was refused" in error and left == clean
    assert said["budget"][0].startswith("the memory budget leaves no room") and said["budget"][1] == clean
    # Host memory bound in a sharing target gives the same logits as without sharing, and is counted.
    assert agreement.value["equal"] and agreement.value["unset"] and agreement.value["copied"] > 0


@pytest.mark.parametrize(("value", "expected"), [("on", True), ("off", False), ("auto", False), (None, False)])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("ESTREAM_SHARED_MEMORY", raising=False)
    if value is not None:
        monkeypatch.setenv("ESTREAM_SHARED_MEMORY", value)
    with open_target("htp", threads=1) as target:
        assert isinstance(target, HtpTarget) and target.shared is expected
    with open_target("htp", threads=1, shared=not expected) as target:
        assert isinstance(target, HtpTarget) and target.shared is not expected


def test_an_environment_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESTREAM_SHARED_MEMORY", "yes")
    with pytest.raises(UsageError, match=r"ESTREAM_SHARED_MEMORY cannot be 'yes' .had auto, on, off"):
        open_target("htp", threads=1)
