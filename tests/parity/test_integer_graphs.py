"""The two graph sets with 8-bit products give the same bytes: products of integers are exact in both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from estream import Engine
from estream.package.pack import pack
from estream.runtime import cpu as cpu_module
from tests.support.schemes import HOST_GRAPHS
from tests.support.tiny_packages import QWEN2_MOE, write_checkpoint


@pytest.mark.skipif(HOST_GRAPHS != "cpu", reason="graph set cpu saturates without dot-product instructions")
@pytest.mark.parametrize("experts", ["int8", "int4"])
def test_both_sets_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str) -> None:
    write_checkpoint(tmp_path / "checkpoint", QWEN2_MOE | {"hidden_size": 128})
    pack(tmp_path / "checkpoint", tmp_path / "m.estream", experts=experts)
    logits = []
    for graphs in ("cpu", "cpu-u8"):
        monkeypatch.setattr(cpu_module, "host_integer_graphs", lambda chosen=graphs: chosen)
        with Engine(tmp_path / "m.estream", threads=1) as engine:
            assert engine.configuration["graphs"] == graphs
            logits.append(engine.prefill(range(1, 40), logits="all").logits)
    assert np.array_equal(logits[0], logits[1])
