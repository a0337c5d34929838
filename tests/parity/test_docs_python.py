"""The Python blocks of docs/python_api.md run as printed, and the report's page explains the whole configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from estream.engine import Engine
from tests.support.faults import make_package
from tests.support.tiny_packages import QWEN2_MOE, write_checkpoint
from tests.unit.test_docs import first_cells, section

ROOT = Path(__file__).resolve().parents[2]


def test_blocks_of_the_python_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "checkpoint", QWEN2_MOE)
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "python_api.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python_api.md", "exec"), names)
    assert (tmp_path / "trace.json").is_file()


def test_report_explains_the_configuration(tmp_path: Path) -> None:
    with Engine(make_package(tmp_path), threads=1) as engine:
        keys = set(engine.configuration)
    of_npumoe, of_htp = {"tier_rows", "capacities", "groups", "cold_experts"}, {"shared_memory", "shared_mappings"}
    assert set(first_cells(section("report.md", "configuration"))) == keys | of_npumoe | of_htp
