from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tokenizers

from estream.checkpoint import Tokenizer
from estream.errors import EStreamError, UsageError


def _save(folder: Path) -> None:
    """Byte-level, with a BOS of its own and training's truncation and padding left in the file."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0} | {letter: number + 1 for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_round_trip_keeps_every_token(tmp_path: Path) -> None:
    _save(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    text = "The capital of Österreich is 維也納"
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert len(ids) == 1 + len(text.encode())  # neither truncated nor padded
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.decode(ids[:4]) == "<s>The"
    assert tokenizer.decode(tokenizer.encode(" Paris")[1:]) == " Paris"
    assert tokenizer.encode("") == [0]


def test_without_a_tokenizer_the_message_names_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer.json.*--ids"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EStreamError, match=r"tokenizer.json: cannot be used.*--ids"):
        Tokenizer.open(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"cannot be imported.*--ids.*pip install tokenizers"):
        Tokenizer.open(tmp_path)
