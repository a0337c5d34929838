"""The set of (address, capacity) pairs that graphs are bound to is fixed when the engine opens."""

from __future__ import annotations

from pathlib import Path

from estream import Engine
from estream.package.reader import Package
from estream.runtime import open_target
from estream.runtime.mock import MockTarget
from estream.runtime.target import Buffer
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt


class Recorder(MockTarget):
    """A mock that runs on the cpu target and remembers where each allocation lies."""

    def __init__(self) -> None:
        super().__init__(inner=open_target("cpu", threads=1))
        self.buffers: dict[str, Buffer] = {}

    def allocate(self, nbytes: int, label: str) -> Buffer:
        self.buffers[label] = super().allocate(nbytes, label)
        return self.buffers[label]


def _pairs(package: Path, lengths: list[int]) -> int:
    target = Recorder()
    with Engine(package, backend=target, max_tokens=600, group=2, banks=2) as engine:
        for length in lengths:
            engine.prefill(prompt(length))
    return len(target.bound)


def test_pairs_do_not_grow_with_tokens_layers_or_prefills(tmp_path: Path) -> None:
    package, _ = packed(tmp_path / "two", "qwen2_moe", num_hidden_layers=2)
    once = _pairs(package, [600])
    assert _pairs(package, [600, 1, 2, 33, 130, 256, 257, 600, 599, 5]) == once
    deeper, _ = packed(tmp_path / "six", "qwen2_moe", num_hidden_layers=6)
    # Only what lies in memory for good grows with depth: the dense weights of four more layers, a shared expert being
    # bound as its gate, up and down.
    dense = sum(name.startswith("layers.1.") for name in Package.open(package).dense)
    shared = Package.open(package).shared_panels
    assert _pairs(deeper, [600]) - once == 4 * (dense - 1 + 3 * shared)


def test_expert_weights_are_bound_where_they_were_read_to(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe")
    target = Recorder()
    with Engine(package, backend=target, group=2, banks=2) as engine:
        engine.prefill(prompt(40))
        arena, panel = target.buffers["arena"], engine.package.pool.panel
        slots = range(arena.address, arena.address + arena.nbytes, panel.panel_bytes)
        parts = {(slot + part.offset, part.nbytes) for slot in slots for part in panel.parts}
        inside = {pair for pair in target.bound if arena.address <= pair[0] < arena.address + arena.nbytes}
    assert inside == parts
