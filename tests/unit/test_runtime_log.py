"""What ONNX Runtime logs is kept, and told once."""

from __future__ import annotations

from estream.runtime.log import RuntimeLog


def log(*messages: bytes | None) -> RuntimeLog:
    made = RuntimeLog()
    for message in messages:
        made.function(None, 3, b"onnxruntime", b"", b"file.cc:1 Function", message)
    return made


def test_lines_in_order_and_once() -> None:
    kept = log(b"QNN_BACKEND_ERROR_CANNOT_INITIALIZE\n", b"second", b"second", None, b"")

    assert kept.take() == "QNN_BACKEND_ERROR_CANNOT_INITIALIZE | second"
    assert kept.take() is None


def test_what_the_error_says_already_is_not_said_again() -> None:
    kept = log(b"graph x: broken", b"broken", b"cause")

    assert kept.take("graph x: broken, and more") == "cause"


def test_a_flood_keeps_its_end() -> None:
    kept = log(*(b"line %d" % number for number in range(100)), b"x" * 5000, b"\xff")

    words = (kept.take() or "").split(" | ")
    assert words[:-2] == [f"line {number}" for number in range(94, 100)]
    assert words[-2:] == ["x" * 300, "\N{REPLACEMENT CHARACTER}"]
