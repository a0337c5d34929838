"""The derived checkpoint's folder and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from estream.errors import UsageError
from scripts.derive import folder, tokenizer
from scripts.derive.llama_gguf import Vocabulary

INPUTS = folder.Inputs(source_sha256="a", recipe="b", experts=8, top_k=6)
OTHER_K = folder.Inputs(source_sha256="a", recipe="b", experts=8, top_k=8)
OTHER_RECIPE = folder.Inputs(source_sha256="a", recipe="c", experts=8, top_k=6)


def _write(path: Path, text: str = "weights", inputs: folder.Inputs = INPUTS) -> None:
    with folder.replacing(path) as part:
        (part / "model.safetensors").write_text(text)
        folder.write_stamp(part, inputs)


def test_current_means_same_inputs_and_all_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not folder.is_current(out, INPUTS)
    _write(out)
    assert folder.is_current(out, INPUTS)
    assert not folder.is_current(out, OTHER_RECIPE)
    assert not folder.is_current(out, OTHER_K)
    assert folder.is_current(out, OTHER_K, any_top_k=True)
    assert not folder.is_current(out, OTHER_RECIPE, any_top_k=True)
    (out / "model.safetensors").write_text("short")
    assert not folder.is_current(out, INPUTS)


def test_an_interrupted_run_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _write(out, "old")
    with pytest.raises(KeyboardInterrupt), folder.replacing(out) as part:
        (part / "model.safetensors").write_text("half")
        raise KeyboardInterrupt
    assert (out / "model.safetensors").read_text() == "old"
    _write(out, "new")
    assert (out / "model.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_remains_of_a_killed_run_are_removed_and_those_of_a_living_one_kept(tmp_path: Path) -> None:
    dead, living = tmp_path / ".out.999999999.part", tmp_path / ".out.1.part"
    dead.mkdir()
    living.mkdir()
    _write(tmp_path / "out")
    assert not dead.exists()
    assert living.exists()


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="exists"), folder.replacing(tmp_path):
        pytest.fail("the folder was accepted")
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_linked_files_share_their_bytes(tmp_path: Path) -> None:
    _write(tmp_path / "one")
    (tmp_path / "two").mkdir()
    assert folder.link(tmp_path / "one", tmp_path / "two", ["model.safetensors"])
    assert (tmp_path / "one/model.safetensors").samefile(tmp_path / "two/model.safetensors")


def test_tokenizer_digits_spaces_bytes_and_special_tokens() -> None:
    alphabet = tokenizer.pre_tokenizers.ByteLevel.alphabet()
    tokens = ["<|end|>", *sorted(alphabet), "Ġ1", "12", "ab", "Ġab"]
    vocabulary = Vocabulary(
        tokens=tokens,
        special=[token == "<|end|>" for token in tokens],
        merges=[("Ġ", "1"), ("1", "2"), ("a", "b"), ("Ġ", "ab")],
        bos=0,
        eos=0,
        pad=0,
        unknown=0,
        chat_template="",
    )
    built = tokenizer.build(vocabulary)
    assert built.encode("ab ab 12<|end|>").tokens == ["ab", "Ġab", "Ġ", "1", "2", "<|end|>"]
    assert [built.token_to_id(token) for token in tokens] == list(range(len(tokens)))
    for text in ("Grüße, naïve – 日本語\n\n\t🦊  x", " lead", "trail ", "don't 3.14"):
        assert built.decode(built.encode(text).ids) == text
