"""What `pack` and `synth` say when they are done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from estream.cli.console import Console, table
from estream.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from estream.package.writer import PackResult


def written(console: Console, out: Path, result: PackResult) -> None:
    """One line, the layout beside it, and each file with --verbose."""
    console.result(
        f"{out}: {result.family}, experts {result.experts}, dense {result.dense}, "
        f"{format_bytes(result.total_bytes)} in {format_seconds(result.seconds)}"
    )
    record = result.panels_per_expert * result.panel_bytes
    console.detail(
        table(
            [
                (
                    "records",
                    f"{format_bytes(record)} per expert: {result.panels_per_expert} panel(s) of "
                    f"{format_bytes(result.panel_bytes)}, width {result.panel_width}",
                )
            ]
        )
    )
    if console.verbose:
        console.more(table([(name, format_bytes(nbytes)) for name, nbytes in result.files.items()]))
    console.result_json(result.to_dict())
