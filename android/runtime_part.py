"""Which files of estream/ run on a phone: all that import numpy and the standard library only."""

from __future__ import annotations

from pathlib import Path

import estream

# Host side only: whole folders, and the writing half of the package. Everything else that is found must import.
EXEMPT_FOLDERS = {"estream.checkpoint", "estream.cli"}
EXEMPT_MODULES = {"estream.__main__", "estream.package.pack", "estream.package.synth", "estream.package.writer"}
ROOT = Path(estream.__file__).resolve().parents[1]


def runtime_files() -> dict[str, Path]:
    """Module name → its file, in the order of the files' names."""
    found = {}
    for path in sorted((ROOT / "estream").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        folder = ".".join(name.split(".")[:2])
        if folder not in EXEMPT_FOLDERS and name not in EXEMPT_MODULES:
            found[name] = path
    return found
