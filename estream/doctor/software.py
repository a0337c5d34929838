"""Python, the packages that EStream imports, ONNX Runtime's library."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from estream.doctor.child import ask
from estream.doctor.finding import Finding, missing
from estream.errors import TargetError

AREA = "software"
_OLDEST_PYTHON = (3, 11)
_HOST = (
    ("onnx", "pack and synth write graphs with it"),
    ("safetensors", "pack reads checkpoints with it"),
    ("tokenizers", "prompts given as text need it; token ids do not"),
)


def check_software(libraries: Path | None = None) -> list[Finding]:
    """Findings of this area; ONNX Runtime is loaded in a child process, from the folder `libraries` on a phone, where
    what only packing needs is not looked for."""
    found = [_python(), _numpy(), _runtime(libraries)]
    return found if libraries is not None else [*found, *(_host(name, purpose) for name, purpose in _HOST)]


def _python() -> Finding:
    found = f"{platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"
    if sys.version_info[:2] < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return Finding(AREA, "Python", "missing", found, next_step=f"Install Python {oldest} or newer")
    return Finding(AREA, "Python", "ok", found)


def _numpy() -> Finding:
    import numpy

    return Finding(AREA, "numpy", "ok", numpy.__version__)


def _runtime(libraries: Path | None) -> Finding:
    try:
        answer = ask("runtime", *filter(None, [libraries]))
    except TargetError as error:
        return missing(AREA, "ONNX Runtime", error)
    return Finding(AREA, "ONNX Runtime", "ok", f"{answer['version']}, {answer['library']}")


def _host(name: str, purpose: str) -> Finding:
    found = version(name)
    if found is None:
        return Finding(AREA, name, "missing", f"not installed: {purpose}", "host", f"pip install {name}")
    return Finding(AREA, name, "ok", found, "host")


def version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
