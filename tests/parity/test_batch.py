"""Several prompts in one pass: the same answers as one by one, each record read once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from estream import Engine
from estream.errors import PromptError
from tests.support.graph_runner import relative_error
from tests.support.packages import packed
from tests.support.tiny_checkpoints import prompt

LENGTHS = (5, 1, 300, 33)  # 300: more than one block of attention


@pytest.mark.parametrize(
    ("family", "options"), [("qwen2_moe", {}), ("mixtral", {"sliding_window": 40}), ("lfm2_moe", {"conv_bias": True})]
)
@pytest.mark.parametrize("experts", ["f32", "int8"])
def test_a_batch_gives_what_its_prompts_give_alone(
    tmp_path: Path, family: str, options: dict[str, object], experts: str
) -> None:
    package, _ = packed(tmp_path, family, experts=experts, **options)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    with Engine(package, threads=1, group=2, banks=2, max_tokens=sum(LENGTHS)) as engine:
        alone = [engine.prefill(ids, logits="all", hidden=True) for ids in prompts]
        batch = engine.prefill_batch(prompts, logits="all", hidden=True)
        last = engine.prefill_batch(prompts)
    assert [result.tokens for result in batch] == list(LENGTHS)
    for one, of_batch, of_last in zip(alone, batch, last, strict=True):
        assert one.logits is not None and of_batch.logits is not None and of_last.logits is not None
        if experts == "int8":  # a row's integer product does not depend on the rows beside it
            np.testing.assert_array_equal(of_batch.logits, one.logits)
            np.testing.assert_array_equal(of_batch.hidden, one.hidden)
        assert relative_error(of_batch.logits, one.logits) < 1e-5
        np.testing.assert_allclose(of_last.logits, of_batch.logits[-1], rtol=1e-5, atol=1e-6)


def test_each_record_is_read_once_for_all(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe", experts="int8")
    prompts = [prompt(40, seed=seed) for seed in range(3)]
    with Engine(package, threads=1, group=1, banks=2, prefetch="after-routing") as engine:
        alone = [engine.prefill(ids).stats.bytes_read for ids in prompts]
        stats = [result.stats for result in engine.prefill_batch(prompts)]
    assert stats[0] == stats[1] == stats[2]
    assert stats[0].records_read == stats[0].records_needed
    assert max(alone) <= stats[0].bytes_read < sum(alone)


def test_what_cannot_be_a_batch(tmp_path: Path) -> None:
    package, _ = packed(tmp_path, "olmoe", experts="int8")
    with Engine(package, threads=1, max_tokens=64) as engine:
        with pytest.raises(PromptError, match="the batch is empty"):
            engine.prefill_batch([])
        with pytest.raises(PromptError, match=r"the 3 prompts of the batch are too long together \(asked 69 tokens"):
            engine.prefill_batch([range(1, 24)] * 3)
        with pytest.raises(PromptError, match="outside the vocabulary"):
            engine.prefill_batch([[1, 2], [10**6]])
        assert engine.prefill_batch([[1, 2], [3]])[1].tokens == 1
