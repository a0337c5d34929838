"""Valid bytes and JSON documents turned into hostile ones, from a seeded generator."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

_NESTED = re.compile(r'"@nested(\d+)@"')
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 255, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400,
    0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, float("nan"), float("inf"), "", "a", "\x00", "\x1b[2J\n", "\ud800", "é",
    "../x", "/etc/passwd", "..", "model.safetensors", "sub/x.safetensors", "x" * 5000, "F32", "F8_E4M3", "Q4", "silu",
    "gelu", "default", "yarn", "mixtral", [], {}, [[]], [0], [0] * 300, [2**62, 2**62], [1, 1], {"a": 1}, {"": {}},
    "@nested3@", "@nested900@", "@nested980@", "@nested100000@",
]  # fmt: skip


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    """`data` after one to four edits: bits, bytes, digits, pieces cut, doubled, moved or inserted."""
    edited = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(edited) + 1)
        length = draw.choice((1, 1, 2, 8, 40))
        edit = draw.randrange(8)
        if edit == 0 and at < len(edited):
            edited[at] ^= 1 << draw.randrange(8)
        elif edit == 1 and at < len(edited):
            edited[at] = draw.choice(b'\x00\xff\x80 "{}[],:\\-.e0123456789aF_')
        elif edit == 2:
            digits = [index for index, byte in enumerate(edited) if 48 <= byte <= 57]
            if digits:
                edited[draw.choice(digits)] = draw.choice(b"0123456789")
        elif edit == 3:
            del edited[at : at + length]
        elif edit == 4:
            edited[at:at] = edited[at : at + length]
        elif edit == 5:
            piece = draw.randrange(len(edited) + 1)
            edited[at : at + length] = edited[piece : piece + length]
        elif edit == 6:
            edited[at:at] = draw.randbytes(length)
        elif edit == 7 and draw.random() < 0.3:
            del edited[at:]
    return bytes(edited)


def mutated_document(draw: random.Random, document: Any) -> Any:
    """A copy of a JSON document after one to three edits of its nodes."""
    edited = json.loads(json.dumps(document))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(edited))
        if not places:
            return copy.deepcopy(draw.choice(_VALUES))
        parent, key = draw.choice(places)
        edit = draw.randrange(8)
        if edit == 0:
            del parent[key]
        elif edit == 1:
            other, other_key = draw.choice(places)
            parent[key] = json.loads(json.dumps(other[other_key]))
        elif edit == 2 and isinstance(parent, dict):
            parent[draw.choice([*map(str, _VALUES[25:35]), f"{key}x", *parent])] = parent.pop(key)
        elif edit == 3 and isinstance(parent, list):
            parent.insert(key, json.loads(json.dumps(parent[key])))
        elif edit == 4 and type(parent[key]) is int:
            parent[key] += draw.choice((1, -1, 8, -8, parent[key], 2**32, 16384))
        elif edit == 5:
            parent[key] = [parent[key]]
        elif edit == 6 and isinstance(parent[key], str) and parent[key]:
            text = parent[key]
            at = draw.randrange(len(text))
            parent[key] = text[:at] + draw.choice("0a./\x1f") + text[at + draw.randrange(2) :]
        else:
            parent[key] = copy.deepcopy(draw.choice(_VALUES))
    return edited


def generated_document(draw: random.Random, words: list[str], depth: int = 4) -> Any:
    """A random JSON document that uses `words` as keys and values beside the hostile values."""
    kind = draw.randrange(4) if depth else 3
    if kind <= 1:
        return {draw.choice(words): generated_document(draw, words, depth - 1) for _ in range(draw.randrange(6))}
    if kind == 2:
        return [generated_document(draw, words, depth - 1) for _ in range(draw.randrange(4))]
    return copy.deepcopy(draw.choice(_VALUES)) if draw.random() < 0.6 else draw.choice(words)


def to_text(draw: random.Random, document: Any) -> bytes:
    """JSON text in one of several layouts; now and then with a name twice in one object, or nested very deep."""
    layout: dict[str, Any] = draw.choice(({"separators": (",", ":")}, {"separators": (",", ":")}, {}, {"indent": 1}))
    text = json.dumps(document, ensure_ascii=draw.random() < 0.8, **layout)
    text = _NESTED.sub(lambda match: "[" * int(match[1]) + "]" * int(match[1]), text)
    if draw.random() < 0.03:
        names = list(re.finditer(r'"[^"]*": ?[^,{}\[\]]+', text))
        if names:
            pair = draw.choice(names)
            text = f"{text[: pair.start()]}{pair[0]}, {text[pair.start() :]}"
    return text.encode("utf-8", "surrogatepass")


def words_of(document: Any) -> list[str]:
    """Every key and string of a document."""
    if isinstance(document, dict):
        return [word for key, value in document.items() for word in (key, *words_of(value))]
    if isinstance(document, list):
        return [word for value in document for word in words_of(value)]
    return [document] if isinstance(document, str) else []


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every node but the root."""
    found: list[tuple[Any, Any]] = []
    todo = [document]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            todo.append(node[key])
    return found
