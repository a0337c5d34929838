"""Tiny packages with compiled contexts, in sizes that the simulator runs within a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from estream.package.contexts import FOLDER
from estream.package.reader import Package
from estream.runtime.soc import DEFAULT_SOC, find_soc
from qnn_graphs.htp.contexts import compile_contexts
from tests.support.packages import packed
from tests.support.tiny_checkpoints import TinyCheckpoint

SMALL: dict[str, Any] = {"rows": 32, "steps": 2, "ladder": ((4, 32), (2, 64))}


def compiled(folder: Path, family: str, *, experts: str = "f16", **options: Any) -> tuple[Path, TinyCheckpoint]:
    """(package, checkpoint) with contexts for the default SoC; `options` go to the checkpoint."""
    path, tiny = packed(folder, family, experts=experts, **options)
    package = Package.open(path)
    compile_contexts(package, find_soc(DEFAULT_SOC), path / FOLDER / DEFAULT_SOC, chosen=SMALL)
    return path, tiny
