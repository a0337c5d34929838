"""What the pages promise is so: quoted messages exist, every statistic is explained, links and test names are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from estream.models import families
from estream.package.layout import SCHEMES
from estream.telemetry.stats import PrefillStats

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def section(page: str, title: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(table: str) -> list[str]:
    """The names in backticks of each row's first column."""
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_report_explains_every_statistic() -> None:
    stats = PrefillStats().to_dict()
    memory = stats.pop("memory")
    assert isinstance(memory, dict)
    keys = [*stats, *(f"memory.{key}" for key in memory)]
    assert sorted(first_cells(section("report.md", "stats"))) == sorted(keys)


def test_packing_explains_every_scheme_and_family() -> None:
    text = (ROOT / "docs" / "packing.md").read_text()
    for word in (*SCHEMES, *families()):
        assert f"`{word}`" in text, word


def test_messages_of_troubleshooting_exist() -> None:
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "estream").rglob("*.py")))
    # A literal that goes on in the next line reads as one.
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]
    assert len(messages) > 20
    for message in messages:
        pieces = [piece.strip(" :") for piece in message.split("...")]
        assert any(len(piece) > 4 for piece in pieces), message
        for piece in pieces:
            assert piece in sources, f"{message}: no source says {piece!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_scripts_that_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"\bscripts/[\w/]+\.(?:sh|py)\b", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"


@pytest.mark.parametrize("title", ["Checkpoints and packages", "Run time and command line"])
def test_reliability_names_tests_that_exist(title: str) -> None:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    functions = {name for path in paths for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    files = {path.name for path in paths}
    rows = [line for line in section("reliability.md", title).splitlines() if line.startswith("| ")][2:]
    assert rows
    for row in rows:
        assert row.count(" | ") == 3, row
        cell = re.sub(r"\[[^]]*\]", "", row.rsplit(" | ", 1)[1])  # without the names of cases
        names = re.findall(r"\btest_\w+(?:\.py)?", cell)
        assert any(name in functions for name in names), row
        for name in names:
            assert name in files or name in functions, f"{name} of {row}"
