"""tokenizer.json and tokenizer_config.json from a GGUF's vocabulary (SmolLM2: byte-level BPE, single digits)."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .llama_gguf import Vocabulary


def build(vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer with the vocabulary's ids. Digits stand alone; text gets no leading space and no bos token."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=vocabulary.merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, is_special in zip(vocabulary.tokens, vocabulary.special, strict=True) if is_special]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write(vocabulary: Vocabulary, context: int, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json. `context`: the model's longest prompt."""
    build(vocabulary).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": vocabulary.tokens[vocabulary.bos],
        "eos_token": vocabulary.tokens[vocabulary.eos],
        "pad_token": vocabulary.tokens[vocabulary.pad],
        "unk_token": vocabulary.tokens[vocabulary.unknown],
        "chat_template": vocabulary.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
