"""Builds llama-bench from the source that llama-cpp-python publishes on PyPI. Needs cmake and a C++ compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",  # every instruction set of this processor
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
}


def build_llama_bench(folder: Path) -> Path:
    """The program; what was built before in `folder` is taken. About 10 minutes on 2 cores."""
    program = folder / "build" / "bin" / "llama-bench"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", folder]
    _run(*pip, "llama-cpp-python>=0.3.30")
    archive = sorted(folder.glob("llama_cpp_python-*.tar.gz"))[-1]
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    _run("cmake", "-S", source, "-B", folder / "build", *(f"-D{key}={value}" for key, value in OPTIONS.items()))
    _run("cmake", "--build", folder / "build", "--target", "llama-bench", "--parallel", os.cpu_count() or 1)
    return program


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
