"""Pinned experts: the same bytes, fewer reads from the second prefill on."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from estream import Engine
from estream.errors import EStreamError, UsageError
from estream.runtime import open_target
from estream.runtime.mock import MockTarget
from tests.support.faults import IDS, Reads, last, logits_of, make_package, nothing_left
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

MODES = ("before-routing", "after-routing", "on-demand")


@pytest.mark.parametrize("experts", ["f32", "int8", "int4"])
def test_the_same_bytes_and_fewer_reads(tmp_path: Path, experts: str) -> None:
    hidden = {"hidden_size": 64} if experts == "int4" else {}
    panel = 64 if experts == "int4" else 32
    package, _ = packed(tmp_path, "qwen2_moe", experts=experts, panel=panel, moe_intermediate_size=40, **hidden)
    prompts = [prompt(length, seed=length) for length in (70, 70, 3, 70)]
    with Engine(package, threads=1, resident="all") as engine:
        expected = [engine.prefill(ids, logits="all").logits for ids in prompts]
    for pinned, group, banks, mode in product((1, 3, 64), (1, 3), (1, 3), MODES):
        with Engine(
            package, threads=1, pinned=pinned, group=group, banks=banks, prefetch=mode, max_tokens=70, verify_reads=True
        ) as engine:
            read, panels = [], engine.package.pool.panels_per_layer
            chosen, size = engine.configuration, engine.package.pool.panel.panel_bytes
            assert chosen["pinned"] == min(pinned, -(-panels // group))
            assert chosen["pinned_bytes"] == 2 * min(pinned * group, panels) * size
            for ids, logits in zip(prompts, expected, strict=True):
                result = engine.prefill(ids, logits="all")
                assert np.array_equal(result.logits, logits), (pinned, group, banks, mode)
                assert result.stats.bytes_read is not None
                read.append(result.stats.bytes_read)
            assert read[1] == read[3] or mode == "before-routing"  # what is read ahead depends on time
            assert read[1] < read[0]
            if pinned == 64:
                assert read[1] == read[2] == read[3] == 0
            held = result.stats.memory.resident_weight_bytes
            assert held is not None and held >= size * 2


def test_on_paged_dense_weights_and_in_one_pass_over_several_prompts(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe")
    prompts = [prompt(9), prompt(1), prompt(30)]
    with Engine(package, threads=1) as engine:
        expected = [result.logits for result in engine.prefill_batch(prompts)]
    with Engine(package, threads=1, pinned=2, group=1, banks=1, dense="paged") as engine:
        for _ in range(2):
            for result, logits in zip(engine.prefill_batch(prompts), expected, strict=True):
                assert np.array_equal(result.logits, logits)


def test_what_was_pinned_survives_a_prefill_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_package(tmp_path, experts="int8")
    expected = logits_of(package)

    read = 0

    def fail(number: int, fd: int, buffers: object, offset: int) -> None:
        if number == read:
            raise OSError(5, "Input/output error")

    for read in (3, 11, 17):  # noqa: B007 - of the first prefill's reads
        with nothing_left(monkeypatch), Engine(package, threads=1, pinned=99, group=1, banks=1) as engine:
            with monkeypatch.context() as patch:
                Reads(patch, fail)
                with pytest.raises(EStreamError, match="Input/output error"):
                    engine.prefill(IDS)
            counts = []
            for _ in range(3):
                with monkeypatch.context() as patch:
                    reads = Reads(patch)
                    assert np.array_equal(last(engine), expected)
                counts.append(reads.count)
            assert counts[1] == counts[2] <= counts[0]
            assert engine.prefill(IDS).stats.bytes_read == 0


def test_bound_addresses_are_fixed_when_the_engine_opens(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe", experts="int8")
    bound = []
    for lengths in ([300], [300, 3, 300, 40]):
        target = MockTarget(inner=open_target("cpu", threads=1))
        with Engine(package, target, max_tokens=300, group=2, banks=2, pinned=1) as engine:
            for length in lengths:
                engine.prefill(prompt(length))
        bound.append(len(target.bound))
    assert bound[0] == bound[1]


def test_values_that_cannot_be_meant(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    with pytest.raises(UsageError, match="--pinned must be a whole number of at least 0"):
        Engine(package, pinned=-1)
    with pytest.raises(UsageError, match="--pinned and --resident all exclude each other"):
        Engine(package, pinned=1, resident="all")
    with pytest.raises(UsageError, match="--soc is of target htp"):
        Engine(package, soc="sm8650")
