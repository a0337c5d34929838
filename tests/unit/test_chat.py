"""Chat templates: where they are found, what they see, what they cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from estream.checkpoint.chat import ChatTemplate
from estream.errors import EStreamError, UsageError

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
<|user|>{{ message['content'] | trim }}<|end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}"""
EXPECTED = "<s><|user|>What is 2 & 2?<|end|>\n<|assistant|>\n"


def write(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
@pytest.mark.parametrize("template", [TEMPLATE, [{"name": "tool_use", "template": "no"},
                                                 {"name": "default", "template": TEMPLATE}]])  # fmt: skip
def test_from_the_tokenizers_config(tmp_path: Path, bos: Any, template: Any) -> None:
    write(tmp_path, chat_template=template, bos_token=bos, eos_token=None)
    assert ChatTemplate.open(tmp_path).render(" What is 2 & 2? ") == EXPECTED


def test_a_file_of_its_own_wins(tmp_path: Path) -> None:
    write(tmp_path, chat_template="other", bos_token="<s>")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert ChatTemplate.open(tmp_path).render("What is 2 & 2?") == EXPECTED


def test_json_is_not_escaped_for_html(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{{ messages | tojson }}")
    assert ChatTemplate.open(tmp_path).render("<ä>") == '[{"role": "user", "content": "<ä>"}]'


@pytest.mark.parametrize("config", [{}, {"chat_template": None}, {"chat_template": [{"name": "x", "template": "y"}]}])
def test_none_is_a_usage_error(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"has no chat template.*without --chat"):
        ChatTemplate.open(write(tmp_path, **config))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match="has no chat template"):
        ChatTemplate.open(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system prompt') }}", "no system prompt"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ missing.field }}", "undefined"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
    ],
)
def test_what_templates_must_not_do(tmp_path: Path, template: str, message: str) -> None:
    chat = ChatTemplate.open(write(tmp_path, chat_template=template))
    with pytest.raises(EStreamError, match=f"chat template failed: .*({message})"):
        chat.render("x")


def test_what_does_not_end_or_fills_the_memory_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream.checkpoint.chat.SECONDS", 1.0)
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises(EStreamError, match="did not end within 1 s"):
        ChatTemplate.open(write(tmp_path, chat_template=endless)).render("x")
    monkeypatch.setattr("estream.checkpoint.chat.SECONDS", 10.0)
    with pytest.raises(EStreamError, match="failed: MemoryError"):
        ChatTemplate.open(write(tmp_path, chat_template="{{ 'a' * 10 ** 10 }}")).render("x")


def test_generation_blocks_are_their_content(tmp_path: Path) -> None:
    template = "{% for message in messages %}{% generation %}{{ message['content'] }}{% endgeneration %}{% endfor %}!"
    assert ChatTemplate.open(write(tmp_path, chat_template=template)).render("x") == "x!"


def test_damaged_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(EStreamError, match="failed: Expected an expression"):
        ChatTemplate.open(write(tmp_path, chat_template="{% if %}")).render("x")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(EStreamError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.open(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(EStreamError, match="is not a JSON object"):
        ChatTemplate.open(tmp_path)
