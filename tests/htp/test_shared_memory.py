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

from qnn_graphs.builder import Builder
from tests.support import standin
from tests.support.htp_packages import compiled
from tests.support.shared_child import GRAPH, MIB
from tests.support.standin import Answer


class Children:
    """Asks children that find the stand-in; `graph` is a small ONNX file."""

    def __init__(self, folder: Path) -> None:
        self.library, self.graph = standin.build(folder), folder / "product.onnx"
        self._log = folder / "log"
        b = Builder("product")
        x, w = (b.input(name, GRAPH[name], np.float16) for name in ("x", "down"))
        b.node("MatMul", x, w, out=b.output("y", GRAPH["y"], np.float16))
        onnx.save(b.model(), self.graph)

    def ask(self, function: str, *arguments: object, library: bool = True) -> Answer:
        return standin.ask(self.library if library else None, function, *arguments, log=self._log)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Children:
    return Children(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("shared"), "olmoe", experts="int8", hidden_size=64)[0]


def test_allocation_ownership_reading_and_release(children: Children, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(os.urandom(MIB))
    answer = children.ask("memory", children.graph, data)
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


def test_mappings_are_split_where_large_ones_are_refused(children: Children) -> None:
    sizes = [3 * MIB] * 10
    answer = children.ask("pieces", children.graph, 7 * MIB, *sizes)
    said = answer.value
    assert said["sizes"] and said["apart"] and said["owned"] and said["bytes"] == sum(sizes)
    assert [int(size) // MIB for (size,) in answer.calls("refused")] == [30, 15]
    assert {int(size) // MIB for _, size, *_ in answer.calls("alloc")} == {6} and said["mappings"] == 5
    assert said["again"] == [10, 10]  # and nothing larger was tried
    assert "a mapping of 31457280 bytes was refused" in answer.warnings and answer.warnings.count("refused") == 1


def test_a_piece_that_is_refused_leaves_nothing_and_is_told(children: Children) -> None:
    said = children.ask("pieces", children.graph, 4 * MIB, 2 * MIB, 2 * MIB, 6 * MIB, 2 * MIB).value
    assert said["mappings"] == 0
    assert re.search(
        r"shared memory for arena was refused \(.*rpcmem_alloc.*\): mappings of 12582912, 6291456 bytes "
        r"\(asked 12582912 bytes, had 4194304 of them mapped, 0 bytes before\)",
        said["error"],
    )


def test_more_than_two_gibibytes_in_one_piece_is_an_error(children: Children) -> None:
    answer = children.ask("pieces", children.graph, 1 << 40, 1 << 31)
    assert "mappings of 2147483648 bytes" in answer.value["error"]
    assert not answer.calls("alloc") and not answer.calls("refused")  # the provider was not asked


def test_two_gibibytes_in_pieces_are_two_mappings(children: Children) -> None:
    answer = children.ask("pieces", children.graph, 1 << 40, 1 << 30, 1 << 30)  # reserved, not touched
    assert answer.value["mappings"] == 2 and answer.value["bytes"] == 1 << 31


def test_each_allocation_fails_in_turn(children: Children) -> None:
    rounds = children.ask("nth", children.graph).value
    assert all(one["left"] == [0, 0, 0, 0] for one in rounds)
    assert "shared memory for vectors was refused" in rounds[0]["error"] and rounds[0]["mappings"] == 0
    # The arena goes on in smaller mappings.
    assert "error" not in rounds[1] and rounds[1]["mappings"] > 3
    assert "shared memory for tiles was refused" in rounds[2]["error"] and rounds[2]["mappings"] == 2
    assert len(rounds) == 4


def test_release_order(children: Children) -> None:
    events = children.ask("order", children.graph).value
    assert events.count("Value") == 9 and events.count("Session") == 3
    assert events[:9] == ["Value"] * 9
    # Memory and its allocator go while the session that they came from lives; the provider's library goes last.
    memory = ["AllocatorFree", "AllocatorFree", "Allocator"]
    assert events[9:15] == ["Session", "Session", *memory, "Session"]
    assert events[15:] == ["MemoryInfo", "SessionOptions", "UnregisterExecutionProviderLibrary", "Env"]


def test_without_the_library(children: Children) -> None:
    said = children.ask("without", children.graph, library=False).value
    assert "libcdsprpc.so" in said["shared"] and "ESTREAM_SHARED_MEMORY=off" in said["shared"]
    assert said["host"] == "None"


def test_without_descriptors(children: Children) -> None:
    said = children.ask("descriptors", children.graph).value
    assert "shared memory for x was refused" in said["error"] and "rpcmem_to_fd" in said["error"]
    assert said["left"] == [0, 0, 0, 0]


def test_host_memory_bound_in_a_sharing_target_is_counted(children: Children) -> None:
    said = children.ask("host_memory", children.graph).value
    assert said == {"copied": 2 * 2 * sum(rows * columns for rows, columns in GRAPH.values()), "y": 64.0}


def test_engines_return_everything(children: Children, package: Path) -> None:
    said = children.ask("engines", package).value
    assert said["configuration"]["shared_memory"] is True and said["configuration"]["shared_mappings"] > 1
    assert said["shared"]
    assert re.search(r"graph norm: .*(1000|memRegister)", said["prefill"]) and said["twice"] == said["prefill"]
    clean = [0, 0, 0, 0]
    assert said["rounds"] == [clean, True, clean, True, clean]
    for error, left in said["failed"]:
        assert "was refused" in error and left == clean


def test_logits_are_the_same_and_copies_are_reported(children: Children, package: Path) -> None:
    said = children.ask("agreement", package).value
    assert said["equal"] and said["unset"] and said["copied"] > 0


@pytest.mark.parametrize(("value", "expected"), [("on", True), ("off", False), ("auto", False)])
def test_the_environment_decides(children: Children, value: str, expected: bool) -> None:
    assert children.ask("environment", value).value is expected


def test_an_environment_that_cannot_be_meant(children: Children) -> None:
    assert "ESTREAM_SHARED_MEMORY cannot be 'yes' (had auto, on, off)" in children.ask("environment", "yes").value
