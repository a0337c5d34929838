"""Streamed equals resident, byte for byte, whatever the group size, banks, lanes and prefetch mode."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from estream import Engine
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

MODES = ("before-routing", "after-routing", "on-demand")


@pytest.mark.parametrize("experts", ["f32", "int8"])
def test_every_configuration_gives_the_same_bytes(tmp_path: Path, experts: str) -> None:
    package, _ = packed(tmp_path, "qwen2_moe", experts=experts, panel=32, moe_intermediate_size=40)
    prompts = [prompt(length, seed=length) for length in (3, 70)]
    with Engine(package, threads=1, resident="all") as engine:
        expected = [engine.prefill(ids, logits="all").logits for ids in prompts]
        assert engine.configuration["arena_bytes"] == 0
    for group, banks, lanes, mode in product((1, 3, 4, 64), (1, 2, 3), (1, 2, 4), MODES):
        with Engine(package, threads=1, group=group, banks=banks, lanes=lanes, prefetch=mode, max_tokens=70) as engine:
            for ids, logits in zip(prompts, expected, strict=True):
                result = engine.prefill(ids, logits="all")
                assert np.array_equal(result.logits, logits), (group, banks, lanes, mode)
                stats = result.stats
                assert stats.records_read is not None and stats.records_needed is not None
                assert stats.records_read >= stats.records_needed
                if mode != "before-routing":
                    panel = engine.package.pool.panel.panel_bytes
                    assert stats.bytes_read == stats.records_needed * panel * engine.package.pool.panels_per_expert


def test_short_prompt_skips_groups_without_tokens(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe", num_hidden_layers=4)
    with Engine(package, threads=1, group=1, banks=1, prefetch="after-routing") as engine:
        stats = engine.prefill([5]).stats
    assert stats.records_needed == stats.records_read == 4 * 3
    assert stats.groups_skipped == 4 * (8 - 3)
