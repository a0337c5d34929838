"""Paged dense weights equal resident ones, byte for byte, at every setting; and they fail and end like experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream import Engine
from estream.errors import EStreamError, FlashError, MemoryBudgetError, TargetError
from estream.package.reader import Package
from estream.runtime import open_target
from estream.runtime.mock import Faults, MockTarget
from estream.telemetry.memory import ProcessMemory
from tests.support.faults import IDS, Reads, last, logits_of, make_package, mock, nothing_left
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

LENGTHS = (1, 33, 300)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("olmoe", "f32", {}),
    ("olmoe", "int8", {"clip_qkv": 2.0}),
    ("mixtral", "f16", {"sliding_window": 41}),
    ("mixtral", "int4", {"hidden_size": 64, "intermediate_size": 64}),
    ("qwen2_moe", "f32", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    ("qwen2_moe", "int8", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
]


@pytest.mark.parametrize(("family", "experts", "options"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_paged_equals_resident(tmp_path: Path, family: str, experts: str, options: dict[str, Any]) -> None:
    package, _ = packed(tmp_path, family, experts=experts, **options)
    asked = [(length, logits) for length in LENGTHS for logits in ("last", "all", None)]

    def outcome(engine: Engine) -> list[tuple[np.ndarray | None, np.ndarray | None]]:
        results = [engine.prefill(prompt(n, seed=n), logits=logits, hidden=logits != "last") for n, logits in asked]
        results += engine.prefill_batch([prompt(n) for n in (5, 1, 70)], logits="all")
        return [(result.logits, result.hidden) for result in results]

    with Engine(package, threads=1, dense="resident", max_tokens=300) as engine:
        expected = outcome(engine)
        assert engine.configuration["dense_weights"] == "resident"
    for choice in ({}, {"group": 1, "banks": 1, "lanes": 1, "verify_reads": True}, {"resident": "all"}):
        with Engine(package, threads=1, dense="paged", max_tokens=300, **choice) as engine:
            for found, wanted in zip(outcome(engine), expected, strict=True):
                for one, other in zip(found, wanted, strict=True):
                    assert np.array_equal(one, other) if other is not None else one is None
            assert engine.configuration["dense_weights"] == "paged"


def test_reference_lowering_too(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe", experts="int8")
    with Engine(package, threads=1, reference=True) as engine:
        expected = engine.prefill(prompt(20)).logits
    with Engine(package, threads=1, reference=True, dense="paged") as engine:
        assert np.array_equal(engine.prefill(prompt(20)).logits, expected)


def test_what_was_read_is_counted(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "qwen2_moe", num_hidden_layers=3)
    with Engine(package, threads=1) as engine, Engine(package, threads=1, dense="paged") as paged:
        for logits in ("last", None):
            rows = engine.prefill(prompt(9), logits=logits).stats.dense_bytes_read
            stats = paged.prefill(prompt(9), logits=logits).stats
            large = [
                tensor
                for tensor in paged.package.dense.values()
                if tensor.panels or tensor.name.rpartition(".")[2] in "qkvo" or tensor.name.startswith("head.")
            ]
            wanted = sum(
                -(-tensor.nbytes // 16384) * 16384
                for tensor in large
                if logits is not None or not tensor.name.startswith("head.")
            )
            assert rows is not None and stats.dense_bytes_read == rows + wanted
            assert stats.flash_wait_s is not None and stats.flash_wait_s >= 0
        held = paged.prefill(prompt(9)).stats.memory.resident_weight_bytes
        assert held is not None and held >= paged.configuration["dense_bytes"]


def test_bound_addresses_do_not_grow_with_layers_or_prefills(tmp_path: Path) -> None:
    bound, vectors = [], 0
    for layers, lengths in ((4, [40]), (4, [40, 3, 300, 40]), (8, [40])):
        package, _ = packed(tmp_path / f"{layers} {len(lengths)}", "qwen2_moe", num_hidden_layers=layers)
        target = MockTarget(inner=open_target("cpu", threads=1))
        with Engine(package, target, max_tokens=300, group=2, banks=2, dense="paged") as engine:
            for length in lengths:
                engine.prefill(prompt(length))
        bound.append(len(target.bound))
        names = [name for name in Package.open(package).dense if name.startswith("layers.1.")]
        vectors = sum(name.rpartition(".")[2] not in ("q", "k", "v", "o", "shared") for name in names)
    sizes = bound[1] - bound[0]  # other row counts of the same buffers are no new pairs
    assert sizes == 0 and bound[2] - bound[0] == 4 * vectors


def test_the_budget_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, ids = packed(tmp_path, "mixtral", num_hidden_layers=6)[0], prompt(20)
    # What the process holds beside all that: fixed, so that budgets can be exact.
    monkeypatch.setattr("estream.opening.process_memory", lambda: ProcessMemory(100 << 20, 100 << 20))

    def opened(**options: Any) -> Engine:
        return Engine(package, threads=1, max_tokens=20, **options)

    with opened() as engine:
        assert engine.configuration["dense_weights"] == "resident"
        expected, resident = engine.prefill(ids).logits, int(str(engine.configuration["dense_bytes"]))
    with pytest.raises(MemoryBudgetError, match=r"--memory (\d+) with --dense paged$") as refused:
        opened(memory="1MiB", dense="resident")
    least = int(str(refused.value).partition("--memory ")[2].split()[0])
    with opened(memory=least) as engine:
        assert engine.configuration["dense_weights"] == "paged" and engine.configuration["banks"] == 1
        assert np.array_equal(engine.prefill(ids).logits, expected)
        enough = least + resident - int(str(engine.configuration["dense_bytes"]))
    with pytest.raises(MemoryBudgetError, match=f"--memory {least}$"):
        opened(memory=least - 1)
    for memory, mode in ((enough - 1, "paged"), (enough, "resident"), ("8GiB", "resident")):
        with opened(memory=memory) as engine:
            assert engine.configuration["dense_weights"] == mode


def test_each_run_fails_in_turn(tmp_path: Path) -> None:
    package, faults = make_package(tmp_path), Faults()
    expected = logits_of(package)
    with mock(faults) as target, Engine(package, target, group=1, banks=2, dense="paged") as engine:
        last(engine)
        total = target.runs.total()
        for number in range(1, total + 1, 5):
            faults.run = target.runs.total() + number
            with pytest.raises(TargetError, match=r"graph \S+: run \d+ failed"):
                engine.prefill(IDS)
            assert np.array_equal(last(engine), expected)


def test_reads_that_fail_and_engines_that_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_package(tmp_path, experts="int8")
    expected = logits_of(package)

    def fail_at(read: int) -> Callable[[int, int, object, int], None]:
        def fail(number: int, fd: int, buffers: object, offset: int) -> None:
            if number == read:
                raise OSError(5, "Input/output error")

        return fail

    with nothing_left(monkeypatch), Engine(package, threads=1, dense="paged") as engine:
        with monkeypatch.context() as patch:
            reads = Reads(patch)
            last(engine)
        for at in range(1, reads.count // 2, 4):  # how many there are in all differs with what the lanes read ahead
            with monkeypatch.context() as patch:
                Reads(patch, fail_at(at))
                with pytest.raises(EStreamError, match="Input/output error"):
                    engine.prefill(IDS)
            assert np.array_equal(last(engine), expected)


def test_each_allocation_refused_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_package(tmp_path)
    with mock() as target, Engine(package, target, dense="paged"):
        total = len(target.allocations)
    for number in range(1, total + 1, 3):
        with nothing_left(monkeypatch), pytest.raises(TargetError, match=r"memory for .* was refused"):
            Engine(package, mock(Faults(allocation=number)), dense="paged")


def test_a_page_that_was_damaged_or_changed_while_open(tmp_path: Path) -> None:
    package = make_package(tmp_path, experts="int8")
    tensor = Package.open(package).dense["layers.1.k"]
    with Engine(package, threads=1, dense="paged", verify_reads=True) as engine:
        last(engine)
        with open(package / "dense.safetensors", "r+b") as file:
            file.seek(tensor.offset)
            byte = file.read(1)
            file.seek(tensor.offset)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(EStreamError, match="changed while it was open"):
            engine.prefill(IDS)
    with Engine(package, threads=1, dense="paged", verify_reads=True) as engine:
        for _ in range(2):
            with pytest.raises(FlashError, match=r"layers\.1\.k: the bytes read are not those that were packed"):
                engine.prefill(IDS)
    with Engine(package, threads=1, dense="paged") as engine:
        engine.prefill(IDS)  # nobody asked to verify
