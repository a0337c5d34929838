"""Which files of a checkpoint directory hold its tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from estream.errors import CheckpointError, brief
from estream.small_file import JSON_BYTES, read_small

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object, no name twice. Raises CheckpointError naming the file."""
    try:
        value = json.loads(read_small(path, JSON_BYTES), object_pairs_hook=_unique)
    except OSError as problem:
        raise CheckpointError(
            f"{path}: cannot be read: {problem.strerror}",
            next_step="Give the directory of a downloaded checkpoint, with its config.json",
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: is not JSON: {problem}", next_step="Download the file again") from problem
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: is not a JSON object", had=type(value).__name__, next_step="Download the file again"
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return result


def shards(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted.

    In this order: `model.safetensors`; what the index names; a numbered set; all safetensors files there are. Other
    safetensors files beside the first three (consolidated.safetensors, adapters) are strays and are not read.
    Numbered sets must be complete. Raises CheckpointError.
    """
    here = {path.name for path in directory.glob("*.safetensors") if path.is_file()}
    indexed = _indexed(directory)
    if SINGLE in here and SINGLE not in indexed:
        names = {SINGLE}  # what transformers prefers too; an index beside it is stale
    elif indexed and (indexed & here or not here):
        names = indexed
    else:
        names = _numbered(directory, here) or here
    for name in sorted(names):
        match = _NUMBERED.fullmatch(name)
        if match:
            names = names | _members(match)
    missing = sorted(names - here)
    if missing:
        raise CheckpointError(
            f"{directory}: missing shards: {some(missing)}",
            asked=f"{len(names)} files",
            had=f"{len(names & here)}",
            next_step="Download the missing files",
        )
    if not names:
        raise CheckpointError(f"{directory}: no safetensors file", next_step=_alternative(directory))
    return [directory / name for name in sorted(names)]


def tokenizer_files(directory: Path) -> list[Path]:
    """The files that a tokenizer may need, as far as they are there."""
    return [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]


def _indexed(directory: Path) -> set[str]:
    """The files that the index names. Only plain names: an index cannot point outside of its directory."""
    path = directory / INDEX
    if not path.is_file():
        return set()
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: has no weight_map", next_step="Delete the index; EStream does not need it")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name) or name.startswith("."):
            raise CheckpointError(
                f"{path}: {brief(tensor)} lies in a file that is not a safetensors file of this directory",
                had=brief(name),
                next_step="Delete the index; EStream does not need it",
            )
    return set(weight_map.values())


def _numbered(directory: Path, here: set[str]) -> set[str]:
    """The one numbered set among the files, complete or not; empty if there is none."""
    sets = {(match["stem"], match["total"]) for name in here if (match := _NUMBERED.fullmatch(name))}
    if len(sets) > 1:
        found = ", ".join(f"{stem}-*-of-{total}" for stem, total in sorted(sets))
        raise CheckpointError(
            f"{directory}: several sets of shards: {found}", next_step="Keep one set, or add the right index"
        )
    return {name for name in here if _NUMBERED.fullmatch(name)}


def _members(match: re.Match[str]) -> set[str]:
    stem, total = match["stem"], match["total"]
    return {f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)}


def _alternative(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{some(pickles)} may be a pickle, which runs code when it is read, and is refused: get the model as "
            "safetensors, or convert it with transformers' save_pretrained"
        )
    if any(name.endswith(".gguf") for name in names):
        return "GGUF is not read; get the original Hugging Face checkpoint in safetensors"
    return "Give the directory that holds config.json and model*.safetensors"


def some(names: list[str], limit: int = 4) -> str:
    """The first names of a list, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
