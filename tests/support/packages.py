"""Packed tiny models for tests of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from estream.package.pack import pack
from tests.support.tiny_checkpoints import TinyCheckpoint, write


def packed(
    folder: Path, family: str, *, experts: str = "f32", panel: int | None = None, **options: Any
) -> tuple[Path, TinyCheckpoint]:
    """(package, checkpoint) of a tiny random model; `options` go to the checkpoint."""
    tiny = write(family, folder / "checkpoint", **options)
    out = folder / f"{family}-{experts}-{panel}.estream"
    pack(tiny.path, out, experts=experts, panel=panel)
    return out, tiny
