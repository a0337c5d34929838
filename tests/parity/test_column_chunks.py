"""Matrices in column chunks compute what whole ones do, from pack to logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from estream import Engine
from estream.package import chunks
from estream.package.pack import pack
from tests.support.graph_runner import relative_error
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

IDS = prompt(70, seed=3)


def logits(package: Path, **options: object) -> np.ndarray:
    with Engine(package, threads=1, verify_reads=True, max_tokens=70, **options) as engine:  # type: ignore[arg-type]
        values = engine.prefill(IDS, logits="all").logits
    assert values is not None
    return values


@pytest.mark.parametrize("scheme", ["f16", "int8", "int4"])
def test_chunks_change_nothing_but_where_bytes_lie(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense, shared and routed experts, q, k, v, o and head; streamed and resident, both lowerings."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 120, "num_attention_heads": 8, "num_key_value_heads": 8}
    whole, tiny = packed(tmp_path, "qwen2_moe", experts=scheme, panel=128, mlp_only_layers=[1], **sizes)
    expected = {reference: logits(whole, resident="all", reference=reference) for reference in (False, True)}
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 128 * 32)
    cut = tmp_path / "cut.estream"
    pack(tiny.path, cut, experts=scheme, panel=128)
    with Engine(cut, threads=1) as engine:
        package = engine.package
        assert package.pool.panel.chunks == 4
        assert {"head.0.2", "layers.0.q.3", "layers.1.o.0", "layers.1.k.1"} <= set(package.dense)
    for reference, want in expected.items():
        resident = logits(cut, resident="all", reference=reference)
        np.testing.assert_array_equal(logits(cut, group=3, banks=2, reference=reference), resident)
        if scheme == "f16" or reference:
            assert relative_error(resident, want) < 1e-5
        else:
            np.testing.assert_array_equal(resident, want)
    assert relative_error(resident, tiny.logits(IDS)) < {"f16": 0.01, "int8": 0.05, "int4": 0.5}[scheme]
