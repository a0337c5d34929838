"""A small seeded part of what scripts/fuzz.py runs for longer, and the same formats under hypothesis."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream.package.writer import Packing
from tests.support.fuzz_formats import FORMATS, Format, HeaderFormat, generator

COUNTS = {"header": 1500, "index": 400, "config": 400, "model-json": 400, "dense-header": 150}


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Format]:
    """Formats by name, each made once, without the real graphs: they are files like any other here."""
    made: dict[str, Format] = {}

    def get(name: str) -> Format:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Packing, "graphs", lambda self: {"graphs/cpu/expert.onnx": b"graph"})
                made[name] = FORMATS[name](tmp_path_factory.mktemp(name) / "in")
        return made[name]

    return get


@pytest.mark.parametrize("name", FORMATS)
def test_no_crash_and_no_wrong_success(form: Callable[[str], Format], name: str) -> None:
    fuzzed = form(name)
    answers = [fuzzed.judge(fuzzed.make(generator(1, number))) for number in range(COUNTS[name])]
    assert 0 < sum(answer is None for answer in answers) < len(answers) / 2  # the inputs are hostile, but not noise


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F32", "U8", "F4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NUMBERS = st.lists(st.integers(-1, 12) | st.integers(), max_size=3)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "I64", "F4", "F8_E4M3", "X"]) | VALUES,
        "shape": NUMBERS | VALUES,
        "data_offsets": NUMBERS | VALUES,
    }
)


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=5), ENTRIES | VALUES, max_size=4), st.binary(max_size=40))
def test_headers_of_any_json(form: Callable[[str], Format], document: dict[str, Any], data: bytes) -> None:
    text = json.dumps(document).encode()
    form("header").judge(len(text).to_bytes(8, "little") + text + data)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from(["F32", "F16", "U8", "I64"]), st.lists(st.integers(0, 3), max_size=3)), max_size=5
    ),
    st.integers(-1, 1),
)
def test_consistent_headers_are_accepted_and_others_are_not(
    form: Callable[[str], Format], tensors: list[tuple[str, list[int]]], shift: int
) -> None:
    header, position = {}, 0
    for number, (dtype, shape) in enumerate(tensors):
        size = {"F32": 4, "F16": 2, "U8": 1, "I64": 8}[dtype]
        for length in shape:
            size *= length
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(max(0, position + shift))
    fuzzed = form("header")
    assert isinstance(fuzzed, HeaderFormat)
    assert (fuzzed.judge(whole) is None) == (max(0, position + shift) == position)


@settings(max_examples=200)
@given(st.data())
def test_documents_with_any_value_anywhere(form: Callable[[str], Format], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["index", "config", "model-json"]))
    fuzzed = form(name)
    document = json.loads(json.dumps(fuzzed.document))
    node = document
    while True:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(VALUES)
    fuzzed.judge(fuzzed.wrap(json.dumps(document).encode()))


def test_each_input_can_be_made_again(form: Callable[[str], Format], tmp_path: Path) -> None:
    for name in FORMATS:
        made = [form(name).make(generator(3, number)) for number in range(20)]
        assert made == [form(name).make(generator(3, number)) for number in range(20)]
        assert len(set(made)) > 15
